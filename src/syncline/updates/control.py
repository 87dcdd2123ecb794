"""The control stream: the small calls of an update rule, made in the same order by every rank's training thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from syncline.runtime.communicator import Communicator
from syncline.runtime.direct import Messages
from syncline.runtime.failures import EVERY_RANK
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.tensors.memory import summands_of

URGENCY = -1
"""Before every bucket: these calls are small, and everybody waits for them."""


def every_rank(call: str) -> str:
    """Return the label of what happens in a user's ``call``: in errors it tells those who called it on some ranks."""
    return call + EVERY_RANK


class ControlStream:
    """Sums, broadcasts and all-gathers of small values between all ranks.

    A label is the same on all ranks; calls with different ones are different calls.
    """

    def __init__(self, communicator: Communicator, *, stream: int) -> None:
        self._communicator = communicator
        self.number = stream
        """The stream of its calls."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self._communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._communicator.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """The job's numbers of the ranks."""
        return self._communicator.members

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and none will come."""
        return self.world_size == 1

    def start_sum(self, values: torch.Tensor, label: str, *, step: int | None = None) -> Work:
        """Begin to replace ``values`` (contiguous, in host memory) by their sum over all ranks."""
        return self._submit(Collective.ALL_REDUCE, values, label, root=0, step=step)

    def sum(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Replace ``values`` by their sum over all ranks, and return them."""
        self.start_sum(values, label).wait()
        return values

    def sum_of(self, make: Callable[[], torch.Tensor], label: str) -> torch.Tensor:
        """Return the sum over all ranks of what ``make`` returns on each, which may have a row for each rank."""
        return self.sum(make(), label)

    def start_broadcast(self, tensor: torch.Tensor, label: str, *, root: int = 0) -> Work:
        """Begin to replace ``tensor`` (contiguous, in host memory) by that of rank ``root``."""
        return self._submit(Collective.BROADCAST, tensor, label, root=root)

    def gather_numbers(self, number: float, label: str) -> list[float]:
        """Return every rank's ``number``, in rank order."""

        def make() -> torch.Tensor:
            numbers = torch.zeros(self.world_size, dtype=torch.float64)
            numbers[self.rank] = number
            return numbers

        return self.sum_of(make, label).tolist()

    def all_gather(self, value: Any, label: str) -> list[Any]:
        """Return every rank's ``value`` (what JSON can say), in rank order.

        It takes two calls: in a job that outlives losses, of who was lost before the second nothing is there.
        """
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        own, num_places = self._place
        sizes = torch.zeros(num_places, dtype=torch.int64)
        sizes[own] = len(payload)
        ends = self.sum(sizes, f"{label} (sizes)").cumsum(0).tolist()
        joined = torch.zeros(ends[-1], dtype=torch.uint8)
        joined[ends[own] - len(payload) : ends[own]] = payload
        pieces = torch.split(self.sum(joined, label), sizes.tolist())
        return [json.loads(piece.numpy().tobytes()) for piece in pieces if piece.any()]

    @property
    def _place(self) -> tuple[int, int]:
        """This rank's place among all whose values are gathered, and how many there are."""
        return self.rank, self.world_size

    def exchange(self, sends: Messages, receives: Messages, label: str) -> Work:
        """Begin to send some ranks bytes, and to receive from some; of each pair, both list as many bytes, or none."""
        return self._communicator.start_direct(
            "all_to_all",
            sends=sends,
            receives=receives,
            about=label,
            label=label,
            stream=self.number,
            urgency=URGENCY,
        )

    def _submit(
        self, collective: Collective, tensor: torch.Tensor, label: str, *, root: int, step: int | None = None
    ) -> Work:
        schedule = self._communicator.plan(collective, tensor.numel() * tensor.element_size(), root=root)
        return self._communicator.start(
            schedule,
            *summands_of(tensor),
            stream=self.number,
            urgency=URGENCY,
            op=label,
            label=label,
            step=step,
        )
