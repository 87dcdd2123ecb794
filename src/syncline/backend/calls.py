"""All calls of ``torch.distributed`` on one group, once for both shells: under each name that PyTorch has for them.

Arguments are as PyTorch passes them: lists of tensors, and options that carry the operation, the root (a rank of the
group), the timeout of this call, and whether the caller goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from syncline.backend import NAME
from syncline.backend.call_work import CallWork
from syncline.backend.group_state import GroupState
from syncline.backend.signatures import CALLS, takes_torch_names
from syncline.errors import ConfigurationError
from syncline.runtime.call import BasicSettings
from syncline.tensors.collectives import BARRIER, TensorCollectives
from syncline.tensors.reductions import ReduceOp
from syncline.tensors.work import OVER, TensorWork
from syncline.updates.private_torch import uncompiled

Tensors = Sequence[torch.Tensor]
_CALLED_FROM_CPP = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
)


class GroupCalls:
    """The calls of one rank on its group; ``state`` holds what is behind them.

    A shell inherits from this first, and then from the class of ``torch.distributed`` that makes it a group there.
    """

    state: GroupState

    is_dispatched = False
    """Whether calls come through the dispatcher of C++, which shows them to profilers."""

    def allreduce(self, tensors: Any, opts: Any = None) -> CallWork:
        """Reduce a tensor over all ranks, in place."""
        tensor, settings = _only(tensors, "allreduce"), _settings(opts, c10d.AllreduceOptions)
        collectives, op, how = self.state.collectives, settings.reduceOp, self._count(settings)
        kept = collectives.find_kept(tensor, op.op) if how["is_awaited"] else None
        if kept is not None and kept.make(tensor, how["timeout_s"]):
            return self._begun(OVER, [tensor])
        if tensor.layout is not torch.strided:
            work = all_reduce_sparse(collectives, tensor, op, num_ranks=self.state.communicator.world_size, **how)
        else:
            work = collectives.all_reduce(tensor, op, **how)
        return self._begun(work, [tensor], settings)

    _all_reduce = allreduce  # which shows profilers nothing

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> CallWork:
        """Reduce each of several tensors over all ranks, in place; all are under way at once."""
        several = _list(tensors, "allreduce_coalesced")
        if len(several) == 1:
            return self._all_reduce(several, opts)
        settings = _settings(opts, c10d.AllreduceOptions)
        work = self.state.collectives.all_reduce_coalesced(several, settings.reduceOp, **self._count(settings))
        return self._begun(work, several, settings)

    def broadcast(self, tensors: Any, opts: Any = None) -> CallWork:
        """Give all ranks a tensor of the root."""
        settings = _settings(opts, c10d.BroadcastOptions, "rootRank")
        tensor = _only_with_root(tensors, settings, "broadcast")
        work = self.state.collectives.broadcast(tensor, settings.rootRank, **self._count(settings))
        return self._begun(work, [tensor], settings)

    def reduce(self, tensors: Any, opts: Any = None) -> CallWork:
        """Reduce a tensor over all ranks, into that of the root."""
        settings = _settings(opts, c10d.ReduceOptions, "rootRank")
        tensor = _only_with_root(tensors, settings, "reduce")
        where, op = settings.rootRank, settings.reduceOp
        work = self.state.collectives.reduce(tensor, where, op, **self._count(settings))
        return self._begun(work, [tensor], settings)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Gather the tensor of each rank on all ranks; sizes may differ."""
        source, wanted = _only(inputs, "allgather"), _own_list(outputs, "allgather")
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        work = self.state.collectives.all_gather(wanted, source, **self._count(settings))
        return self._begun(work, wanted, settings)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Gather several tensors of all ranks: the first index of ``outputs`` is the rank, the second the tensor."""
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        several, lists = _list(inputs, "allgather_coalesced"), _lists(outputs)
        work = self.state.collectives.all_gather_coalesced(lists, several, **self._count(settings))
        return self._begun(work, list(chain.from_iterable(outputs)), settings)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> CallWork:
        """Gather the tensors of all ranks in one, in rank order."""
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        work = self.state.collectives.all_gather_single(output, source, **self._count(settings))
        return self._begun(work, [output], settings)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Do several :meth:`all_gather_single` in one."""
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        several = _list(inputs, "all_gather_single_coalesced")
        work = self.state.collectives.all_gather_single_coalesced(list(outputs), several, **self._count(settings))
        return self._begun(work, outputs, settings)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Gather the tensors of all ranks on the root; the others give ``[]`` or ``[[]]`` as outputs."""
        settings = _settings(opts, c10d.GatherOptions, "rootRank")
        wanted = _own_list(outputs, "gather")
        source = _only(inputs, "gather")
        work = self.state.collectives.gather(wanted, source, settings.rootRank, **self._count(settings))
        return self._begun(work, wanted, settings)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Give each rank its tensor of the root's list; the others give ``[]`` or ``[[]]`` as inputs."""
        settings = _settings(opts, c10d.ScatterOptions, "rootRank")
        output = _only(outputs, "scatter")
        parts = _own_list(inputs, "scatter")
        work = self.state.collectives.scatter(output, parts, settings.rootRank, **self._count(settings))
        return self._begun(work, [output], settings)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Reduce a list of tensors over all ranks; rank k gets the k-th, which may differ in size."""
        settings = _settings(opts, c10d.ReduceScatterOptions)
        output, parts = _only(outputs, "reduce_scatter"), _own_list(inputs, "reduce_scatter")
        work = self.state.collectives.reduce_scatter(output, parts, settings.reduceOp, **self._count(settings))
        return self._begun(work, [output], settings)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> CallWork:
        """Reduce a tensor over all ranks; rank k gets its k-th part."""
        settings = _settings(opts, c10d.ReduceScatterOptions)
        op = settings.reduceOp
        work = self.state.collectives.reduce_scatter_single(output, source, op, **self._count(settings))
        return self._begun(work, [output], settings)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Do several :meth:`reduce_scatter_single` in one."""
        settings = _settings(opts, c10d.ReduceScatterOptions)
        several, op = _list(inputs, "reduce_scatter_single_coalesced"), settings.reduceOp
        start = self.state.collectives.reduce_scatter_single_coalesced
        return self._begun(start(list(outputs), several, op, **self._count(settings)), outputs, settings)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Send the k-th input to rank k, and receive the k-th output from it."""
        settings = _settings(opts, c10d.AllToAllOptions)
        work = self.state.collectives.all_to_all(list(outputs), list(inputs), **self._count(settings))
        return self._begun(work, outputs, settings)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> CallWork:
        """Send the k-th part of a tensor to rank k; no sizes mean equal parts of the first dimension."""
        settings = _settings(opts, c10d.AllToAllOptions)
        splits = list(output_splits), list(input_splits)
        work = self.state.collectives.all_to_all_single(output, source, *splits, **self._count(settings))
        return self._begun(work, [output], settings)

    def barrier(self, opts: Any = None) -> CallWork:
        """End when every rank has called it, and what this rank has begun before, but for messages, is over.

        One that is awaited begins only then: so all calls of all ranks before it are over.
        """
        settings = _settings(opts, c10d.BarrierOptions)
        before = self.state.under_way
        if (joined := before.all()) and not settings.asyncOp:
            before.wait(self.state.choose_timeout_s(settings.timeout))
            joined = before.all()
        how = self._count(settings)
        kept = self.state.collectives.find_kept(BARRIER, "barrier") if how["is_awaited"] and not joined else None
        if kept is not None and kept.make(BARRIER, how["timeout_s"]):
            return self.state.met
        work = self.state.collectives.barrier(**how)
        return self._begun(TensorWork.together([*joined, work]) if joined else work, [], settings)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it, and what this rank has begun before, but for messages, is over.

        :class:`DeadlineError` on all ranks names those that have not come.
        ``timeout`` is a timedelta, or options that hold one.
        """
        limit_s = self.state.choose_timeout_s(getattr(timeout, "timeout", timeout) or timedelta(0))
        self.state.collectives.monitored_barrier(timeout_s=limit_s, wait_all_ranks=wait_all_ranks).wait()
        self.state.under_way.wait(limit_s)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> CallWork:
        """Send one tensor to rank ``dst`` of the group."""
        tensor = _only(tensors, "send")
        return self._begun(self.state.send(tensor, dst, tag), [tensor])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> CallWork:
        """Receive one tensor, of the size that was sent, from rank ``src`` of the group."""
        tensor = _only(tensors, "recv")
        return self._begun(self.state.receive(tensor, src, tag), [tensor])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CallWork:
        """Receive one tensor from whoever sends first; the work's ``source_rank`` says from whom it was."""
        tensor = _only(tensors, "recv_anysource")
        return self._begun(self.state.receive(tensor, None, tag), [tensor])

    def _start_coalescing(self, _device: object = None) -> None:
        """Let what is called until :meth:`_end_coalescing` be over together."""
        self.state.coalesced = []

    def _end_coalescing(self, _device: object = None) -> CallWork:
        works, self.state.coalesced = self.state.coalesced or [], None
        return self._begun(TensorWork.together(works), [])

    def _count(self, settings: Any) -> BasicSettings:
        """Count a call that begins; return how long it may take, and whether its caller goes on meanwhile."""
        self.state.num_calls += 1
        return {"timeout_s": self.state.choose_timeout_s(settings.timeout), "is_awaited": not settings.asyncOp}

    def _begun(self, work: TensorWork, result: Tensors, settings: Any = None) -> CallWork:
        if settings is not None and settings.asyncOp:
            self.state.under_way.add(work)
        if self.state.coalesced is not None:
            self.state.coalesced.append(work)
        return CallWork(work, result, self.state.completions)

    # What a group is beside its calls.

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's own name
        """Return the name that the backend is registered by."""
        return NAME

    def get_group_store(self) -> Any:
        """Return the store in which the group's ranks met."""
        return self.state.store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each later call that names no timeout of its own take at most this long."""
        self.state.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Say goodbye and release everything."""
        self.state.close()

    def abort(self) -> None:
        """Release everything at once; the other ranks see this one as lost."""
        self.state.close(is_failing=True)

    def _set_sequence_number_for_group(self) -> None:
        """Begin to number the calls from here."""
        self.state.num_calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.state.num_calls

    all_gather_into_tensor = _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    _set_default_timeout = set_timeout


