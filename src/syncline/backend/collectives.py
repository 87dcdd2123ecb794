"""Every collective of ``torch.distributed`` on a communicator, of all ranks of a job or of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

import torch

from syncline.backend.checks import check_one_for_each_rank, check_same_size, check_tensors
from syncline.backend.direct import DirectCollectives
from syncline.backend.hierarchical import HierarchicalCollectives
from syncline.backend.reductions import ReduceOp, reduction_of
from syncline.backend.staged_collectives import StagedCollectives
from syncline.errors import ConfigurationError
from syncline.pytorch.collectives import TensorCollectives, TensorReduction, TensorWork
from syncline.pytorch.host_memory import ScratchPool, host_memory_of, joined, overlap, put_back, touches
from syncline.runtime.call import BasicSettings
from syncline.runtime.communicator import Communicator
from syncline.runtime.direct import start_direct
from syncline.updates.memory import bytes_of

Tensors = Sequence[torch.Tensor]

RELEASE_GRACE_S = 5.0
"""So much longer the others wait in a monitored barrier, so that they hear from its root who was missing."""


class GroupCollectives:
    """Begins the collectives of one rank; each method returns a work, whose ``wait()`` puts the result in place.

    Ranks, roots included, are those of the communicator. Tensors are dense, of any shape, memory order and device;
    those of one call have one number type, any that torch has (8-bit floats are moved, not reduced). ``timeout_s`` is
    the call's deadline, None the communicator's; with ``is_awaited`` the caller does nothing else until the call is
    over, so it may be over on return: small calls of ranks on one machine are then made in shared memory.

    The order of its calls must be the same on all ranks. Calls that differ in kind, operation, type or size are an
    error on all of them, :class:`MismatchError`; :class:`DeadlineError` and :class:`PeerLostError` name who is late or
    lost. After any of these no more calls can be made. What a tensor cannot do is refused before the call begins, with
    a :class:`ConfigurationError`, and the next call is as if it had not been made.

    ``scratch`` keeps memory from call to call; several groups may share it. Tensors of the device of ``staged`` travel
    in chunks in all_reduce, broadcast, all_gather_single and reduce_scatter_single; all others on a device as a whole.
    Where ``layered`` says that hosts have several devices each, an all_reduce goes by them.
    """

    def __init__(
        self,
        communicator: Communicator,
        scratch: ScratchPool | None = None,
        *,
        staged: StagedCollectives | None = None,
        layered: HierarchicalCollectives | None = None,
    ) -> None:
        self._communicator = communicator
        self._rank, self._num_ranks = communicator.rank, communicator.world_size
        self._scratch = scratch or ScratchPool()
        self._tensors = TensorCollectives(communicator, self._scratch)
        self._direct = DirectCollectives(communicator)
        self._staged = staged
        self._layered = layered

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make ``tensor`` the sum, or what ``op`` says, of those of all ranks."""
        check_tensors("all_reduce", [tensor])
        reduction = self._reduction(op, tensor)
        if self._staged is not None and self._staged.takes([tensor]):
            layered, limit_s = None, settings.get("timeout_s")
            if self._layered is not None:
                layered = self._layered.all_reduce(tensor, reduction, timeout_s=self._limit_s(limit_s))
            return layered or self._staged.all_reduce(tensor, reduction, timeout_s=limit_s)
        return self._tensors.all_reduce(tensor, op=reduction, **settings)

    def all_reduce_coalesced(self, tensors: Tensors, op: ReduceOp, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Do so with each of ``tensors``, which may be of several types; they are under way at once."""
        for tensor in tensors:
            check_tensors("all_reduce_coalesced", [tensor])
            self._reduction(op, tensor)
        apart = _apart(tensors)
        work = TensorWork.together([self.all_reduce(tensor, op, **settings) for tensor in apart])
        return work if apart is tensors else work.then(lambda: _put_all(apart, tensors))

    def all_reduce_several(self, tensors: Tensors, op: ReduceOp, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make each of ``tensors``, all of one size, what ``op`` makes of all of them on all ranks together."""
        check_tensors("allreduce", tensors)
        check_same_size("allreduce", tensors)
        reduction = self._reduction(op, tensors[0])
        if reduction.prepare is not None or reduction.finish is not None:
            raise ConfigurationError(
                f"allreduce makes one of several tensors, and {reduction.meaning} does not say how to count them; "
                "call allreduce_coalesced, which reduces each by itself"
            )
        total = host_memory_of(tensors[0]).clone(memory_format=torch.contiguous_format)
        for tensor in tensors[1:]:
            reduction.reduction.add(bytes_of(total), bytes_of(host_memory_of(tensor)))
        work = self._tensors.all_reduce(total, op=reduction, **settings)
        return work.then(lambda: _put_all([total] * len(tensors), tensors))

    def broadcast(self, tensor: torch.Tensor, root: int, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make ``tensor`` that of ``root``."""
        check_tensors("broadcast", [tensor])
        if self._staged is not None and self._staged.takes([tensor]):
            self._tensors.check_rank(root, "root")
            return self._staged.broadcast(tensor, root, timeout_s=settings.get("timeout_s"))
        return self._tensors.broadcast(tensor, root=root, **settings)

    def broadcast_several(
        self, tensors: Tensors, root: int, root_tensor: int, **settings: Unpack[BasicSettings]
    ) -> TensorWork:
        """Make each of ``tensors``, all of one size, the one of ``root`` with the index ``root_tensor``."""
        check_tensors("broadcast", tensors)
        check_same_size("broadcast", tensors)
        if not 0 <= root_tensor < len(tensors):
            raise ConfigurationError(
                f"broadcast: rootTensor is the index of one of {len(tensors)} tensors, not {root_tensor}"
            )
        chosen = tensors[root_tensor]
        work = self.broadcast(chosen, root, **settings)
        if len(tensors) == 1:
            return work
        return work.then(lambda: _put_all([chosen] * len(tensors), tensors))

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: ReduceOp,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``tensor`` of ``root`` what ``op`` makes of all ranks'; the others keep theirs. It is an all-reduce."""
        check_tensors("reduce", [tensor])
        return self._tensors.reduce(tensor, dst=root, op=self._reduction(op, tensor), **settings)

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make ``outputs[k]``, of the size of rank k's ``tensor``, that tensor; sizes may differ from rank to rank.

        Unequal parts take one planned all-gather whose cuts are moved to where the parts end: each byte crosses each
        link as often as in an all-gather of equal parts, once into every subtree that has not got it. A broadcast for
        each rank would move as much in N calls, padding up to N times as much.
        """
        check_one_for_each_rank("all_gather", "tensor_list", outputs, self._num_ranks)
        check_tensors("all_gather", [tensor, *outputs])
        check_same_size(f"all_gather, of rank {self._rank},", [tensor, outputs[self._rank]])
        in_place = joined(outputs)
        num_elements = sum(output.numel() for output in outputs)
        whole = self._scratch.borrow_empty(num_elements, tensor.dtype) if in_place is None else in_place
        work = self._tensors.all_gather(whole, tensor, parts=_parts(outputs), **settings)
        return work if in_place is not None else work.then(self._divider(whole, outputs))

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, **settings: Unpack[BasicSettings]
    ) -> TensorWork:
        """Make ``output`` all ranks' ``source``, in rank order; ``source`` may be its own part of ``output``."""
        check_tensors("all_gather_single", [output, source])
        if self._staged is not None and self._staged.takes([output, source]):
            self._tensors.check_parts(source, output, (), "all_gather")
            return self._staged.all_gather(output, source, timeout_s=settings.get("timeout_s"))
        return self._tensors.all_gather(output, source, **settings)

    def all_gather_several(
        self, outputs: Sequence[Tensors], tensors: Tensors, **settings: Unpack[BasicSettings]
    ) -> TensorWork:
        """Make each of ``outputs`` all tensors of rank 0, then those of rank 1, ...; all are of one size."""
        number = len(tensors)
        if len(outputs) != number or any(len(one) != number * self._num_ranks for one in outputs):
            raise ConfigurationError(
                f"allgather of {number} tensors needs {number} lists of {number * self._num_ranks} outputs, for each "
                f"tensor of each rank, not lists of {', '.join(str(len(one)) for one in outputs)}; pass them to "
                "allgather_coalesced to gather each by itself"
            )
        check_tensors("allgather", [*tensors, *(one for several in outputs for one in several)])
        check_same_size("allgather", [*tensors, *(one for several in outputs for one in several)])
        first = outputs[0]
        works = [self.all_gather(first[place::number], one, **settings) for place, one in enumerate(tensors)]
        work = TensorWork.together(works)

        def copy() -> None:
            for several in outputs[1:]:
                _put_all(first, several)

        return work.then(copy)

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
        works = [
            self.all_gather_single(output, source, **settings) for output, source in zip(apart, sources, strict=True)
        ]
        work = TensorWork.together(works)
        return work if apart is outputs else work.then(lambda: _put_all(apart, outputs))

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
        check_one_for_each_rank("reduce_scatter", "input_list", inputs, self._num_ranks)
        check_tensors("reduce_scatter", [output, *inputs])
        check_same_size(f"reduce_scatter, of rank {self._rank},", [output, inputs[self._rank]])
        reduction = self._reduction(op, output)
        in_place = joined(inputs)
        whole = torch.cat([host_memory_of(one).reshape(-1) for one in inputs]) if in_place is None else in_place
        return self._tensors.reduce_scatter(
            output,
            whole,
            op=reduction,
            parts=_parts(inputs),
            may_overwrite=in_place is None,
            **settings,
        )

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        op: ReduceOp,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``output`` of rank k part k of what ``op`` makes of all ranks' ``source``, of which it may be a part."""
        check_tensors("reduce_scatter_single", [output, source])
        reduction = self._reduction(op, source)
        if self._staged is not None and self._staged.takes([output, source]):
            self._tensors.check_parts(output, source, (), "reduce_scatter")
            return self._staged.reduce_scatter(output, source, reduction, timeout_s=settings.get("timeout_s"))
        return self._tensors.reduce_scatter(output, source, op=reduction, **settings)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Tensors,
        sources: Tensors,
        op: ReduceOp,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Do as :meth:`reduce_scatter_single` with each pair of tensors; all are under way at once."""
        _check_lists("reduce_scatter_single_coalesced", [outputs, sources])
        return TensorWork.together(
            [
                self.reduce_scatter_single(output, source, op, **settings)
                for output, source in zip(outputs, sources, strict=True)
            ]
        )

    def gather(
        self,
        outputs: Tensors | None,
        tensor: torch.Tensor,
        root: int,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``outputs[k]`` of ``root`` the ``tensor`` of rank k, of one size on all; others give no outputs."""
        self._tensors.check_rank(root, "root")
        return self._direct.gather(outputs, tensor, root=root, **settings)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors | None,
        root: int,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``output`` of rank k ``inputs[k]`` of ``root``, of one size for all; others give no inputs."""
        self._tensors.check_rank(root, "root")
        return self._direct.scatter(output, inputs, root=root, **settings)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make ``outputs[k]`` what rank k has as ``inputs`` for this rank; sizes may differ from pair to pair."""
        return self._direct.all_to_all(outputs, inputs, **settings)

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
        return self._direct.all_to_all_single(output, source, output_splits, input_splits, **settings)

    def barrier(self, **settings: Unpack[BasicSettings]) -> TensorWork:
        """End when every rank has called it."""
        return TensorWork([self._communicator.barrier(**settings)], _do_nothing)

    def monitored_barrier(self, *, wait_all_ranks: bool = False, timeout_s: float | None = None) -> TensorWork:  # noqa: ARG002 - in both cases all ranks that are missing are named
        """End when every rank has called it; at the deadline the error of all ranks names those that have not.

        Rank 0 waits for each of the others, and then lets them go; it does not return before all have come. The others
        wait a little longer than it, so as to hear whom it missed.
        """
        empty = memoryview(bytearray(0))
        others = tuple((peer, memoryview(bytearray(0))) for peer in range(1, self._num_ranks))
        limit_s = self._limit_s(timeout_s)
        is_root = self._rank == 0
        if not is_root:
            limit_s += RELEASE_GRACE_S
        settings: BasicSettings = {"label": "monitored_barrier", "timeout_s": limit_s}
        start = partial(start_direct, self._communicator)
        arrivals, releases = (others, ()) if is_root else ((), ((0, empty),))
        arrived = start("gather", sends=releases, receives=arrivals, about="arrivals", root=0, **settings)
        if is_root:
            arrived.wait()
        released = start("scatter", sends=arrivals, receives=releases, about="releases", root=0, **settings)
        return TensorWork([arrived, released], _do_nothing)

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._communicator.timeout_s if timeout_s is None else timeout_s

    def _reduction(self, op: ReduceOp, tensor: torch.Tensor) -> TensorReduction:
        return reduction_of(op, tensor.dtype, self._num_ranks)

    def _divider(self, whole: torch.Tensor, outputs: Tensors) -> Callable[[], None]:
        """Return what puts the parts of ``whole`` into ``outputs``; of one that is there twice the last part counts."""

        def divide() -> None:
            for part, output in zip(torch.split(whole, [one.numel() for one in outputs]), outputs, strict=True):
                put_back(part, output)
            self._scratch.give_back(whole)

        return divide


def _parts(tensors: Tensors) -> list[int]:
    """Return the elements of each rank's part; none if all are equal."""
    sizes = [tensor.numel() for tensor in tensors]
    return sizes if len(set(sizes)) > 1 else []


def _apart(tensors: Tensors) -> Tensors:
    """Return ``tensors``, or copies of all where one of them lies in another's memory: calls on both would add up."""
    return [tensor.detach().clone() for tensor in tensors] if overlap(tensors) else tensors


def _put_all(results: Tensors, tensors: Tensors) -> None:
    for result, tensor in zip(results, tensors, strict=True):
        put_back(result, tensor)


def _check_lists(call: str, lists: Sequence[Sequence[object]]) -> None:
    lengths = [len(one) for one in lists]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"{call} needs as many outputs as inputs, not {' and '.join(map(str, lengths))}")


def _do_nothing() -> None:
    """There is no result."""
