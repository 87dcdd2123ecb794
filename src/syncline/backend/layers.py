"""The two layers of a group whose hosts have several devices each: within a host, and across hosts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from syncline.backend.device_copies import DeviceCopier
from syncline.backend.group_streams import GroupStreams
from syncline.backend.inner_groups import PLACE_BYTES, DevicePlace, InnerBackend, InnerGroup, divide_by_hosts
from syncline.backend.staged_collectives import StagedCollectives
from syncline.backend.staging import Staging
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.updates.memory import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """One rank's part: ``host`` has the ranks of this host, ``across`` those of its place on each, if there are more.

    ``scattering`` and ``gathering`` have the devices of this host. They are two, because each is called in one order,
    and the all-gather of one call in any order with the reduce-scatters of later ones.
    """

    device: torch.device
    host: Communicator
    across: Communicator | None
    staging: Staging | None
    staged: StagedCollectives | None
    scattering: InnerGroup
    gathering: InnerGroup

    @property
    def num_devices(self) -> int:
        """Devices of each host."""
        return self.host.world_size

    @property
    def inner_groups(self) -> tuple[InnerGroup, InnerGroup]:
        """Both."""
        return self.scattering, self.gathering

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Those on the network."""
        return (self.host,) if self.across is None else (self.host, self.across)

    def announce(self, tensor: torch.Tensor, meaning: str, timeout_s: float) -> Work:
        """Meet the ranks of this host before a call.

        NCCL would wait for ever for a rank that makes none or another: here that is an error that names it.
        """
        what = f"{meaning} of {tensor.numel()} x {dtype_name(tensor.dtype)} on devices"
        return self.host.barrier(label="all_reduce", op=what, timeout_s=timeout_s)

    def close(self, *, is_failing: bool) -> None:
        """Release all: when what was queued is done, or at once, after the inner groups were aborted."""
        if not is_failing:
            for group in self.inner_groups:
                group.close()
        for communicator in self.communicators:
            communicator.abort() if is_failing else communicator.close()
        if self.staging is not None:
            self.staging.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """What layers of the ``group`` are opened from: the ``world`` whose connections and streams they use."""

    group: Communicator
    world: Communicator
    streams: GroupStreams
    copier: DeviceCopier
    backend: InnerBackend

    def open(self, device: torch.device, *, timeout_s: float) -> Layers | None:
        """Open layers if all ranks of the group can use them, which all of them ask at once; else return None."""
        hosts = divide_by_hosts(exchange_places(self.group, self.backend.find_place(device), timeout_s=timeout_s))
        if not hosts:
            return None
        ranks = next(ranks for ranks in hosts if self.group.rank in ranks)
        place = ranks.index(self.group.rank)
        with ExitStack() as opened:
            host, streams = self._open_part(ranks, "host", timeout_s)
            opened.callback(host.abort)
            across = staging = staged = None
            if len(hosts) > 1:
                across, outer = self._open_part([one[place] for one in hosts], "across", timeout_s)
                opened.callback(across.abort)
                staging = Staging(across, self.copier)
                staged = StagedCollectives(across, staging, stream=outer[-2])
            scattering, gathering = (
                self.backend.open(
                    self.streams.open_store(streams, name), rank=place, size=len(ranks), timeout_s=timeout_s
                )
                for name in ("scattering", "gathering")
            )
            opened.pop_all()
        return Layers(
            device=device,
            host=host,
            across=across,
            staging=staging,
            staged=staged,
            scattering=scattering,
            gathering=gathering,
        )

    def _open_part(self, ranks: Sequence[int], kind: str, timeout_s: float) -> tuple[Communicator, range]:
        """Open a communicator of some of the group's ranks, which no ``new_group()`` of the same ranks is taken for."""
        members = [self.group.members[rank] for rank in ranks]
        own = self.world
        purpose = f"{kind} of {self.group.user_stream} "
        streams = self.streams.take(members, rank=own.rank, timeout_s=timeout_s, is_lost=own.is_lost, purpose=purpose)
        part = own.open_group(members, streams=streams)
        part.timeout_s = timeout_s
        return part, streams


def exchange_places(group: Communicator, own: DevicePlace, *, timeout_s: float) -> list[DevicePlace]:
    """Return the places of all ranks of a group, in their order; all of them call it alike."""
    whole = bytearray(PLACE_BYTES * group.world_size)
    start = PLACE_BYTES * group.rank
    whole[start : start + PLACE_BYTES] = own.encode()
    group.all_gather(memoryview(whole), label="places of devices", timeout_s=timeout_s, is_awaited=True).wait()
    return [DevicePlace.decode(bytes(whole[at : at + PLACE_BYTES])) for at in range(0, len(whole), PLACE_BYTES)]
