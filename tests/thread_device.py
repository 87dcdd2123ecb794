"""A device for tests: two threads copy, one in each direction, when they may; its tensors are on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from syncline.tensors.device_copies import CopyKind, CopyRange
from syncline.updates import bucket as bucket_module

WAIT_S = 60.0
Job = tuple[Sequence[CopyRange], Sequence[threading.Event], threading.Event]


class _Flag(threading.local):
    set = False


class ThreadDevice:
    """Copies in the order in which it is asked; ``held`` directions copy nothing until they are let go.

    With ``is_lazy`` whoever follows a mark goes on at once, as with a GPU's stream, and :meth:`synchronize` waits.
    """

    def __init__(self, *, held: Sequence[CopyKind] = (), is_lazy: bool = False) -> None:
        self.num_queued = dict.fromkeys(CopyKind, 0)
        self.num_copied = dict.fromkeys(CopyKind, 0)
        self.num_aside = 0
        self.blocks: list[torch.Tensor] = []
        self.user_stream = threading.Event()
        """Set: the user's stream has come to all its marks."""
        self.user_stream.set()
        self.error: Exception | None = None
        """What a copy to the host raises."""
        self._is_aside = _Flag()
        self._followed: list[threading.Event] = []
        self._is_lazy = is_lazy
        self._changed = threading.Condition()
        self._gates = {direction: threading.Event() for direction in CopyKind}
        self._queues: dict[CopyKind, SimpleQueue[Job | None]]
        self._queues = {direction: SimpleQueue() for direction in CopyKind}
        self._threads: list[threading.Thread] = []
        for direction in CopyKind:
            if direction not in held:
                self._gates[direction].set()
            self._threads.append(threading.Thread(target=self._copy_all, args=(direction,), daemon=True))
            self._threads[-1].start()

    def hold(self, direction: CopyKind) -> None:
        self._gates[direction].clear()

    def let_go(self, direction: CopyKind) -> None:
        self._gates[direction].set()

    def wait_until_copied(self, direction: CopyKind, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_copied[direction] >= count, WAIT_S)

    def wait_until_queued(self, direction: CopyKind, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_queued[direction] >= count, WAIT_S)

    def synchronize(self) -> None:
        for mark in self._followed:
            self.wait(mark)

    def stop(self) -> None:
        for direction in CopyKind:
            self._gates[direction].set()
            self._queues[direction].put(None)
        for thread in self._threads:
            thread.join(WAIT_S)

    # What staging asks for.

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        self.blocks.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self.blocks[-1]

    def mark(self, _device: torch.device) -> threading.Event:
        """Return one that is reached, of side streams, and of the user's where it has come to this point."""
        if not self._is_aside.set and not self.user_stream.is_set():
            return self.user_stream
        reached = threading.Event()
        reached.set()
        return reached

    def copy(
        self,
        _device: torch.device,
        direction: CopyKind,
        ranges: Sequence[CopyRange],
        after: Sequence[threading.Event],
    ) -> threading.Event:
        if self.error is not None and direction is CopyKind.TO_HOST:
            raise self.error
        end = threading.Event()
        with self._changed:
            self._queues[direction].put((ranges, after, end))
            self.num_queued[direction] += 1
            self._changed.notify_all()
        return end

    def put(self, source: torch.Tensor, target: torch.Tensor) -> threading.Event:
        each = CopyRange(device=target.detach(), host=source)
        return self.copy(target.device, CopyKind.TO_DEVICE, [each], [])

    def wait(self, mark: threading.Event) -> None:
        assert mark.wait(WAIT_S)

    def follow(self, mark: threading.Event) -> None:
        self._followed.append(mark)
        if not self._is_lazy:
            self.wait(mark)

    @contextmanager
    def aside(
        self, _device: torch.device, _kind: CopyKind = CopyKind.TO_DEVICE, _tensors: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        self.num_aside += 1
        self._is_aside.set = True
        yield
        self._is_aside.set = False

    def _copy_all(self, direction: CopyKind) -> None:
        while (job := self._queues[direction].get()) is not None:
            ranges, after, end = job
            self._gates[direction].wait(WAIT_S)
            for mark in after:
                mark.wait(WAIT_S)
            for each in ranges:
                device = each.device.detach()
                if direction is CopyKind.TO_HOST:
                    each.host.copy_(device)
                else:
                    device.copy_(each.host)
            end.set()
            with self._changed:
                self.num_copied[direction] += 1
                self._changed.notify_all()


def hold_buckets(monkeypatch: Any) -> Iterator[ThreadDevice]:
    """Let such a device hold all buckets meanwhile: for a fixture."""
    made = ThreadDevice()
    monkeypatch.setattr(bucket_module, "find_copier", lambda _: made)
    yield made
    made.stop()
