"""The servers' outer rounds, reckoned and moved: the mean of what all clusters bring, weighted by samples.

It is one all-reduce of what each brings, times its share, on the schedule that the planner finds for the servers' part
of the network; the engine's reference executes it. A server sends about 2 (C-1)/C of a vector, however many clusters
there are.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Unpack, cast

import torch

from syncline.fabric import Transport
from syncline.fabric.protocol import ReceiveSettings, SendSettings
from syncline.fabric.slice_executor import NUMBER_MASK, SLICE_TAGS, SlicedCall, first_tag
from syncline.observe import Trace
from syncline.runtime.dataflow import Dataflows
from syncline.runtime.port import BULK_CLASS, Port
from syncline.runtime.python_slice_executor import PythonExecution, PythonSliceExecutor
from syncline.schedule import Collective, Layout, Schedule, choose
from syncline.tensors.memory import bytes_of, reduction_for
from syncline.topology import Topology
from syncline.updates.clustered.messages import Run
from syncline.updates.flat import Vector, shares

SLICE_BYTES = 1 << 20
MAX_SCHEDULES = 256
FIRST_SLICE = 16
"""Slices of outer rounds are numbered from here; below are the lanes of messages."""

URGENCY = 1
"""After the heads and payloads of messages: those, others wait for."""

Parts = Sequence[tuple[torch.Tensor, Layout]]
Finish = Callable[[Run, Vector], None]


class OuterRounds:
    """Runs the outer rounds that the protocol asks for. On the loop's thread alone."""

    def __init__(self, port: Port, topology: Topology, *, stream: int, trace: Trace) -> None:
        self._port = port
        self._trace = trace
        self._plan = lru_cache(MAX_SCHEDULES)(partial(_plan, topology))
        self._stream = stream
        self._calls: dict[Run, ServersCall] = {}
        self._abandoned: list[ServersCall] = []
        self.sent_bytes = 0

    def run(self, run: Run, finish: Finish) -> None:
        """Begin an outer round."""
        servers = tuple(server for _, server in run.participants)
        mean: Vector = run.payload.copy().scale(shares(run.samples)[servers.index(self._port.rank)])
        schedule = self._plan(servers, mean.shape.num_bytes)
        parts = [
            (part, Layout.build(schedule, part.numel(), max(1, SLICE_BYTES // part.element_size())))
            for part in mean.parts
        ]
        attempt = zlib.crc32(json.dumps([run.record.index, run.participants, schedule.digest]).encode()) & NUMBER_MASK

        start_ns = self._trace.now_ns()

        def finished() -> None:
            self.sent_bytes += call.sent_bytes
            del self._calls[run]
            self._trace.span(
                f"{run.record.kind.value} among {len(servers)} servers",
                "server",
                start_ns,
                self._trace.now_ns(),
                term=run.record.term,
                servers=list(servers),
                samples=run.samples,
                sent_bytes=call.sent_bytes,
            )
            for abandoned in self._abandoned:
                abandoned.forget()
            self._abandoned.clear()
            finish(run, mean)

        tag = first_tag(self._stream, attempt, FIRST_SLICE)
        call = self._calls[run] = ServersCall(self._port, servers, schedule, parts, tag=tag, on_done=finished)
        call.start()

    def abandon(self, run: Run) -> None:
        """Give up an outer round."""
        call = self._calls.pop(run, None)
        if call is not None:
            call.abandon()
            self._abandoned.append(call)


def _plan(topology: Topology, servers: Sequence[int], num_bytes: int) -> Schedule:
    return choose(topology.restricted(servers), Collective.ALL_REDUCE, num_bytes)


class ServersCall:
    """One run of ``schedule`` among ``ranks``; ``on_done`` is told once, on the loop's thread.

    The engine ends the calls of all ranks when one is lost. An outer round is between servers only and must outlive the
    loss of one. So one that is given up sends nothing more, but its messages still find where to go, in memory of its
    own, until it is forgotten. To its slices it is the transport.
    """

    def __init__(
        self,
        port: Port,
        ranks: Sequence[int],
        schedule: Schedule,
        parts: Parts,
        *,
        tag: int,
        on_done: Callable[[], None],
    ) -> None:
        self.sent_bytes = 0
        self._port = port
        self._ranks = tuple(ranks)
        self._on_done = on_done
        self._is_abandoned = False
        dataflows = Dataflows(self._ranks.index(port.rank))
        clock, transport = asyncio.get_running_loop(), cast("Transport", self)  # of which slices use three methods
        executor = PythonSliceExecutor(transport, clock, on_crash=_crash)
        self._executions: list[PythonExecution] = []
        for number, (tensor, layout) in enumerate(parts):
            sliced = SlicedCall(
                slices=dataflows.slices(schedule, layout),
                buffer=bytes_of(tensor),
                reduction=reduction_for(tensor.dtype),
                urgency=URGENCY,
                connection_class=BULK_CLASS,
                number=number,
                tag=tag,
                signature=0,
                on_over=self._look,
                on_mismatch=lambda *_: None,
            )
            tag += len(sliced.slices) * SLICE_TAGS
            self._executions.append(executor.open(sliced))

    def start(self) -> None:
        """Begin all slices."""
        for execution in self._executions:
            execution.start()

    def abandon(self) -> None:
        """Do nothing more; what comes is thrown away."""
        self._is_abandoned = True

    def forget(self) -> None:
        """Give back the receives that nothing came for."""
        for execution in self._executions:
            execution.stop()

    def send(self, peer: int, tag: int, payload: memoryview, **settings: Unpack[SendSettings]) -> None:
        """Send to a rank of the schedule; the port has a signature of its own."""
        if not self._is_abandoned:
            self.sent_bytes += payload.nbytes
            urgency, connection_class = settings["urgency"], settings["connection_class"]
            where, on_sent = {"urgency": urgency, "connection_class": connection_class}, settings.get("on_sent")
            self._port.send(self._ranks[peer], tag, payload, **where, on_sent=on_sent)

    def receive(self, peer: int, tag: int, destination: memoryview, **settings: Unpack[ReceiveSettings]) -> None:
        """Receive from a rank of the schedule; of a mismatch the port's owner hears."""
        urgency, on_received = settings["urgency"], settings["on_received"]
        self._port.receive(self._ranks[peer], tag, destination, urgency=urgency, on_received=on_received)

    def cancel(self, peer: int, tag: int) -> None:
        """Forget a receive."""
        self._port.cancel(self._ranks[peer], tag)

    def _look(self) -> None:
        """Note that a part is over; all begin in one go, so one that has not begun is not over."""
        if not self._is_abandoned and all(execution.is_over for execution in self._executions):
            self._on_done()


def _crash(error: Exception) -> None:
    """Let the loop's owner hear of our own mistake."""
    raise error
