"""Copies between a device's memory and page-locked memory of the host, which no thread and no user's stream waits for.

The CUDA part has not been run on a GPU yet: its order of calls is tested with stand-ins, all else with a device that
is a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from syncline.errors import ConfigurationError

Mark: TypeAlias = Any
"""A point in a queue of the device, which has been reached once all that was queued before it is done."""


class CopyKind(Enum):
    """Which way: copies of one kind are done one after another, at once with those of the other."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


class CopyRange(NamedTuple):
    """``device`` and ``host`` are contiguous, of one type and size; one of them becomes the other."""

    device: torch.Tensor
    host: torch.Tensor


class HostCopier(Protocol):
    """What copies between a kind of device and the host; all but :meth:`wait` return at once, from any thread."""

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

    def wait(self, mark: Mark) -> None:
        """Wait on this thread, without holding the interpreter, until ``mark`` is reached."""

    def follow(self, mark: Mark) -> None:
        """Let what the caller queues on its current stream from now on begin once ``mark`` is reached."""


class DeviceCopier(HostCopier, Protocol):
    """What staging needs besides."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on such a device."""

    def put(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Queue a copy within a device behind those to it, between tensors of any memory order; return its end."""

    def aside(
        self, device: torch.device, kind: CopyKind = CopyKind.TO_DEVICE, tensors: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[object]:
        """Let the current stream be that of copies of this kind, instead of the user's.

        The memory of ``tensors`` is kept from being given to somebody else until what is queued within is done.
        """


class PlainCopier:
    """Copies on the calling thread, which waits: for devices of whose queues nothing is known here."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the host."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self, device: torch.device) -> None:
        """Return nothing: all is done already."""

    def copy(
        self,
        device: torch.device,  # noqa: ARG002 - the protocol's
        kind: CopyKind,
        ranges: Sequence[CopyRange],
        after: Sequence[Mark],  # noqa: ARG002 - as above
    ) -> None:
        """Copy."""
        for each in ranges:
            _copy(kind, each, non_blocking=False)

    def wait(self, mark: Mark) -> None:
        """Return: all is done already."""

    def follow(self, mark: Mark) -> None:
        """Return, as above."""


class CudaMark(NamedTuple):
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
        refuse_capture("a copy of a GPU's tensor to the host")
        return _record(torch.cuda.current_stream(device), device)

    def copy(
        self, device: torch.device, kind: CopyKind, ranges: Sequence[CopyRange], after: Sequence[CudaMark]
    ) -> CudaMark:
        """Queue asynchronous copies on the side stream of their kind."""
        stream = self._stream(device, kind)
        for mark in after:
            stream.wait_event(mark.event)
        with _current(stream, device):
            for each in ranges:
                _copy(kind, each, non_blocking=True)
                each.device.record_stream(stream)
        return _record(stream, device)

    def put(self, source: torch.Tensor, target: torch.Tensor) -> CudaMark:
        """Queue a copy on the side stream of copies to the device."""
        device = target.device
        stream = self._stream(device, CopyKind.TO_DEVICE)
        with _current(stream, device):
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
        with _current(stream, device):
            yield
        for tensor in tensors:
            tensor.record_stream(stream)

    def _stream(self, device: torch.device, kind: CopyKind) -> torch.cuda.Stream:
        key = (device, kind)
        if key not in self._streams:
            self._streams.setdefault(key, _new_stream(device))  # of two threads, the first one's counts
        return self._streams[key]


_GPU_COPIER = CudaCopier()


def find_copier(device: torch.device) -> HostCopier | None:
    """Return what copies between ``device`` and the host; None for the host itself."""
    if device.type == "cpu":
        return None
    return _GPU_COPIER if device.type == "cuda" else PlainCopier()


def copy_beside(copier: HostCopier, kind: CopyKind, device: torch.Tensor, host: torch.Tensor) -> Mark:
    """Queue a copy behind what is in the caller's stream, and beside what comes next there; return its end."""
    return copier.copy(device.device, kind, [CopyRange(device, host)], [copier.mark(device.device)])


class HostCopy:
    """Host memory that stands for a flat tensor of a device between ranks: loaded from there, and stored there.

    Nobody waits for a copy but who asks for it; loads and stores of one copy are done in the order of the calls.
    """

    def __init__(self, copier: HostCopier, like: torch.Tensor) -> None:
        self._copier, self._device = copier, like.device
        self.host = copier.allocate_host(like.nbytes).view(like.dtype)
        self._loaded: Mark = None
        self._stored: Mark = None
        self._allowed: Mark = None

    def load(self, source: torch.Tensor) -> None:
        """Queue a copy of what ``source`` is at this point of the current stream."""
        mark = self._copier.mark(self._device)
        after = [mark] if self._stored is None else [mark, self._stored]
        self._loaded = self._copier.copy(self._device, CopyKind.TO_HOST, [CopyRange(source, self.host)], after)

    def wait(self) -> None:
        """Wait until what was loaded last is in the host's memory."""
        if self._loaded is not None:
            self._copier.wait(self._loaded)

    def allow(self) -> None:
        """Let whatever was stored be overwritten from this point of the current stream on, and not before."""
        self._allowed = self._copier.mark(self._device)

    def enter(self) -> None:
        """Let the current stream come after what was allowed last."""
        if self._allowed is not None:
            self._copier.follow(self._allowed)

    def store(self, target: torch.Tensor, *, waits: bool) -> None:
        """Make ``target`` what the host's memory has, behind the current stream, which goes on behind it.

        With ``waits`` it is there on return, for every stream.
        """
        after = [self._copier.mark(self._device), *([] if self._allowed is None else [self._allowed])]
        self._stored = self._copier.copy(self._device, CopyKind.TO_DEVICE, [CopyRange(target, self.host)], after)
        (self._copier.wait if waits else self._copier.follow)(self._stored)


def _copy(kind: CopyKind, each: CopyRange, *, non_blocking: bool) -> None:
    if kind is CopyKind.TO_HOST:
        each.host.copy_(each.device.detach(), non_blocking=non_blocking)
    else:
        each.device.detach().copy_(each.host, non_blocking=non_blocking)


def refuse_capture(what: str) -> None:
    """Raise :class:`ConfigurationError` while the current stream is captured in a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            f"{what} cannot be captured in a CUDA graph: it goes through the host's memory, and a replay would move "
            "nothing; capture parts of the model alone (torch.cuda.make_graphed_callables, after distribute()), and "
            "call it between two replays"
        )


@contextmanager
def _current(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    # The device too: leaving a stream goes back to that of before, which on a thread of ours is one of the first GPU;
    # that would take some hundred MiB there for each rank of the host.
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _record(stream: torch.cuda.Stream, device: torch.device) -> CudaMark:
    # Whoever waits for a blocking one sleeps, instead of taking a core from the training.
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return CudaMark(event, device)
