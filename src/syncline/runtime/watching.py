"""What a rank tells rank 0 while the job runs: its pace, every few seconds, and all that it does when somebody asks.

Somebody asks by :meth:`Watching.examine`: all ranks then record for some seconds what a trace would have, and answer
with that, their open calls, and the stacks of their threads, in as many control messages as it takes. A rank whose
communication thread does not run answers nothing, so rank 0 says of it what it knows: when it was last heard, and what
the kernel says of its process. All of this happens on the communication loop's thread.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from syncline.errors import ConfigurationError
from syncline.fabric import MAX_CONTROL_BYTES, Fabric
from syncline.observe import Trace, say
from syncline.runtime import control
from syncline.runtime.control import ControlError, ControlKind
from syncline.runtime.flight_recorder import FlightRecorder
from syncline.runtime.loop import CommunicationLoop
from syncline.runtime.whereabouts import ThreadWatch, process_namespace, process_state, thread_stacks
from syncline.topology import Topology

if TYPE_CHECKING:
    from syncline.runtime.lookout import Lookout
    from syncline.runtime.statistics import FleetStatistics

ANSWER_S = 4.0
"""How long rank 0 waits for answers once all ranks have recorded."""
LOOK_S = 0.25
"""Between two looks at where the training thread is."""
FIRST_S = 1.0
"""After a start, until a rank first tells of its pace: many of one machine have to load what they call just then."""
MOST_SECONDS = 60.0
MOST_EVENTS = 2500
"""Of a rank's answer, the last ones: that many take some 19 ms to encode."""
_PART_BYTES = MAX_CONTROL_BYTES - 32
_MOST_PARTS = 64


