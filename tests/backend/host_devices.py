"""Groups whose ranks are threads, each with a device that is a thread; gloo joins the devices of one "host"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from syncline.backend.group_state import GroupState
from syncline.backend.group_streams import GroupStreams
from syncline.backend.inner_groups import DevicePlace, InnerGroup
from syncline.fabric.slice_executor import NUM_STREAMS
from thread_device import WAIT_S, ThreadDevice
from thread_fleets import run_fleets

Body = Callable[[GroupState, "GlooBackend"], Any]


class GlooBackend:
    """Opens gloo's groups; rank k is on the host ``hosts[k]``, with ``devices[k]`` or a device of its own."""

    def __init__(
        self, rank: int, device: ThreadDevice, hosts: Sequence[str], devices: Sequence[str] | None = None
    ) -> None:
        self.rank, self.device = rank, device
        self.place = DevicePlace(host=hosts[rank], device=devices[rank] if devices else str(rank))
        self.opened: list[Any] = []

    def find_place(self, _device: torch.device) -> DevicePlace:
        return self.place

    def open(self, store: Any, *, rank: int, size: int, timeout_s: float) -> Any:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self.opened.append(InnerGroup(backend))
        return self.opened[-1]


class StuckGroup:
    """An inner group whose first call does not end before it is aborted."""

    def __init__(self) -> None:
        self.is_called = threading.Event()
        self.is_aborted = threading.Event()

    def reduce_scatter(self, *_: object) -> None:
        self.is_called.set()
        assert self.is_aborted.wait(WAIT_S)
        raise RuntimeError("aborted")

    def all_gather(self, *_: object) -> None:
        raise AssertionError("nothing was reduced")

    def close(self) -> None:
        raise AssertionError("what is stuck is aborted")

    def abort(self) -> None:
        self.is_aborted.set()


def run_hosts(
    hosts: Sequence[str],
    body: Body,
    *,
    devices: Sequence[str] | None = None,
    make: Callable[..., GlooBackend] = GlooBackend,
    timeout_s: float = 60.0,
    accept: Any = (),
) -> list[Any]:
    """Run ``body`` on every rank of one group, rank k on the host ``hosts[k]``."""
    store = dist.HashStore()

    def on_rank(fleet: Any) -> Any:
        device = ThreadDevice()
        inner = make(fleet.rank, device, hosts, devices)
        state = GroupState(
            fleet.communicator,
            message_stream=NUM_STREAMS - 1,
            staging_stream=NUM_STREAMS - 2,
            timeout_s=timeout_s,
            store=store,
            copier=device,
            inner=inner,
            streams=GroupStreams(store, token="test"),
        )
        try:
            return body(state, inner)
        finally:
            state.close()
            device.stop()

    return run_fleets(len(hosts), on_rank, accept=accept)
