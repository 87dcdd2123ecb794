"""The servers' outer rounds, reckoned and moved: the mean of what all clusters bring, weighted by samples.

It is one all-reduce of what each brings, times its share, on the schedule that the planner finds for the servers' part
of the network, slice by slice, as the engine's reference does (:mod:`syncline.runtime.slicerun`). A server sends about
2 (C-1)/C of a vector, however many clusters there are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import cast

import torch

from syncline.fabric import Transport
from syncline.fabric.slice_executor import SLICE_TAGS, SlicedCall
from syncline.runtime.dataflow import Dataflows
from syncline.runtime.port import BULK_CLASS, Port
from syncline.runtime.slicerun import SliceRun
from syncline.runtime.tags import NUMBER_MASK, first_tag
from syncline.schedule import Collective, Layout, Schedule, choose
from syncline.tensors.memory import bytes_of, reduction_for
from syncline.topology import Topology
from syncline.updates.clustered.messages import Participants, Run
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

    def __init__(self, port: Port, topology: Topology, *, stream: int) -> None:
        self._port = port
        self._topology = topology
        self._stream = stream
        self._schedules: dict[Participants, Schedule] = {}
        self._calls: dict[Run, ServersCall] = {}
        self._abandoned: list[ServersCall] = []
        self.sent_bytes = 0

    def run(self, run: Run, finish: Finish) -> None:
        """Begin an outer round."""
        place = [server for _, server in run.participants].index(self._port.rank)
        mean: Vector = run.payload.copy().scale(shares(run.samples)[place])
        schedule = self._schedule(run.participants, mean.shape.num_bytes)
        parts = [
            (part, Layout.build(schedule, part.numel(), max(1, SLICE_BYTES // part.element_size())))
            for part in mean.parts
        ]
        self._start(run, schedule, parts, lambda: finish(run, mean))

    def abandon(self, run: Run) -> None:
        """Give up an outer round."""
        call = self._calls.pop(run, None)
        if call is not None:
            call.abandon()
            self._abandoned.append(call)

    def _schedule(self, participants: Participants, num_bytes: int) -> Schedule:
        if participants not in self._schedules:
            if len(self._schedules) >= MAX_SCHEDULES:
                self._schedules.clear()
            servers = self._topology.restricted([rank for _, rank in participants])
            self._schedules[participants] = choose(servers, Collective.ALL_REDUCE, num_bytes)
        return self._schedules[participants]

    def _start(self, run: Run, schedule: Schedule, parts: Parts, done: Callable[[], None]) -> None:
        attempt = zlib.crc32(json.dumps([run.record.index, run.participants, schedule.digest]).encode()) & NUMBER_MASK

        def finished() -> None:
            self.sent_bytes += self._calls.pop(run).sent_bytes
            for abandoned in self._abandoned:
                abandoned.forget()
            self._abandoned.clear()
            done()

        servers = [rank for _, rank in run.participants]
        tag = first_tag(self._stream, attempt, FIRST_SLICE)
        call = self._calls[run] = ServersCall(self._port, servers, schedule, parts, tag=tag, on_done=finished)
        call.start()


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
        self.transport = cast("Transport", self)  # of which slices use three methods
        self.temporary_bytes = 0
        self.on_crash: Callable[[Exception], None] = _crash
        self.sent_bytes = 0
        self._port = port
        self._ranks = tuple(ranks)
        self._on_done = on_done
        self._is_abandoned = False
        self._runs: list[SliceRun] = []
        dataflows = Dataflows(self._ranks.index(port.rank))
        for tensor, layout in parts:
            sliced = SlicedCall(
                slices=dataflows.slices(schedule, layout),
                buffer=bytes_of(tensor),
                reduction=reduction_for(tensor.dtype),
                urgency=URGENCY,
                connection_class=BULK_CLASS,
                number=0,
                tag=tag + len(self._runs) * SLICE_TAGS,
                signature=0,
                on_over=lambda: None,
                on_mismatch=lambda *_: None,
            )
            self._runs += [SliceRun(sliced, number, self, on_end=self._ended) for number in range(len(sliced.slices))]
        self._num_open = len(self._runs)

    def start(self) -> None:
        """Begin all slices."""
        for run in self._runs:
            run.advance(run.dataflow.first)
        if not self._runs:
            self._port.call_soon(self._finish)

    def abandon(self) -> None:
        """Do nothing more; what comes is thrown away."""
        self._is_abandoned = True

    def forget(self) -> None:
        """Give back the receives that nothing came for."""
        self._is_abandoned = True
        for run in self._runs:
            run.stop()

    def send(
        self,
        peer: int,
        tag: int,
        payload: memoryview,
        *,
        signature: int,  # noqa: ARG002 - the port has its own
        urgency: int,
        connection_class: int,
        on_sent: Callable[[], None],
    ) -> None:
        """Send to a rank of the schedule."""
        if not self._is_abandoned:
            self.sent_bytes += payload.nbytes
            self._port.send(
                self._ranks[peer],
                tag,
                payload,
                urgency=urgency,
                connection_class=connection_class,
                on_sent=on_sent,
            )

    def receive(
        self,
        peer: int,
        tag: int,
        destination: memoryview,
        *,
        signature: int,  # noqa: ARG002 - the port has its own
        urgency: int,
        on_received: Callable[[], None],
        on_mismatch: Callable[[int], None],  # noqa: ARG002 - the port's owner hears of it
    ) -> None:
        """Receive from a rank of the schedule."""
        self._port.receive(self._ranks[peer], tag, destination, urgency=urgency, on_received=on_received)

    def cancel(self, peer: int, tag: int) -> None:
        """Forget a receive."""
        self._port.cancel(self._ranks[peer], tag)

    def heard(self, peer: int) -> None:
        """Note nothing: whoever is lost, the members' protocol knows."""

    def _ended(self, run: SliceRun) -> None:  # noqa: ARG002 - any of them
        self._num_open -= 1
        if not self._num_open:
            self._finish()

    def _finish(self) -> None:
        if not self._is_abandoned:
            self._on_done()


def _crash(error: Exception) -> None:
    """Let the loop's owner hear of our own mistake."""
    raise error
