"""All-reduces of devices' tensors in two layers: so each host sends a tensor's bytes once, and not once a device.

On L devices of each of H hosts: a reduce-scatter among the devices of a host gives each a part of the sum, 1/L of the
tensor; the devices of equal number on all hosts make a staged all-reduce of their part; an all-gather within the host
gives each device all parts (the scheme of BlueConnect, Cho et al., 2019, with two layers). Of a tensor of S bytes each
device's rank has 2 S (H - 1) / (H L) on the network, where an all-reduce of all ranks' tensors would have up to 2 S.

One thread makes the reduce-scatters and begins the staged calls, another ends them and makes the all-gathers; each in
the order of the calls, which is the same on all ranks of a host. A call begins when all ranks of the host have
announced it, so what NCCL would wait for without end is found before: another call, or none.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from syncline.backend.group_streams import GroupStreams
from syncline.backend.inner_groups import (
    PLACE_BYTES,
    DevicePlace,
    InnerGroup,
    InnerOperation,
    NcclBackend,
    divide_by_hosts,
)
from syncline.errors import (
    ConfigurationError,
    DeadlineError,
    FabricClosedError,
    FabricError,
    SynclineError,
    name_ranks,
)
from syncline.fabric import PeerLeftError
from syncline.runtime.communicator import Communicator
from syncline.runtime.port import Port
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.tensors.device_copies import CopyKind, DeviceCopier, Mark
from syncline.tensors.memory import dtype_name, put_back
from syncline.tensors.reductions import TensorReduction
from syncline.tensors.staging import StagedCollectives, Staging, flat_memory_of
from syncline.tensors.work import TensorWork, end_work

OPERATIONS: MappingProxyType[str, InnerOperation] = MappingProxyType(
    {"sum": "sum", "avg": "sum", "premul_sum": "sum", "max": "max", "min": "min", "product": "product"}
)
"""What devices make of which meaning; all else goes by the host's memory."""
DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
LOSS_S = 2.0
"""A rank that dies is known so soon; until then nobody says of whose death its host's devices fail."""
GRACE_S = 5.0
"""So much longer hosts wait for each other, so that they hear from one whose devices are stuck what is the matter."""


class Layers(NamedTuple):
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


