"""Where checks run: on a GPU, or on the CPU with a device that is a thread in a GPU's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from syncline.backend import group_state
from syncline.tensors.device_copies import CopyKind, CopyRange
from syncline.updates import bucket
from thread_device import ThreadDevice

Copied = tuple[CopyKind, float]
"""A copy, and when it began; of copies that are compared, in one unit."""


class Place(Protocol):
    """A device, and what differs between a GPU and its stand-in."""

    name: str
    device: torch.device
    num_gpus: int

    def reach(self) -> None:
        """Wait until the current stream has done what was queued on it."""

    def copies(self, run: Callable[[], object]) -> list[Copied]:
        """Call ``run``; return the copies between device and host that it made."""

    def on_host(self) -> Any:
        """Return a context in which a model on the CPU is trained there, and not staged."""


class Gpu:
    """The GPU of a rank; ranks share them where there are fewer."""

    def __init__(self, rank: int) -> None:
        self.num_gpus = torch.cuda.device_count()
        self.device = torch.device("cuda", rank % self.num_gpus)
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)

    def reach(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def copies(self, run: Callable[[], object]) -> list[Copied]:
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            run()
            torch.cuda.synchronize(self.device)
        kinds = {"Memcpy DtoH": CopyKind.TO_HOST, "Memcpy HtoD": CopyKind.TO_DEVICE}
        found = [
            (kinds[event.name[:11]], event.time_range.start) for event in profile.events() if event.name[:11] in kinds
        ]
        return sorted(found, key=lambda copy: copy[1])

    @contextmanager
    def on_host(self) -> Iterator[None]:
        yield


class StandIn:
    """The CPU, as if it were a device with two copy engines: groups stage its tensors, and buckets are copied."""

    name = "stand-in"
    device = torch.device("cpu")
    num_gpus = 0

    def __init__(self) -> None:
        self._copier = _Recorder()
        self._is_used = True
        group_state.CudaCopier = lambda: self._copier  # type: ignore[misc, assignment]
        bucket.find_copier = lambda _: self._copier if self._is_used else None

    def reach(self) -> None:
        return None

    def copies(self, run: Callable[[], object]) -> list[Copied]:
        before = len(self._copier.queued)
        run()
        return [(kind, float(number)) for number, kind in enumerate(self._copier.queued[before:])]

    @contextmanager
    def on_host(self) -> Iterator[None]:
        self._is_used = False
        yield
        self._is_used = True


class _Recorder(ThreadDevice):
    """Notes the order in which copies are queued, which does not depend on how busy the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[CopyKind] = []

    def copy(self, device: torch.device, direction: CopyKind, ranges: Sequence[CopyRange], after: Sequence[Any]) -> Any:
        self.queued.append(direction)
        return super().copy(device, direction, ranges, after)


def choose_place(rank: int) -> Place:
    """Return the GPU where PyTorch finds one."""
    return Gpu(rank) if torch.cuda.is_available() else StandIn()
