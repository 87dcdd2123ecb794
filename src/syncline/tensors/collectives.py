"""Every collective on tensors: any number type, memory order and device, of all ranks of a job or of a group.

What a collective cannot take is refused here, on the rank that asks, with a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

import torch
import torch.distributed as dist

from syncline.errors import ConfigurationError
from syncline.runtime.call import BasicSettings, CallSettings
from syncline.runtime.communicator import Communicator
from syncline.runtime.shared_memory import KeptCall
from syncline.schedule import Collective
from syncline.tensors.device_copies import refuse_capture
from syncline.tensors.memory import (
    ScratchPool,
    bytes_of,
    dtype_name,
    host_memory_of,
    is_ordinary,
    is_plain,
    joined,
    landing_memory_of,
    overlap,
    put_back,
    shares_memory,
    summands_of,
    touches,
)
from syncline.tensors.reductions import Operation, ReduceOp, TensorReduction, check_weight, multiply_by, reduction_of
from syncline.tensors.work import TensorWork

if TYPE_CHECKING:
    from syncline.tensors.staging import StagedCollectives

Tensors = Sequence[torch.Tensor]

BARRIER = torch.zeros(1, dtype=torch.uint8, device="cpu")
"""What is summed in a barrier that is made at once; nobody reads the sum."""
MOST_KEPT = 256
"""Kinds of calls."""
RELEASE_GRACE_S = 5.0
"""So much longer the others wait in a monitored barrier, so that they hear from its root who was missing."""


class OtherReductions(Protocol):
    """Another way for some reductions, in fewer bytes."""

    def all_reduce(self, tensor: torch.Tensor, reduction: TensorReduction) -> TensorWork | None:
        """Begin one; None if it goes the usual way."""

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduction: TensorReduction
    ) -> TensorWork | None:
        """Begin one of equal parts; None if it goes the usual way."""


class TensorCollectives:
    """Begins the collectives of one rank; each method returns a work, whose ``wait()`` puts the result in place.

    Ranks, roots included, are those of the communicator. Tensors are dense, of any shape, memory order and device;
    those of one call have one number type, any that torch has (8-bit floats are moved, not reduced). ``timeout_s`` is
    the call's deadline, None the communicator's; with ``is_awaited`` the caller does nothing else until the call is
    over, so it may be over on return: small calls of ranks on one machine are then made in shared memory. ``weight``
    multiplies what this rank brings to a "sum" or a "mean", which is then divided by the sum of all weights.

    The order of its calls must be the same on all ranks. Calls that differ in kind, operation, type or size are an
    error, :class:`MismatchError`, on every rank, at the latest in its next call; :class:`DeadlineError` and
    :class:`PeerLostError` name who is late or lost. After any of these no more calls can be made. What a tensor cannot
    do is refused before the call begins, with a :class:`ConfigurationError`, and the next call is as if it had not been
    made.

    ``scratch`` keeps memory from call to call; several groups may share it. Tensors of the device of ``staged`` travel
    in chunks in all_reduce, broadcast, all_gather_single and reduce_scatter_single; all others on a device as a whole.
    """

    def __init__(
        self,
        communicator: Communicator,
        scratch: ScratchPool | None = None,
        *,
        staged: StagedCollectives | None = None,
    ) -> None:
        self._communicator = communicator
        self._rank, self._num_ranks = communicator.rank, communicator.world_size
        self._scratch = scratch or ScratchPool()
        self._staged = staged
        self.other_way: OtherReductions | None = None
        self._start_direct = communicator.start_direct
        self._kept: dict[tuple[torch.dtype, int, object], KeptCall | None] = {}
        self._kept_for = communicator.topology

    def find_kept(
        self, tensor: torch.Tensor, op: Operation | dist.ReduceOp.RedOpType | Literal["barrier"]
    ) -> KeptCall | None:
        """Return what makes an all-reduce like this at once, in memory that the ranks share; None: it cannot be.

        It is for callers that wait. ``op`` "barrier" stands for one of :data:`BARRIER`.
        """
        if self.other_way is not None or not self._communicator.has_segment:
            return None
        if tensor is not BARRIER and (not is_ordinary(tensor) or self._staged_for(tensor) is not None):
            return None
        if self._kept_for is not self._communicator.topology or len(self._kept) > MOST_KEPT:
            self._kept, self._kept_for = {}, self._communicator.topology
        key = tensor.dtype, tensor.nbytes, op
        try:
            kept = self._kept[key]
        except KeyError:
            kept = self._kept[key] = self._keep(*key)
        return kept

    def _keep(self, dtype: torch.dtype, num_bytes: int, op: Any) -> KeptCall | None:
        is_barrier = op == "barrier"
        try:
            reduction = reduction_of("sum" if is_barrier else op, dtype, self._num_ranks)
        except ConfigurationError:  # which the call itself tells, in its words
            return None
        if not num_bytes or reduction.prepare is not None:
            return None
        about: CallSettings = {"label": op, "op": op} if is_barrier else {"op": reduction.meaning}
        adds, finish = reduction.reduction, reduction.finish
        return self._communicator.keep(num_bytes, adds, view=bytes_of, finish=finish, **about)

    # What all ranks bring becomes one.

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Operation | ReduceOp,
        *,
        weight: float | None = None,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``tensor`` the sum, or what ``op`` says, of those of all ranks."""
        check_tensors("all_reduce", [tensor])
        reduction = self._reduction(op, tensor, weight, settings)
        if self.other_way is not None and (begun := self.other_way.all_reduce(tensor, reduction)) is not None:
            return begun
        if (staged := self._staged_for(tensor)) is not None:
            return staged.all_reduce(tensor, reduction, timeout_s=settings.get("timeout_s"))
        host = reduction.prepared(host_memory_of(tensor))
        memory = bytes_of(host)
        schedule = self._communicator.plan(Collective.ALL_REDUCE, memory.nbytes)
        work = self._communicator.start(schedule, memory, reduction.reduction, **settings, op=reduction.meaning)
        return TensorWork([work], lambda: put_back(reduction.finished(host), tensor))

    def all_reduce_coalesced(self, tensors: Tensors, op: ReduceOp, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Do so with each of ``tensors``, which may be of several types; they are under way at once."""
        for tensor in tensors:
            check_tensors("all_reduce_coalesced", [tensor])
            reduction_of(op, tensor.dtype, self._num_ranks)
        apart = _apart(tensors)
        work = TensorWork.together([self.all_reduce(tensor, op, **settings) for tensor in apart])
        return work if apart is tensors else work.then(lambda: _put_all(apart, tensors))

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: Operation | ReduceOp,
        *,
        weight: float | None = None,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``tensor`` of ``root`` what ``op`` makes of all ranks'; the others keep theirs. It is an all-reduce."""
        check_tensors("reduce", [tensor])
        self.check_rank(root, "dst")
        reduction = self._reduction(op, tensor, weight, settings)
        is_result = root == self._rank
        host = host_memory_of(tensor)
        if not is_result and shares_memory(host, tensor):
            host = host.clone()
        host = reduction.prepared(host)
        settings["label"] = "reduce"
        meaning = f"{reduction.meaning} for rank {root}"
        work = self._communicator.all_reduce(bytes_of(host), reduction.reduction, **settings, op=meaning)
        return TensorWork([work], lambda: put_back(reduction.finished(host), tensor) if is_result else None)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors,
        op: ReduceOp,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``output`` of rank k what ``op`` makes of all ranks' ``inputs[k]``; sizes may differ from k to k.

        Unequal parts travel as in :meth:`all_gather`.
        """
        _check_one_for_each_rank("reduce_scatter", "input_list", inputs, self._num_ranks)
        check_tensors("reduce_scatter", [output, *inputs])
        _check_same_size(f"reduce_scatter, of rank {self._rank},", [output, inputs[self._rank]])
        reduction = self._reduction(op, output)
        if (whole := joined(inputs)) is not None:
            return self._reduce_scatter(output, whole, reduction, _parts(inputs), settings)
        whole = torch.cat([host_memory_of(one).reshape(-1) for one in inputs])
        return self._reduce_scatter(output, whole, reduction, _parts(inputs), settings, may_overwrite=True)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        op: Operation | ReduceOp,
        *,
        weight: float | None = None,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``output`` of rank k part k of what ``op`` makes of all ranks' ``source``, of which it may be a part."""
        self._check_parts(output, source, "reduce_scatter")
        reduction = self._reduction(op, source, weight, settings)
        other = self.other_way
        if other is not None and (begun := other.reduce_scatter(output, source, reduction)) is not None:
            return begun
        if (staged := self._staged_for(output, source)) is not None:
            return staged.reduce_scatter(output, source, reduction, timeout_s=settings.get("timeout_s"))
        return self._reduce_scatter(output, source, reduction, (), settings)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Tensors,
        sources: Tensors,
        op: ReduceOp,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Do as :meth:`reduce_scatter_single` with each pair of tensors; all are under way at once."""
        _check_lists("reduce_scatter_single_coalesced", [outputs, sources])
        pairs = zip(outputs, sources, strict=True)
        return TensorWork.together(
            [self.reduce_scatter_single(output, source, op, **settings) for output, source in pairs]
        )

    # What ranks bring is moved as it is.

    def broadcast(self, tensor: torch.Tensor, root: int, **settings: Unpack[CallSettings]) -> TensorWork:
        """Make ``tensor`` that of ``root``."""
        check_tensors("broadcast", [tensor])
        self.check_rank(root, "root")
        if (staged := self._staged_for(tensor)) is not None:
            return staged.broadcast(tensor, root, timeout_s=settings.get("timeout_s"))
        host = host_memory_of(tensor)
        settings["elements"] = dtype_name(host.dtype)
        work = self._communicator.broadcast(bytes_of(host), root=root, **settings)
        is_result = root != self._rank
        return TensorWork([work], lambda: put_back(host, tensor) if is_result else None)

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make ``outputs[k]``, of the size of rank k's ``tensor``, that tensor; sizes may differ from rank to rank.

        Unequal parts take one planned all-gather whose cuts are moved to where the parts end: each byte crosses each
        link as often as in an all-gather of equal parts, once into every subtree that has not got it. A broadcast for
        each rank would move as much in N calls, padding up to N times as much.
        """
        _check_one_for_each_rank("all_gather", "tensor_list", outputs, self._num_ranks)
        check_tensors("all_gather", [tensor, *outputs])
        _check_same_size(f"all_gather, of rank {self._rank},", [tensor, outputs[self._rank]])
        parts = _parts(outputs)
        if (in_place := joined(outputs)) is not None:
            return self._all_gather(in_place, tensor, parts, **settings)
        sizes = [output.numel() for output in outputs]
        whole = self._scratch.borrow_empty(sum(sizes), tensor.dtype)

        def divide() -> None:
            _put_all(torch.split(whole, sizes), outputs)  # of one that is there twice the last part counts
            self._scratch.give_back(whole)

        return self._all_gather(whole, tensor, parts, **settings).then(divide)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, **settings: Unpack[CallSettings]
    ) -> TensorWork:
        """Make ``output`` all ranks' ``source``, in rank order; ``source`` may be its own part of ``output``."""
        self._check_parts(source, output, "all_gather")
        if (staged := self._staged_for(output, source)) is not None:
            return staged.all_gather(output, source, timeout_s=settings.get("timeout_s"))
        return self._all_gather(output, source, (), **settings)

    def all_gather_coalesced(
        self,
        outputs: Sequence[Tensors],
        tensors: Tensors,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``outputs[k][i]`` the tensor i of rank k."""
        lists = [[of_rank[place] for of_rank in outputs if place < len(of_rank)] for place in range(len(tensors))]
        _check_lists("all_gather_coalesced", [lists, tensors])
        return TensorWork.together(
            [self.all_gather(of_tensor, tensor, **settings) for of_tensor, tensor in zip(lists, tensors, strict=True)]
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, sources: Tensors, **settings: Unpack[BasicSettings]
    ) -> TensorWork:
        """Do as :meth:`all_gather_single` with each pair of tensors; all are under way at once."""
        _check_lists("all_gather_single_coalesced", [outputs, sources])
        apart = _apart(outputs)
        if touches(apart, sources):
            sources = [source.clone() for source in sources]
        pairs = zip(apart, sources, strict=True)
        work = TensorWork.together([self.all_gather_single(output, source, **settings) for output, source in pairs])
        return work if apart is outputs else work.then(lambda: _put_all(apart, outputs))

    # Each pair of ranks has bytes of its own: they go to whom they are for, directly.

    def gather(
        self,
        outputs: Tensors | None,
        tensor: torch.Tensor,
        root: int,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``outputs[k]`` of ``root`` the ``tensor`` of rank k, of one size on all; others give no outputs."""
        self.check_rank(root, "root")
        start = partial(self._start_direct, "gather", about=_each(tensor, "of"), root=root, **settings)
        if self._rank != root:
            _check_none("gather", "gather_list", outputs, root)
            check_tensors("gather", [tensor])
            return TensorWork([start(sends=((root, bytes_of(host_memory_of(tensor))),), receives=())])
        outputs = outputs or ()
        _check_one_for_each_rank("gather", "gather_list", outputs, self._num_ranks)
        check_tensors("gather", [tensor, *outputs])
        _check_same_size("gather", [tensor, *outputs])
        landing = _landing(outputs)
        put_back(host_memory_of(tensor), landing[root])
        receives = tuple((peer, bytes_of(host)) for peer, host in enumerate(landing) if peer != root)
        return TensorWork([start(sends=(), receives=receives)], lambda: _put_all(landing, outputs))

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors | None,
        root: int,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``output`` of rank k ``inputs[k]`` of ``root``, of one size for all; others give no inputs."""
        self.check_rank(root, "root")
        start = partial(self._start_direct, "scatter", about=_each(output, "for"), root=root, **settings)
        if self._rank != root:
            _check_none("scatter", "scatter_list", inputs, root)
            check_tensors("scatter", [output])
            host = landing_memory_of(output)
            work = start(sends=(), receives=((root, bytes_of(host)),))
            return TensorWork([work], lambda: put_back(host, output))
        inputs = inputs or ()
        _check_one_for_each_rank("scatter", "scatter_list", inputs, self._num_ranks)
        check_tensors("scatter", [output, *inputs])
        _check_same_size("scatter", [output, *inputs])
        own = host_memory_of(inputs[root])
        sends = tuple((peer, bytes_of(host_memory_of(one))) for peer, one in enumerate(inputs) if peer != root)
        # the output may be one of the inputs: they have left by then
        return TensorWork([start(sends=sends, receives=())], lambda: put_back(own, output))

    def all_to_all(self, outputs: Tensors, inputs: Tensors, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make ``outputs[k]`` what rank k has as ``inputs`` for this rank; sizes may differ from pair to pair."""
        _check_one_for_each_rank("all_to_all", "output_tensor_list", outputs, self._num_ranks)
        _check_one_for_each_rank("all_to_all", "input_tensor_list", inputs, self._num_ranks)
        check_tensors("all_to_all", [*outputs, *inputs])
        _check_same_size("all_to_all, of what a rank has for itself,", [outputs[self._rank], inputs[self._rank]])
        landing = _landing(outputs)
        work = self._exchange(landing, [host_memory_of(one) for one in inputs], settings)
        return work.then(lambda: _put_all(landing, outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Send the next ``input_splits[k]`` rows of ``source`` to rank k, and receive ``output_splits[k]`` of it.

        Splits may be 0; none at all mean equal ones. They may differ from pair to pair.
        """
        check_tensors("all_to_all_single", [output, source])
        received = _split_sizes("all_to_all_single, output", output, output_splits, self._num_ranks)
        sent = _split_sizes("all_to_all_single, input", source, input_splits, self._num_ranks)
        landing = landing_memory_of(output)
        parts, brought = _split(landing, received), _split(host_memory_of(source), sent)
        _check_same_size("all_to_all_single, of what a rank has for itself,", [parts[self._rank], brought[self._rank]])
        return self._exchange(parts, brought, settings).then(lambda: put_back(landing, output))

    def barrier(self, **settings: Unpack[BasicSettings]) -> TensorWork:
        """End when every rank has called it."""
        return TensorWork([self._communicator.barrier(**settings)])

    def monitored_barrier(self, *, wait_all_ranks: bool = False, timeout_s: float | None = None) -> TensorWork:  # noqa: ARG002 - in both cases all ranks that are missing are named
        """End when every rank has called it; at the deadline the error of all ranks names those that have not.

        Rank 0 waits for each of the others, and then lets them go; it does not return before all have come. The others
        wait a little longer than it, so as to hear whom it missed.
        """
        empty = memoryview(bytearray(0))
        others = tuple((peer, memoryview(bytearray(0))) for peer in range(1, self._num_ranks))
        limit_s = self._communicator.timeout_s if timeout_s is None else timeout_s
        is_root = self._rank == 0
        if not is_root:
            limit_s += RELEASE_GRACE_S
        settings: BasicSettings = {"label": "monitored_barrier", "timeout_s": limit_s}
        arrivals, releases = (others, ()) if is_root else ((), ((0, empty),))
        arrived = self._start_direct("gather", sends=releases, receives=arrivals, about="arrivals", root=0, **settings)
        if is_root:
            arrived.wait()
        released = self._start_direct(
            "scatter", sends=arrivals, receives=releases, about="releases", root=0, **settings
        )
        return TensorWork([arrived, released])

    def check_rank(self, rank: int, name: str) -> None:
        """Raise :class:`ConfigurationError` if there is no such rank; ``name`` is the argument's."""
        last = self._num_ranks - 1
        if not isinstance(rank, Integral) or not 0 <= rank <= last:
            raise ConfigurationError(f"{name} must be a rank, 0 to {last}, not {rank!r}")

    def _check_parts(self, part: torch.Tensor, whole: torch.Tensor, call: str) -> None:
        check_tensors(call, [part, whole])
        if whole.numel() != self._num_ranks * part.numel():
            raise ConfigurationError(
                f"{call} needs a whole of {self._num_ranks} (ranks) times the part's elements and the same type, not "
                f"{whole.numel()} of {whole.dtype} and {part.numel()} of {part.dtype}; pad it"
            )

    def _staged_for(self, *tensors: torch.Tensor) -> StagedCollectives | None:
        """Return what moves them in chunks, if they are on a device for which there is that."""
        return self._staged if self._staged is not None and self._staged.takes(tensors) else None

    def _reduction(
        self,
        op: Operation | ReduceOp,
        tensor: torch.Tensor,
        weight: float | None = None,
        settings: BasicSettings | None = None,
    ) -> TensorReduction:
        """Return what ``op`` makes of ``tensor`` with this rank's weight; of a mean, all weights are summed beside."""
        reduction = reduction_of(op, tensor.dtype, self._num_ranks)
        if weight is None:
            return reduction
        check_weight(tensor.dtype, reduction.meaning, weight)
        weighted = reduction._replace(meaning=f"weighted {reduction.meaning}", prepare=multiply_by(weight))
        if reduction.finish is None:
            return weighted
        weights = torch.tensor([weight], dtype=torch.float64)
        label = f"weight of {tensor.numel()} x {dtype_name(tensor.dtype)}"
        settings = {**(settings or {}), "label": label}
        total_weight = self._communicator.all_reduce(*summands_of(weights), **settings, op="total weight of a mean")

        def divide(total: torch.Tensor) -> None:
            total_weight.wait()
            total.div_(float(weights[0]))

        return weighted._replace(finish=divide)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        reduction: TensorReduction,
        parts: Sequence[int],
        settings: BasicSettings,
        *,
        may_overwrite: bool = False,
    ) -> TensorWork:
        """Begin one of a ``source`` in one piece, which holds something else afterwards only with ``may_overwrite``."""
        host = host_memory_of(source)
        scratch = self._scratch.borrow(host) if shares_memory(host, source) and not may_overwrite else None
        host = reduction.prepared(host if scratch is None else scratch)
        work = self._communicator.reduce_scatter(
            bytes_of(host), reduction.reduction, parts=parts, **settings, op=reduction.meaning
        )

        def finish() -> None:
            put_back(reduction.finished(self._part(host, output, parts)), output)
            if scratch is not None:
                self._scratch.give_back(scratch)

        return TensorWork([work], finish)

    def _all_gather(
        self, output: torch.Tensor, source: torch.Tensor, parts: Sequence[int], **settings: Unpack[CallSettings]
    ) -> TensorWork:
        """Begin one of an ``output`` in one piece."""
        host = landing_memory_of(output)
        own_part = None
        if settings.get("is_awaited") and is_plain(source):
            own_part = bytes_of(source.detach())
        else:
            put_back(source.detach(), self._part(host, source, parts))
        settings["elements"] = dtype_name(host.dtype)
        sizes = [part * host.itemsize for part in parts]
        work = self._communicator.all_gather(bytes_of(host), parts=sizes, own_part=own_part, **settings)
        return TensorWork([work], lambda: put_back(host, output))

    def _exchange(self, landing: Tensors, brought: Tensors, settings: BasicSettings) -> TensorWork:
        """Let what others have for this rank land, and send them what it has for them."""
        if touches(landing, brought):
            brought = [one.clone() for one in brought]  # what lands must not change what has yet to leave
        others = [peer for peer in range(self._num_ranks) if peer != self._rank]
        work = self._start_direct(
            "all_to_all",
            sends=tuple((peer, bytes_of(brought[peer])) for peer in others),
            receives=tuple((peer, bytes_of(landing[peer])) for peer in others),
            about=f"bytes of {dtype_name(brought[self._rank].dtype)}",
            **settings,
        )
        put_back(brought[self._rank], landing[self._rank])  # meanwhile: of two ranks, that is half of all
        return TensorWork([work])

    def _part(self, whole: torch.Tensor, like: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        """Return this rank's part of ``whole``; ``parts`` are the elements of each rank's, where they are not equal."""
        start = sum(parts[: self._rank]) if parts else self._rank * like.numel()
        return whole.reshape(-1)[start : start + like.numel()].view(like.shape)


def _parts(tensors: Tensors) -> list[int]:
    """Return the elements of each rank's part; none if all are equal."""
    sizes = [tensor.numel() for tensor in tensors]
    return sizes if len(set(sizes)) > 1 else []


def _apart(tensors: Tensors) -> Tensors:
    """Return ``tensors``, or copies of all where one of them lies in another's memory: calls on both would add up."""
    return [tensor.detach().clone() for tensor in tensors] if overlap(tensors) else tensors


def _landing(outputs: Tensors) -> list[torch.Tensor]:
    """Return memory of each output's own: of outputs that overlap, the last one that is put in place counts."""
    hosts = [landing_memory_of(output) for output in outputs]
    if overlap(hosts):
        return [torch.empty(output.shape, dtype=output.dtype) for output in outputs]
    return hosts


def _put_all(results: Tensors, tensors: Tensors) -> None:
    for result, tensor in zip(results, tensors, strict=True):
        put_back(result, tensor)


def _split(whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(whole.reshape(-1), list(sizes)))


def _each(tensor: torch.Tensor, whose: str) -> str:
    """Say what all ranks must mean alike, where each has one tensor."""
    return f"{tensor.nbytes} bytes of {dtype_name(tensor.dtype)} {whose} each rank"


def _check_lists(call: str, lists: Sequence[Sequence[object]]) -> None:
    lengths = [len(one) for one in lists]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"{call} needs as many outputs as inputs, not {' and '.join(map(str, lengths))}")


def _check_none(call: str, name: str, tensors: Tensors | None, root: int) -> None:
    if tensors:
        raise ConfigurationError(f"{call}: rank {root} alone gives a {name}; give none on the other ranks")


def check_tensors(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise :class:`ConfigurationError` if one of ``tensors`` cannot be moved, or if their types differ."""
    if any(tensor.is_cuda for tensor in tensors):
        refuse_capture(call)
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ConfigurationError(
                f"{call} moves dense tensors, not {kind} ones; give tensor.to_dense(), or its values and indices"
            )
        if tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized"
            raise ConfigurationError(f"{call} moves numbers, which a {kind} tensor does not hold; convert it first")
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ConfigurationError(f"{call} needs tensors of one number type, not of {names}; convert them")


def _check_one_for_each_rank(call: str, name: str, tensors: Sequence[torch.Tensor], num_ranks: int) -> None:
    """Raise :class:`ConfigurationError` if there are not as many ``tensors`` as ranks."""
    if len(tensors) != num_ranks:
        raise ConfigurationError(f"{call}: {name} needs one tensor for each of {num_ranks} ranks, not {len(tensors)}")


def _check_same_size(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise :class:`ConfigurationError` if ``tensors`` differ in their number of elements."""
    sizes = sorted({tensor.numel() for tensor in tensors})
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{call} needs tensors of one size, not of {', '.join(map(str, sizes))} elements; pad them, or call "
            "all_gather, reduce_scatter or all_to_all, which take several"
        )


def _split_sizes(call: str, tensor: torch.Tensor, splits: Sequence[int], num_ranks: int) -> list[int]:
    """Return how many elements of ``tensor`` belong to each rank; ``splits`` along dimension 0, none: equal ones."""
    num_rows = tensor.size(0) if tensor.ndim else 1
    if not splits:
        if num_rows % num_ranks:
            raise ConfigurationError(
                f"{call}: dimension 0 has {num_rows} rows, which {num_ranks} ranks cannot divide; give split sizes"
            )
        splits = [num_rows // num_ranks] * num_ranks
    if len(splits) != num_ranks or min(splits) < 0 or sum(splits) != num_rows:
        raise ConfigurationError(
            f"{call}: split sizes are {num_ranks} numbers of rows, {num_rows} together, not {list(splits)}"
        )
    num_columns = tensor.numel() // num_rows if num_rows else 0
    return [split * num_columns for split in splits]
