"""Copies between a device's memory and page-locked memory of the host, which no thread and no user's stream waits for.

The CUDA part has not been run on a GPU yet: its order of calls is tested with stand-ins, all else with a device that
is a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch

Mark: TypeAlias = Any
"""A point in a queue of the device, which has been reached once all that was queued before it is done."""


class CopyKind(Enum):
    """Which way: copies of one kind are done one after another, at once with those of the other."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


@dataclass(frozen=True, slots=True)
class CopyRange:
    """``device`` and ``host`` are contiguous, of one type and size; one of them becomes the other."""

    device: torch.Tensor
    host: torch.Tensor


class DeviceCopier(Protocol):
    """What staging needs of a kind of device; all but :meth:`wait` return at once, from any thread."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on such a device."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return ``num_bytes`` of uint8 that such a device copies from and to by itself.

        Once it is not held any more, it is given to nobody before the copies that were queued are done.
        """

    def mark(self, device: torch.device) -> Mark:
        """Return the point that the caller's current stream has come to."""

    def copy(self, device: torch.device, kind: CopyKind, ranges: Sequence[CopyRange], after: Sequence[Mark]) -> Mark:
        """Queue copies aside from the user's streams, to begin once ``after`` are reached; return their end.

        The device's memory is kept from being given to somebody else until then.
        """

    def put(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Queue a copy within a device behind those to it, between tensors of any memory order; return its end."""

    def wait(self, mark: Mark) -> None:
        """Wait on this thread, without holding the interpreter, until ``mark`` is reached."""

    def follow(self, mark: Mark) -> None:
        """Let what the caller queues on its current stream from now on begin once ``mark`` is reached."""

    def aside(
        self, device: torch.device, kind: CopyKind = CopyKind.TO_DEVICE, tensors: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[object]:
        """Let the current stream be that of copies of this kind, instead of the user's.

        The memory of ``tensors`` is kept from being given to somebody else until what is queued within is done.
        """


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event that was recorded on a stream of ``device``."""

    event: torch.cuda.Event
    device: torch.device


class CudaCopier:
    """Copies on two side streams of each GPU; a GPU is not touched before its first tensor comes."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, CopyKind], torch.cuda.Stream] = {}

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a GPU."""
        return tensor.device.type == "cuda"

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory, which PyTorch frees once the copies of it are over."""
        with torch.inference_mode(mode=False):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self, device: torch.device) -> CudaMark:
        """Record an event on the current stream."""
        return _record(torch.cuda.current_stream(device), device)

    def copy(
        self, device: torch.device, kind: CopyKind, ranges: Sequence[CopyRange], after: Sequence[CudaMark]
    ) -> CudaMark:
        """Queue asynchronous copies on the side stream of their kind."""
        stream = self._stream(device, kind)
        for mark in after:
            stream.wait_event(mark.event)
        with torch.cuda.stream(stream):
            for each in ranges:
                on_device = each.device.detach()
                if kind is CopyKind.TO_HOST:
                    each.host.copy_(on_device, non_blocking=True)
                else:
                    on_device.copy_(each.host, non_blocking=True)
                on_device.record_stream(stream)
        return _record(stream, device)

    def put(self, source: torch.Tensor, target: torch.Tensor) -> CudaMark:
        """Queue a copy on the side stream of copies to the device."""
        device = target.device
        stream = self._stream(device, CopyKind.TO_DEVICE)
        with torch.cuda.stream(stream):
            target.detach().copy_(source.detach())
            source.record_stream(stream)
            target.record_stream(stream)
        return _record(stream, device)

    def wait(self, mark: CudaMark) -> None:
        """Sleep until the event is over."""
        mark.event.synchronize()

    def follow(self, mark: CudaMark) -> None:
        """Let the current stream wait for the event."""
        torch.cuda.current_stream(mark.device).wait_event(mark.event)

    @contextmanager
    def aside(
        self, device: torch.device, kind: CopyKind = CopyKind.TO_DEVICE, tensors: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Make the side stream of copies of this kind the current one."""
        stream = self._stream(device, kind)
        with torch.cuda.stream(stream):
            yield
        for tensor in tensors:
            tensor.record_stream(stream)

    def _stream(self, device: torch.device, kind: CopyKind) -> torch.cuda.Stream:
        key = (device, kind)
        if key not in self._streams:
            self._streams.setdefault(key, _new_stream(device))  # of two threads, the first one's counts
        return self._streams[key]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _record(stream: torch.cuda.Stream, device: torch.device) -> CudaMark:
    # Whoever waits for a blocking one sleeps, instead of taking a core from the training.
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return CudaMark(event, device)