for _name in (*CALLS, "_start_coalescing", "_end_coalescing"):
    setattr(GroupCalls, _name, takes_torch_names(_name, getattr(GroupCalls, _name)))


for _name in _CALLED_FROM_CPP:
    uncompiled(getattr(GroupCalls, _name))


def _settings(opts: Any, kind: type, plain: str = "reduceOp") -> Any:
    """Return options of the ``kind`` that a call takes; others pass what counts of them, or the one thing that does."""
    if opts is None:
        return kind()
    if hasattr(opts, "asyncOp"):
        return opts
    settings: Any = kind()
    given = opts if isinstance(opts, dict) else {"timeout" if isinstance(opts, timedelta) else plain: opts}
    for name, value in given.items():
        setattr(settings, name, value)
    return settings


def _list(tensors: Any, call: str) -> list[torch.Tensor]:
    several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not several:
        raise ConfigurationError(f"{call} needs at least one tensor; leave the call out on all ranks")
    return several


def _lists(tensors: Any) -> list[list[torch.Tensor]]:
    several = list(tensors)
    return [several] if several and isinstance(several[0], torch.Tensor) else [list(inner) for inner in several]


def _own_list(tensors: Any, call: str) -> list[torch.Tensor]:
    """Return the one list of a call that takes one on its root, and none or an empty one elsewhere."""
    lists = _lists(tensors)
    if len(lists) > 1:
        raise ConfigurationError(f"{call} takes one list of tensors in a list, not {len(lists)}")
    return lists[0] if lists else []


