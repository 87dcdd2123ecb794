"""An executor: one run of a schedule among some of the ranks, on a port, slice by slice.

The engine runs collectives of all ranks and ends them all when a rank is lost. An outer round is between servers only
and must outlive the loss of one; so it has its own small executor. Every receive is posted at the start, into memory of
its own: an executor that is given up leaves nothing half written, and its messages still find where to go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from syncline.runtime.port import BULK_CLASS, Port
from syncline.schedule import Receive, Schedule
from syncline.tensors.memory import bytes_of

URGENCY = 1
"""After the heads and payloads of messages: those, others wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of one tensor that goes through the schedule by itself: the element at which each cut falls."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]

    def atoms(self, first: int, last: int) -> torch.Tensor:
        """Return the elements of the atoms [first, last)."""
        return self.tensor[self.offsets[first] : self.offsets[last]]


class ScheduleExecutor:
    """Runs ``schedule`` among ``ranks``; ``on_done`` is told once, on the loop's thread."""

    def __init__(
        self,
        port: Port,
        schedule: Schedule,
        ranks: Sequence[int],
        slices: Sequence[Slice],
        *,
        first_tags: Sequence[int],
        on_done: Callable[[], None],
    ) -> None:
        self._port = port
        self._ranks = tuple(ranks)
        self._phases = schedule.program(self._ranks.index(port.rank)).phases
        self._on_done = on_done
        self._posted: list[tuple[int, int]] = []
        self._num_open = len(slices)
        self._is_abandoned = False
        self.sent_bytes = dict.fromkeys(self._ranks, 0)
        self._slices = [_SliceExecutor(self, piece, tag) for piece, tag in zip(slices, first_tags, strict=True)]

    def start(self) -> None:
        """Post all receives, then begin to send."""
        for piece in self._slices:
            piece.post(self._phases)
        for piece in self._slices:
            piece.go_on()
        if not self._slices:
            self._port.call_soon(self._finish)

    def abandon(self) -> None:
        """Do nothing more; what comes is thrown away."""
        self._is_abandoned = True

    def forget(self) -> None:
        """Give back the receives that nothing came for."""
        self._is_abandoned = True
        for peer, tag in self._posted:
            self._port.cancel(peer, tag)

    def send(self, peer: int, tag: int, data: torch.Tensor, on_sent: Callable[[], None]) -> None:
        """Send to a rank of the schedule."""
        self.sent_bytes[self._ranks[peer]] += data.numel() * data.element_size()
        memory = bytes_of(data.contiguous())
        self._port.send(
            self._ranks[peer],
            tag,
            memory,
            urgency=URGENCY,
            connection_class=BULK_CLASS,
            on_sent=self._unless_abandoned(on_sent),
        )

    def receive(self, peer: int, tag: int, into: torch.Tensor, on_received: Callable[[], None]) -> None:
        """Receive from a rank of the schedule."""
        self._posted.append((self._ranks[peer], tag))
        self._port.receive(
            self._ranks[peer],
            tag,
            bytes_of(into),
            urgency=URGENCY,
            on_received=self._unless_abandoned(on_received),
        )

    def slice_done(self) -> None:
        """Note that a slice has gone through."""
        self._num_open -= 1
        if self._num_open == 0:
            self._finish()

    def _finish(self) -> None:
        if not self._is_abandoned:
            self._on_done()

    def _unless_abandoned(self, callback: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if not self._is_abandoned:
                callback()

        return call


class _SliceExecutor:
    """One slice on its way: a phase ends when its sends have left and its receives are there."""

    def __init__(self, executor: ScheduleExecutor, piece: Slice, first_tag: int) -> None:
        self._executor = executor
        self._piece = piece
        self._first_tag = first_tag
        self._phase = -1
        self._num_awaited: list[int] = []
        self._landed: dict[tuple[int, int], torch.Tensor] = {}

    def post(self, phases: Sequence) -> None:  # type: ignore[type-arg]
        self._phases = phases
        self._num_awaited = [0] * len(phases)
        for number, phase in enumerate(phases):
            for place, receive in enumerate(phase.receives):
                source = self._piece.atoms(receive.first, receive.last)
                if source.numel():
                    landing = torch.empty_like(source)
                    self._landed[number, place] = landing
                    self._num_awaited[number] += 1
                    tag = self._first_tag + receive.index
                    self._executor.receive(receive.peer, tag, landing, partial(self._came, number))

    def go_on(self) -> None:
        """Begin the next phase, or end."""
        self._phase += 1
        if self._phase == len(self._phases):
            self._executor.slice_done()
            return
        phase = self._phases[self._phase]
        sends = [(send, self._piece.atoms(send.first, send.last)) for send in phase.sends]
        sends = [(send, data) for send, data in sends if data.numel()]
        self._num_awaited[self._phase] += len(sends)
        number = self._phase
        for send, data in sends:
            self._executor.send(send.peer, self._first_tag + send.index, data, partial(self._came, number))
        self._end_if_complete(number)

    def _came(self, number: int) -> None:
        self._num_awaited[number] -= 1
        self._end_if_complete(number)

    def _end_if_complete(self, number: int) -> None:
        if number == self._phase and self._num_awaited[number] == 0:
            for place, receive in enumerate(self._phases[number].receives):
                self._apply(receive, self._landed.pop((number, place), None))
            self.go_on()

    def _apply(self, receive: Receive, landed: torch.Tensor | None) -> None:
        if landed is None:
            return
        target = self._piece.atoms(receive.first, receive.last)
        if receive.add:
            target.add_(landed)
        else:
            target.copy_(landed)