def open_layers(
    device: torch.device,
    *,
    group: Communicator,
    world: Communicator,
    streams: GroupStreams,
    copier: DeviceCopier,
    backend: NcclBackend,
    timeout_s: float,
) -> Layers | None:
    """Open layers if all ranks of the group can use them, which all of them ask at once; else return None.

    They use the connections and the ``streams`` of the ``world``.
    """

    def open_part(ranks: Sequence[int], kind: str) -> tuple[Communicator, range]:
        """Open a communicator of some of the group's ranks, which no ``new_group()`` of the same ranks is taken for."""
        members = [group.members[rank] for rank in ranks]
        purpose = f"{kind} of {group.user_stream} "
        taken = streams.take(members, rank=world.rank, timeout_s=timeout_s, is_lost=world.is_lost, purpose=purpose)
        part = world.open_group(members, streams=taken)
        part.timeout_s = timeout_s
        return part, taken

    hosts = divide_by_hosts(exchange_places(group, backend.find_place(device), timeout_s=timeout_s))
    if not hosts:
        return None
    ranks = next(ranks for ranks in hosts if group.rank in ranks)
    place = ranks.index(group.rank)
    with ExitStack() as opened:
        host, inner = open_part(ranks, "host")
        opened.callback(host.abort)
        across = staging = staged = None
        if len(hosts) > 1:
            across, outer = open_part([one[place] for one in hosts], "across")
            opened.callback(across.abort)
            staging = Staging(across, copier)
            staged = StagedCollectives(across, staging, stream=outer[-2])
        scattering, gathering = (
            backend.open(streams.open_store(inner, name), rank=place, size=len(ranks), timeout_s=timeout_s)
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


def exchange_places(group: Communicator, own: DevicePlace, *, timeout_s: float) -> list[DevicePlace]:
    """Return the places of all ranks of a group, in their order; all of them call it alike."""
    whole = bytearray(PLACE_BYTES * group.world_size)
    start = PLACE_BYTES * group.rank
    whole[start : start + PLACE_BYTES] = own.encode()
    group.all_gather(memoryview(whole), label="places of devices", timeout_s=timeout_s, is_awaited=True).wait()
    return [DevicePlace.decode(bytes(whole[at : at + PLACE_BYTES])) for at in range(0, len(whole), PLACE_BYTES)]


class HierarchicalWork(TensorWork):
    """An all-reduce in layers under way. Once :meth:`wait` returns, the result is in the device's memory."""

    def __init__(
        self, tensor: torch.Tensor, op: TensorReduction, work: Work, *, timeout_s: float, copier: DeviceCopier
    ) -> None:
        super().__init__([work])
        self._copier = copier
        self.tensor = tensor
        self.op = op
        self.timeout_s = timeout_s
        self.called: Mark = copier.mark(tensor.device)
        self.began_s = time.monotonic()
        self.inner_step = ""
        """What the host's devices do for it now, if they do."""

    def aside(self) -> AbstractContextManager[object]:
        """Wait within this where the current stream is none of the one who called."""
        return self._copier.aside(self.tensor.device)


class HierarchicalCollectives:
    """The all-reduces in layers of one rank; any thread may begin one.

    ``find_layers`` is asked once, at the first call that could use them, on all ranks at the same place of their calls.
    What fails within a host ends all calls of the group, on all of its ranks.
    """

    def __init__(
        self, group: Communicator, copier: DeviceCopier, find_layers: Callable[[torch.device], Layers | None]
    ) -> None:
        self._group = group
        self._copier = copier
        self._find_layers: Callable[[torch.device], Layers | None] | None = find_layers
        self._layers: Layers | None = None
        self._losses: Port | None = None
        self._port = group.open_port("collectives in layers")  # for the loop; no message goes through it
        self._lock = threading.Lock()
        self._under_way: set[HierarchicalWork] = set()
        self._end = partial(end_work, self._under_way, self._lock)
        self._failure: BaseException | None = None
        self._has_failed = threading.Event()
        self._scattering = WorkerThread("syncline-scattering", on_failure=self._broke)
        self._gathering = WorkerThread("syncline-gathering", on_failure=self._broke)

    def all_reduce(self, tensor: torch.Tensor, op: TensorReduction, timeout_s: float) -> HierarchicalWork | None:
        """Begin an all-reduce of ``tensor``, in place; None where hosts have no devices to make it, which all know."""
        if op.meaning not in OPERATIONS or tensor.dtype not in DTYPES or not tensor.numel():
            return None
        layers = self._open(tensor.device)
        if layers is None:
            return None
        self._check(layers, tensor, timeout_s)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            announced = layers.announce(tensor, op.meaning, timeout_s)
            runtime_work = self._group.begin_work("all_reduce", timeout_s)
            work = HierarchicalWork(tensor, op, runtime_work, timeout_s=timeout_s, copier=self._copier)
            self._under_way.add(work)
            self._scattering.submit(0, (), partial(self._scatter, layers, work, announced))
        self._port.call_soon(self._expire, work)
        return work

    def close(self, *, is_failing: bool) -> None:
        """Fail what is under way, end the threads and release the layers; before the group's communicator is closed."""
        is_failing = is_failing or bool(self._under_way) or self._has_failed.is_set()
        self._fail(FabricClosedError(f"the process group of rank {self._group.rank} is closed"), tells=False)
        if self._layers is not None:
            self._layers.close(is_failing=is_failing)
        self._scattering.close()
        self._gathering.close()

    def _open(self, device: torch.device) -> Layers | None:
        with self._lock:
            find, self._find_layers = self._find_layers, None
        if find is None:
            return self._layers
        try:
            layers = self._layers = find(device)
        except BaseException as error:
            self._group.give_up(f"the layers of its hosts' devices could not be opened: {error}")
            raise
        if layers is not None:
            self._losses = layers.host.open_port("losses of devices")
            self._losses.call_soon(self._losses.watch_losses, self._on_lost)
            for communicator in (self._group, *layers.communicators):
                communicator.watch_failure(self._fail)
        return layers

    def _check(self, layers: Layers, tensor: torch.Tensor, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ConfigurationError(f"all_reduce: a deadline lies in the future, not {timeout_s} s away")
        if tensor.device != layers.device:
            raise ConfigurationError(
                f"all_reduce: the group's tensors are on {layers.device}, where its first one was, and this one is on "
                f"{tensor.device}; move it, or make a group for each device"
            )

    # On the two threads.

    def _scatter(self, layers: Layers, work: HierarchicalWork, announced: Work) -> None:
        """Reduce and scatter within the host, and begin the staged call of the own part."""
        announced.wait()
        work.inner_step = "reduce-scatter"
        self._copier.wait(work.called)  # here, for in a stream it would hold up the copies of the call before
        with self._copier.aside(layers.device, CopyKind.TO_HOST, [work.tensor]):
            whole = _padded(flat_memory_of(work.tensor), layers.num_devices)
            work.op.prepared(whole)
            part = whole.new_empty(whole.numel() // layers.num_devices)
            layers.scattering.reduce_scatter(part, whole, OPERATIONS[work.op.meaning])
            self._copier.wait(self._copier.mark(layers.device))
            work.inner_step = ""
            staged = None
            if layers.staged is not None:
                left_s = max(0.0, work.began_s + work.timeout_s - time.monotonic())
                staged = layers.staged.all_reduce(part, work.op._replace(prepare=None), timeout_s=left_s + GRACE_S)
        self._gathering.submit(0, (), partial(self._gather, layers, work, whole, part, staged))

    def _gather(
        self,
        layers: Layers,
        work: HierarchicalWork,
        whole: torch.Tensor,
        part: torch.Tensor,
        staged: TensorWork | None,
    ) -> None:
        """Wait for the own part of the result, and gather all parts within the host."""
        with self._copier.aside(layers.device, CopyKind.TO_DEVICE, [work.tensor, whole, part]):
            if staged is not None:
                staged.wait()
            else:
                work.op.finished(part)
            work.inner_step = "all-gather"
            layers.gathering.all_gather(whole, part)
            put_back(whole[: work.tensor.numel()], work.tensor)
            self._copier.wait(self._copier.mark(layers.device))
        work.inner_step = ""
        self._end(work, None)

    def _broke(self, error: BaseException) -> None:
        """End all calls because a thread of this could not go on: for the death that is behind it, if there is one."""
        if not isinstance(error, SynclineError):
            self._has_failed.wait(LOSS_S)
            failure = FabricError(f"{self._describe_host()} could not do all_reduce on their devices: {error}")
            failure.__cause__ = error
            error = failure
        self._fail(error)

    # On the communication loop's thread, or on any.

    def _expire(self, work: HierarchicalWork) -> None:
        timer = asyncio.get_running_loop().call_later(work.timeout_s, self._late, work)
        work.works[0].add_done_callback(lambda _: timer.cancel())

    def _late(self, work: HierarchicalWork) -> None:
        """Give up a call with which the devices do not end; the network's part has a deadline of its own."""
        if work.inner_step:
            text = (
                f"{self._describe_host()} have all come to all_reduce, but their devices did not end its "
                f"{work.inner_step} within {work.timeout_s:g} s; look what runs on the devices, or raise the timeout"
            )
            self._fail(DeadlineError(text))

    def _on_lost(self, peer: int, error: Exception) -> None:
        """Devices wait for ever for one whose process has died."""
        assert self._losses is not None, "it tells of losses"
        if peer == self._losses.rank:
            self._losses.close()
        elif not isinstance(error, PeerLeftError):
            self._fail(error)

    def _fail(self, error: BaseException, *, tells: bool = True) -> None:
        """End all calls, now and later; with ``tells``, on all ranks."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            under_way = tuple(self._under_way)
        self._has_failed.set()
        layers = self._layers
        if layers is not None and (tells or under_way):
            for inner in layers.inner_groups:  # which may take its time
                threading.Thread(target=inner.abort, name="syncline-abort", daemon=True).start()
        if tells and layers is not None:
            for communicator in (self._group, *layers.communicators):
                with suppress(FabricError):  # it may be closed
                    communicator.give_up(str(error))
        for work in under_way:
            self._end(work, error)

    def _describe_host(self) -> str:
        host = self._layers.host if self._layers is not None else self._group
        return f"{name_ranks(host.members)} (host {host.topology.host_of(host.rank).name})"


def _padded(flat: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return ``flat`` itself, if it divides into equal parts, else a copy with zeros behind it that does."""
    num_missing = -flat.numel() % num_parts
    return torch.cat([flat, flat.new_zeros(num_missing)]) if num_missing else flat