def _only(tensors: Any, call: str) -> torch.Tensor:
    several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(several) != 1:
        raise ConfigurationError(f"{call} takes one tensor in a list, not {len(several)}; make a call for each")
    return several[0]


def _only_with_root(tensors: Any, settings: Any, call: str) -> torch.Tensor:
    if settings.rootTensor:
        raise ConfigurationError(f"{call} takes one tensor, so rootTensor is 0, not {settings.rootTensor}")
    return _only(tensors, call)


def all_reduce_sparse(
    collectives: TensorCollectives,
    tensor: torch.Tensor,
    op: ReduceOp,
    *,
    num_ranks: int,
    **settings: Unpack[BasicSettings],
) -> TensorWork:
    """Make ``tensor``, a sparse COO tensor of one shape on all ranks, the sum of those of all ranks, or their mean.

    It waits until each rank has told how many entries it brings; these then travel in two all-gathers.
    """
    is_mean = op == dist.ReduceOp.AVG
    if tensor.layout is not torch.sparse_coo or not (op == dist.ReduceOp.SUM or is_mean):
        raise ConfigurationError(
            f"Of sparse tensors, those in COO form can be summed or averaged, and not {tensor.layout} with {op}; give "
            "tensor.to_dense()"
        )
    own = tensor.detach().coalesce()
    rows, values = own.indices().t().contiguous(), own.values()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    how: BasicSettings = {**settings, "is_awaited": True}
    collectives.all_gather(counts, torch.tensor([len(rows)]), **how).wait()
    sizes = [int(count) for count in counts]
    all_rows = [rows.new_empty((size, rows.shape[1])) for size in sizes]
    all_values = [values.new_empty((size, *values.shape[1:])) for size in sizes]
    works = [
        collectives.all_gather(outputs, source, **settings)
        for outputs, source in ((all_rows, rows), (all_values, values))
    ]

    def add() -> None:
        total = torch.sparse_coo_tensor(
            torch.cat(all_rows).t(), torch.cat(all_values), tensor.shape, check_invariants=True
        ).coalesce()  # checked, because other ranks say where the entries are
        with torch.no_grad():  # detach() would share the memory of the entries, and not their number
            tensor.copy_(total / num_ranks if is_mean else total)

    return TensorWork.together(works).then(add)