class Watching:
    """One rank's part in it; ``take`` returns all that it has counted."""

    def __init__(
        self,
        loop: CommunicationLoop,
        fabric: Fabric,
        topology: Topology,
        *,
        trace: Trace,
        recorder: FlightRecorder,
        members: tuple[int, ...],
        take: Callable[[], FleetStatistics],
        is_over: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._fabric = fabric
        self._topology = topology
        self._trace = trace
        self._recorder = recorder
        self._members = members
        self._take = take
        self._is_over = is_over
        self._progress = fabric.progress
        self._thread = ThreadWatch(fabric.progress)
        self._lookout: Lookout | None = None
        self._live = ""
        self._hearing = False
        self._query = 0
        self._answers: dict[int, dict[int, bytes]] | None = None
        self._num_parts: dict[int, int] = {}
        self._answered = asyncio.Event()
        self.on_dump: Callable[[], None] = lambda: None
        """Writes the last calls of this rank."""

    def begin(self, behind_s: float, live: str) -> None:
        """Tell rank 0 every few seconds how this rank fares; there, say on standard error who holds the others up."""
        self._live = live
        if self._fabric.rank in (0, 1):  # rank 1 hears of rank 0 alone, of whom somebody must tell as well
            from syncline.runtime.lookout import Lookout  # who tells only needs it later

            now_s, limit_s = self._loop.clock.time(), behind_s if self._fabric.rank == 0 else math.inf
            describe = self._fabric.describe_peer
            self._lookout = Lookout(self._topology, describe, self._describe_silent, behind_s=limit_s, now_s=now_s)
        self._look()
        self._loop.clock.call_later(FIRST_S, self._tell_pace)

    def hear(self, peer: int, kind: ControlKind, number: int, body: bytes) -> None:
        """Take what another rank tells of this; :class:`ControlError` for what it may not."""
        if kind is ControlKind.PACE:
            if self._lookout is not None:
                from syncline.runtime.lookout import PaceReport

                report = PaceReport.decode(body, self._fabric.world_size)
                self._lookout.hear(peer, report, self._loop.clock.time())
        elif kind is ControlKind.ANSWER:
            self._take_answer(peer, number, body)
        elif peer != 0:
            raise ControlError("what rank 0 alone may ask")
        elif kind is ControlKind.DUMP:
            self.on_dump()
        else:
            self._record(number, min(MOST_SECONDS, control.decode_examine(body)))

    def dump(self) -> None:
        """Let all ranks write their last calls now; rank 0 calls this."""
        self.on_dump()
        self._tell_all(control.encode_dump())

    def view(self) -> dict[str, Any] | None:
        """Return what is known of all ranks now (see :meth:`Lookout.view`); None but on rank 0 of several."""
        lookout = self._lookout if self._fabric.rank == 0 else None
        return None if lookout is None else lookout.view(self._loop.clock.time())

    def count(self) -> None:
        """Record the sums until now of what each link has carried, and of what this rank has lacked."""
        if self._trace.enabled:
            moved = {f"{link.child} {link.direction}": sent for link, sent in self._take().link_bytes.items()}
            self._trace.counter("bytes on links", moved)
            self._trace.counter("seconds without a processor", self._progress.shortage.seconds())

    def tell_trace(self) -> None:
        """Let the trace have what its readers need to know of the job."""
        network = self._topology.to_yaml() if self._fabric.rank == 0 else None  # the same on all ranks
        self._trace.about("job", rank=self._fabric.rank, members=list(self._members), topology=network)
        self.count()

    async def examine(self, seconds: float) -> dict[str, Any]:
        """Ask all ranks what they do; returns their answers, as :mod:`syncline.report.job_trace` reads them.

        Raises :class:`ConfigurationError` while another one asks, and but on rank 0.
        """
        if self._fabric.rank != 0:
            raise ConfigurationError("rank 0 alone asks all ranks; ask its port")
        if self._answers is not None:
            raise ConfigurationError("somebody else asks the ranks just now; ask again in some seconds")
        self._query, self._answers, self._num_parts = self._query + 1, {}, {}
        self._answered.clear()
        try:
            self._tell_all(control.encode_examine(self._query, seconds))
            self._record(self._query, seconds)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), seconds + ANSWER_S)
            whole = {rank: self._whole(rank) for rank in sorted(self._answers)}
        finally:
            self._answers = None
        answers = {str(rank): base64.b64encode(blob).decode() for rank, blob in whole.items() if blob}
        absent = [self._describe_absent(rank) for rank in range(self._fabric.world_size) if not whole.get(rank)]
        return {"answers": answers, "absent": absent, "namespace": process_namespace()}

    def _tell_all(self, payload: bytes) -> None:
        self._fabric.tell([rank for rank in range(self._fabric.world_size) if rank != self._fabric.rank], payload)

    def _peers(self) -> list[int]:
        ranks = range(self._fabric.world_size)
        return [peer for peer in ranks if peer != self._fabric.rank and not self._fabric.is_lost(peer)]

    # --- the pace ---

    def _look(self) -> None:
        if not self._is_over() and self._progress.watcher is self:
            self._thread.look()
            self._loop.clock.call_later(LOOK_S, self._look)

    def _tell_pace(self) -> None:
        if self._is_over() or self._progress.watcher is not self:
            return
        from syncline.runtime.lookout import report_interval_s, take_pace  # many ranks that start have no time for it

        report = take_pace(self._progress, self._take(), self._thread)
        self.count()
        now_s, rank = self._loop.clock.time(), self._fabric.rank
        if self._lookout is not None:
            if rank == 0:
                self._lookout.hear(rank, report, now_s)
            for peer in filter(self._fabric.is_lost, set(range(self._fabric.world_size)) - {rank}):
                self._lookout.forget(peer)
            for line in self._lookout.look(now_s):
                self._trace.instant(line, "lookout")
                say(line)
        if self._live and (view := self.view()) is not None:
            from syncline.runtime.live import write_view  # where somebody looks

            write_view(view, self._live)
        listener = 1 if rank == 0 else 0
        if listener in self._peers():
            self._fabric.pass_on(listener, control.encode_pace(report.encode()))
        self._loop.clock.call_later(report_interval_s(self._fabric.world_size), self._tell_pace)

    def _describe_silent(self, rank: int, pid: int) -> str:
        """Say what is known of a rank that tells nothing any more: of its process, or else of its heartbeats."""
        state = process_state(pid) if pid and self._fabric.is_local(rank) else ""
        if state:
            return state
        if rank in self._fabric.statistics().suspect_peers:
            return "nor do heartbeats come: its process or machine stands still, or the network between"
        return "its heartbeats go on: one call holds its Python interpreter, or it has no processor"

    # --- what all ranks are asked ---

    def _record(self, query: int, seconds: float) -> None:
        if self._hearing:
            return
        self._hearing = True
        self._trace.begin_hearing(MOST_EVENTS)
        self._progress.on_span = self._trace.span
        self.tell_trace()
        self._loop.clock.call_later(seconds, self._answer, query)

    def _answer(self, query: int) -> None:
        self._hearing = False
        if self._is_over():
            return
        self.count()
        rank = self._members[self._fabric.rank]
        name = self._fabric.describe_peer(self._fabric.rank)
        events = self._trace.end_hearing(rank=rank, host=self._topology.host_of(self._fabric.rank).name)
        if not self._trace.enabled:
            self._progress.on_span = None
        stacks, progress = thread_stacks(), self._progress
        told = {
            "rank": rank,
            "name": name,
            "pid": os.getpid(),
            "phase": progress.phase,
            "is_waiting": progress.is_idle,
            "steps": progress.num_steps,
            "calls": self._recorder.last_calls(),
            "thread": str(progress.thread),
            "stacks": {str(number): stack for number, stack in stacks.items()},
            "events": events,
        }
        blob = zlib.compress(json.dumps(told, default=str).encode(), 1)
        parts = [blob[at : at + _PART_BYTES] for at in range(0, len(blob), _PART_BYTES)][:_MOST_PARTS]
        for index, part in enumerate(parts):
            body = control.encode_answer(query, index, len(parts), part)
            if self._fabric.rank == 0:
                self._take_answer(0, *control.decode_head(body)[2:])
            elif not self._fabric.is_lost(0):
                self._fabric.pass_on(0, body)

    def _take_answer(self, peer: int, query: int, body: bytes) -> None:
        index, num_parts, part = control.decode_answer(body)
        if index >= num_parts or num_parts > _MOST_PARTS:
            raise ControlError(f"part {index} of {num_parts} of an answer")
        if self._answers is None or query != self._query & 0xFFFFFFFF:
            return  # it is late
        self._num_parts[peer] = num_parts
        self._answers.setdefault(peer, {})[index] = part
        if all(self._whole(rank) for rank in (0, *self._peers())):
            self._answered.set()

    def _whole(self, rank: int) -> bytes:
        """Return the answer of a rank, or nothing if some of it is missing."""
        parts = (self._answers or {}).get(rank, {})
        return b"".join(parts[index] for index in sorted(parts)) if len(parts) == self._num_parts.get(rank) else b""

    def _describe_absent(self, rank: int) -> dict[str, Any]:
        told = {"rank": self._members[rank], "name": self._fabric.describe_peer(rank)}
        if self._fabric.is_lost(rank):
            return told | {"why": "it is lost, or has left"}
        silent_s, pid = (None, 0) if self._lookout is None else self._lookout.last_heard(rank, self._loop.clock.time())
        is_local = self._fabric.is_local(rank)
        why = self._describe_silent(rank, pid)
        return told | {"why": why, "silent_s": silent_s, "pid": pid if is_local else 0}
