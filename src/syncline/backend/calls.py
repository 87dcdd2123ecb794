"""All calls of ``torch.distributed`` on one group, once for both shells: under each name that PyTorch has for them.

Arguments are as PyTorch passes them: lists of tensors, and options that carry the operation, the root (a rank of the
group), the timeout of this call, and whether the caller goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from syncline.backend.call_work import CallWork
from syncline.backend.group_state import GroupState
from syncline.backend.sparse import all_reduce_sparse
from syncline.errors import ConfigurationError
from syncline.pytorch.collectives import TensorWork
from syncline.updates.private_torch import uncompiled

Tensors = Sequence[torch.Tensor]
_Start = Callable[..., TensorWork]


class GroupCalls:
    """The calls of one rank on its group; ``state`` holds what is behind them.

    A shell inherits from this first, and then from the class of ``torch.distributed`` that makes it a group there.
    """

    state: GroupState

    def allreduce(self, tensors: Any, opts: Any = None) -> CallWork:
        """Reduce one tensor over all ranks, in place; of several, each."""
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> CallWork:
        """Reduce tensors over all ranks, in place, in as few messages as one tensor needs."""
        several, settings = _list(tensors), _settings(opts, c10d.AllreduceOptions)
        collectives, op = self.state.collectives, settings.reduceOp
        if len(several) == 1 and several[0].layout is not torch.strided:
            start = partial(all_reduce_sparse, collectives, num_ranks=self.state.communicator.world_size)
            return self._start(settings, several, start, several[0], op)
        if len(several) == 1:
            return self._start(settings, several, collectives.all_reduce, several[0], op)
        return self._start(settings, several, collectives.all_reduce_coalesced, several, op)

    def broadcast(self, tensors: Any, opts: Any = None) -> CallWork:
        """Give all ranks the tensors of the root."""
        several = _list(tensors)
        settings = _settings(opts, c10d.BroadcastOptions, "rootRank")
        return self._start_each(
            settings, several, self.state.collectives.broadcast, [(t, settings.rootRank) for t in several]
        )

    def reduce(self, tensors: Any, opts: Any = None) -> CallWork:
        """Reduce tensors over all ranks, into those of the root."""
        several, settings = _list(tensors), _settings(opts, c10d.ReduceOptions, "rootRank")
        each = [(tensor, settings.rootRank, settings.reduceOp) for tensor in several]
        return self._start_each(settings, several, self.state.collectives.reduce, each)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Gather the tensors of all ranks on all ranks, which may be of different sizes."""
        lists, several = _lists(outputs), _list(inputs)
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        each = list(zip(lists, several, strict=True))
        return self._start_each(settings, _flat(lists), self.state.collectives.all_gather, each)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Gather several tensors of all ranks: the first index of ``outputs`` is the rank, the second the tensor."""
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        start = self.state.collectives.all_gather_coalesced
        return self._start(settings, _flat(outputs), start, _lists(outputs), list(inputs))

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> CallWork:
        """Gather the tensors of all ranks in one, in rank order."""
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        return self._start(settings, [output], self.state.collectives.all_gather_single, output, source)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Do several :meth:`all_gather_single` in one."""
        settings = _settings(opts, c10d.AllgatherOptions)  # type: ignore[attr-defined]
        start = self.state.collectives.all_gather_single_coalesced
        return self._start(settings, outputs, start, list(outputs), list(inputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Gather the tensors of all ranks on the root; the others give ``[]`` or ``[[]]`` as outputs."""
        settings = _settings(opts, c10d.GatherOptions, "rootRank")
        wanted = _lists(outputs)[0] if outputs else []
        source = _only(inputs, "gather")
        return self._start(settings, wanted, self.state.collectives.gather, wanted, source, settings.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Give each rank its tensor of the root's list; the others give ``[]`` or ``[[]]`` as inputs."""
        settings = _settings(opts, c10d.ScatterOptions, "rootRank")
        output = _only(outputs, "scatter")
        parts = _lists(inputs)[0] if inputs else []
        return self._start(settings, [output], self.state.collectives.scatter, output, parts, settings.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Reduce a list of tensors over all ranks; rank k gets the k-th, which may differ in size."""
        settings = _settings(opts, c10d.ReduceScatterOptions)
        several = _list(outputs)
        each = [(one, parts, settings.reduceOp) for one, parts in zip(several, _lists(inputs), strict=True)]
        return self._start_each(settings, several, self.state.collectives.reduce_scatter, each)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> CallWork:
        """Reduce a tensor over all ranks; rank k gets its k-th part."""
        settings = _settings(opts, c10d.ReduceScatterOptions)
        start = self.state.collectives.reduce_scatter_single
        return self._start(settings, [output], start, output, source, settings.reduceOp)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Do several :meth:`reduce_scatter_single` in one."""
        settings = _settings(opts, c10d.ReduceScatterOptions)
        start = self.state.collectives.reduce_scatter_single_coalesced
        return self._start(settings, outputs, start, list(outputs), list(inputs), settings.reduceOp)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> CallWork:
        """Send the k-th input to rank k, and receive the k-th output from it."""
        settings = _settings(opts, c10d.AllToAllOptions)
        return self._start(settings, outputs, self.state.collectives.all_to_all, list(outputs), list(inputs))

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
        start = self.state.collectives.all_to_all_single
        return self._start(settings, [output], start, output, source, list(output_splits), list(input_splits))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> CallWork:
        """End when every rank has called it."""
        settings = _settings(opts, c10d.BarrierOptions)
        if timeout is not None:
            settings.timeout = timeout
        return self._start(settings, [], self.state.collectives.barrier)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it; :class:`DeadlineError` on all ranks names those that have not.

        ``timeout`` is a timedelta, or options that hold one.
        """
        limit_s = self.state.choose_timeout_s(getattr(timeout, "timeout", timeout) or timedelta(0))
        self.state.collectives.monitored_barrier(timeout_s=limit_s, wait_all_ranks=wait_all_ranks).wait()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> CallWork:
        """Send one tensor to rank ``dst`` of the group."""
        tensor = _only(tensors, "send")
        return self._begin(self.state.send(tensor, dst, tag), [tensor])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> CallWork:
        """Receive one tensor, of the size that was sent, from rank ``src`` of the group."""
        tensor = _only(tensors, "recv")
        return self._begin(self.state.receive(tensor, src, tag), [tensor])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CallWork:
        """Receive one tensor from whoever sends first; the work's ``source_rank`` says from whom it was."""
        tensor = _only(tensors, "recv_anysource")
        return self._begin(self.state.receive(tensor, None, tag), [tensor])

    def _start_coalescing(self, _device: object = None) -> None:
        """Let what is called until :meth:`_end_coalescing` be over together."""
        self.state.coalesced = []

    def _end_coalescing(self, _device: object = None) -> CallWork:
        works, self.state.coalesced = self.state.coalesced or [], None
        return self._begin(_join(works), [])

    def _start(self, settings: Any, result: Tensors, start: _Start, *arguments: Any) -> CallWork:
        timeout_s = self.state.choose_timeout_s(settings.timeout)
        self.state.num_calls += 1
        work = start(*arguments, timeout_s=timeout_s, is_awaited=not settings.asyncOp)
        return self._begin(work, result)

    def _start_each(self, settings: Any, result: Tensors, start: _Start, each: Sequence[tuple[Any, ...]]) -> CallWork:
        """Make one call for each; they are all over when the work is."""
        timeout_s = self.state.choose_timeout_s(settings.timeout)
        self.state.num_calls += 1
        works = [start(*arguments, timeout_s=timeout_s, is_awaited=not settings.asyncOp) for arguments in each]
        return self._begin(works[0] if len(works) == 1 else _join(works), result)

    def _begin(self, work: TensorWork, result: Tensors) -> CallWork:
        if self.state.coalesced is not None:
            self.state.coalesced.append(work)
        return CallWork(work, result, self.state.completions)

    # What a group is beside its calls.

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
        self.state.abort()

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

for _name in _CALLED_FROM_CPP:
    uncompiled(getattr(GroupCalls, _name))


def _settings(opts: Any, kind: type, plain: str = "reduceOp") -> Any:
    """Return options of the ``kind`` that a call takes; others pass the one thing that counts in their place."""
    if opts is None:
        return kind()
    if hasattr(opts, "asyncOp"):
        return opts
    settings: Any = kind()
    setattr(settings, plain, opts)
    return settings


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _lists(tensors: Any) -> list[list[torch.Tensor]]:
    several = list(tensors)
    return [several] if several and isinstance(several[0], torch.Tensor) else [list(inner) for inner in several]


def _flat(lists: Any) -> list[torch.Tensor]:
    return [tensor for inner in lists for tensor in inner]


def _only(tensors: Any, call: str) -> torch.Tensor:
    several = _list(tensors)
    if len(several) != 1:
        raise ConfigurationError(f"{call} takes one tensor in a list, not {len(several)}")
    return several[0]


def _join(works: Sequence[TensorWork]) -> TensorWork:
    def finish() -> None:
        for work in works:
            work.wait()

    return TensorWork([runtime_work for work in works for runtime_work in work.works], finish)
