"""A group's large sums of float32 in codes: gradients of DDP and of FSDP2 that cross slow links in fewer bytes.

How numbers cross is :mod:`syncline.updates.compression`; each number of elements has crossings of its own there. Two
take turns by the number of the call, which is the same on all ranks. What codes lack is added to the next call of the
same place in a step: the third all-reduce of so many elements since the optimizer's last step is that of the same
bucket, or of the same module, in the step before. Places are this rank's own affair: no other rank has to count alike.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from syncline.errors import ConfigurationError
from syncline.runtime import Communicator
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.tensors.memory import host_memory_of, put_back, shares_memory
from syncline.tensors.reductions import TensorReduction
from syncline.tensors.work import TensorWork
from syncline.updates.bucket import BucketPlan, Slot
from syncline.updates.compression import CodeSetting, Compress, SiteCrossing, choose_way, coding_thread, even_owners
from syncline.updates.control import ControlStream

LEAST_ELEMENTS = 1 << 14
"""Smaller calls move as they are: losses, norms, counts."""
MOST_SIZES = 128
"""Numbers of elements that are coded; programs whose sizes never end go on without codes."""
MOST_PLACES = 64
"""Calls of one size in a step whose codes' errors are kept."""
CODING_GROUPS = 256
"""As many streams as so many groups have are taken for it."""
_TURNS = 2
"""Crossings of each size, with three streams each: for codes, and two inside of a site."""
_SUMS = frozenset({"sum", "mean", "avg", "premul_sum"})


@dataclass(slots=True)
class _SizedCrossing:
    """A crossing, and its last call, before whose end the next one does not begin."""

    crossing: SiteCrossing
    last: tuple[Work, ...] = ()


class CodedReductions:
    """One rank's sums in codes, on a group's communicator and some streams of its world."""

    def __init__(self, communicator: Communicator, streams: range, way: CodeSetting, control: ControlStream) -> None:
        self._communicator, self._way, self._control = communicator, way, control
        self._streams = streams
        self._turns: dict[int, list[_SizedCrossing]] = {}
        """By number of elements."""
        self._num_calls: Counter[int] = Counter()
        self._places: Counter[tuple[Collective, int]] = Counter()
        """Calls since the last step."""
        self._errors: dict[tuple[Collective, int, int], list[torch.Tensor]] = {}
        self._num_steps = communicator.progress.num_steps
        self._thread = coding_thread(communicator)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, communicator: Communicator, streams: range, wish: Compress) -> CodedReductions | None:
        """Open them if ``wish`` says so; :class:`ConfigurationError` on all ranks if they wish for different codes."""
        control = ControlStream(communicator, stream=streams[0])
        wishes = control.all_gather(wish, "codes of a group")
        if len(set(wishes)) > 1:
            raise ConfigurationError(
                f"compress_group() was told {', '.join(wishes)} by ranks 0 to {len(wishes) - 1} of the group; give all "
                "ranks the same"
            )
        way = choose_way(communicator, control, wish)
        return None if way is None else cls(communicator, streams[1:], way, control)

    def all_reduce(self, tensor: torch.Tensor, reduction: TensorReduction) -> TensorWork | None:
        """Begin to make ``tensor`` the sum of those of all ranks; None if it is not for codes."""
        if not self._takes(tensor, reduction):
            return None
        host = reduction.prepared(host_memory_of(tensor))
        work = self._start(host, Collective.ALL_REDUCE)
        return TensorWork([work], lambda: put_back(reduction.finished(host), tensor))

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduction: TensorReduction
    ) -> TensorWork | None:
        """Begin to make ``output`` this rank's part of the sum of all ranks' ``source``; None if not for codes."""
        if not self._takes(source, reduction):
            return None
        host = host_memory_of(source)
        host = reduction.prepared(host.clone() if shares_memory(host, source) else host)
        work = self._start(host, Collective.REDUCE_SCATTER)
        first = self._communicator.rank * output.numel()

        def finish() -> None:
            part = host.reshape(-1)[first : first + output.numel()].view(output.shape)
            put_back(reduction.finished(part), output)

        return TensorWork([work], finish)

    def state(self) -> dict[str, Any]:
        """Return what codes of this rank lack, by collective, number of elements, and place in a step."""
        self._wait()
        errors = {(one.value, count, place): errors for (one, count, place), errors in self._errors.items()}
        return {"sites": self._way.sites, "errors": errors}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take that, in the next step; of other sites nothing."""
        self._wait()
        self._errors.clear()
        self._places.clear()
        if state.get("sites") == self._way.sites:
            by_value = {one.value: one for one in Collective}
            found = state["errors"].items()
            self._errors = {(by_value[one], count, place): list(errors) for (one, count, place), errors in found}

    def _wait(self) -> None:
        """Wait for what is under way, and so changes errors."""
        for work in [work for turns in self._turns.values() for turn in turns for work in turn.last]:
            work.wait()

    def close(self) -> None:
        """Give up what is under way."""
        self._thread.close()
        for turns in self._turns.values():
            for turn in turns:
                turn.crossing.close()

    def _takes(self, tensor: torch.Tensor, reduction: TensorReduction) -> bool:
        count = tensor.numel()
        is_sum = tensor.dtype == torch.float32 and reduction.meaning in _SUMS and count >= LEAST_ELEMENTS
        return is_sum and (count in self._turns or len(self._turns) < MOST_SIZES)

    def _start(self, host: torch.Tensor, collective: Collective) -> Work:
        count = host.numel()
        with self._lock:
            turns = self._turns.setdefault(count, [])
            number = self._num_calls[count] % _TURNS
            self._num_calls[count] += 1
            if len(turns) <= number:
                turns.append(_SizedCrossing(self._open(count)))
            turn = turns[number]
            errors = self._errors_of(collective, count, turn.crossing)
            work = turn.crossing.start(0, collective, None, host.reshape(-1), errors=errors, after=turn.last)
            assert work is not None, "it is float32"
            turn.last = (work,)
        return work

    def _open(self, count: int) -> SiteCrossing:
        slot = Slot(name="", position=0, start=0, stop=count, shape=(count,), stride=(1,))
        plan = BucketPlan(index=0, group=0, dtype=torch.float32, device=torch.device("cpu"), slots=(slot,))
        return SiteCrossing(
            self._communicator,
            [plan],
            [even_owners(count, self._communicator.world_size)],
            self._way,
            control=self._control,
            reserve_streams=self._reserve,
            thread=self._thread,
            names=[f"{count} x float32"],
        )

    def _reserve(self, number: int) -> range:
        taken, self._streams = self._streams[:number], self._streams[number:]
        return taken

    def _errors_of(self, collective: Collective, count: int, crossing: SiteCrossing) -> list[torch.Tensor]:
        """Return what codes lacked that were at this place in the last step."""
        if (num_steps := self._communicator.progress.num_steps) != self._num_steps:
            self._num_steps = num_steps
            self._places.clear()
        place = self._places[collective, count]
        self._places[collective, count] += 1
        if place >= MOST_PLACES:
            return crossing.new_errors(0)
        key = collective, count, place
        if key not in self._errors:
            self._errors[key] = crossing.new_errors(0)
        return self._errors[key]
