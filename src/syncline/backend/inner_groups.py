"""Process groups of the devices of one host, which exchange without the network: NCCL's, between GPUs.

Which ranks they join is decided here, from where each rank's tensors lie; what runs on them is in
:mod:`syncline.backend.hierarchical`. Not run on a GPU yet: the tests put gloo in NCCL's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from syncline.pytorch.connecting import machine_name
from syncline.updates.private_torch import gather_into, nccl_group, reduce_into

InnerOperation = Literal["sum", "max", "min", "product"]
PLACE_BYTES = 96
"""What a rank tells of its place: two names of up to 47 letters."""


class DevicePlace(NamedTuple):
    """Where a rank's tensors lie; names are equal exactly where host and device are. An empty one: none can be used."""

    host: str
    device: str

    def encode(self) -> bytes:
        """Return it in ``PLACE_BYTES``."""
        return f"{self.host[:47]}\n{self.device[:47]}".encode("ascii", errors="replace").ljust(PLACE_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> DevicePlace:
        """Return what :meth:`encode` made."""
        host, _, device = data.rstrip(b"\0").decode("ascii", errors="replace").partition("\n")
        return cls(host=host, device=device)


def divide_by_hosts(places: Sequence[DevicePlace]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in their order, if each host has the same number, two or more, with own devices.

    Else nothing: a rank without a device, or two that share one, leave all to the host's memory.

    >>> place = lambda host, device: DevicePlace(host=host, device=device)
    >>> divide_by_hosts([place("a", "0"), place("b", "0"), place("a", "1"), place("b", "1")])
    ((0, 2), (1, 3))
    >>> divide_by_hosts([place("a", "0"), place("a", "0")])
    ()
    """
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    sizes = {len(ranks) for ranks in hosts.values()}
    is_own = len({(place.host, place.device) for place in places}) == len(places)
    if len(sizes) != 1 or min(sizes) < 2 or not is_own or not all(place.host and place.device for place in places):
        return ()
    return tuple(tuple(ranks) for ranks in hosts.values())


class InnerGroup:
    """One rank's part in a process group of a host's devices, by a backend of ``torch.distributed``.

    Each method is called in the same order on all ranks. What it queues begins behind the current stream, which then
    waits for it.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, operation: InnerOperation) -> None:
        """Make ``output`` of rank k part k of what the ``operation`` makes of all ranks' ``source``; both are flat."""
        reduce_into(self._backend, output, source, getattr(dist.ReduceOp, operation.upper())).wait()

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Make ``output`` all ranks' ``source``, in their order; both are flat."""
        gather_into(self._backend, output, source).wait()

    def close(self) -> None:
        """Release it, when what was queued is done."""
        self._backend.shutdown()

    def abort(self) -> None:
        """Break off what is under way, and release it; from any thread."""
        self._backend.abort()


class NcclBackend:
    """Opens inner groups of NCCL, as PyTorch has it; a group reaches for its GPU with its first collective."""

    def find_place(self, device: torch.device) -> DevicePlace:
        """Return the GPU's own number, which containers do not change; an empty place without NCCL."""
        if device.type != "cuda" or not dist.is_nccl_available():
            return DevicePlace(host="", device="")
        return DevicePlace(host=machine_name(), device=str(torch.cuda.get_device_properties(device).uuid))

    def open(self, store: Any, *, rank: int, size: int, timeout_s: float) -> InnerGroup:
        """Open a group; its ranks meet in ``store``, which they use for nothing else."""
        return InnerGroup(nccl_group(store, rank, size, timeout_s=timeout_s))
