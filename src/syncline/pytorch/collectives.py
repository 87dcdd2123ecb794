"""Collectives on torch tensors: any number type, memory order and device, in the calls of ``torch.distributed``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, Unpack, get_args

import torch

from syncline.errors import ConfigurationError
from syncline.pytorch.host_memory import (
    ScratchPool,
    host_memory_of,
    is_plain,
    landing_memory_of,
    put_back,
    shares_memory,
)
from syncline.runtime.call import BasicSettings, CallSettings
from syncline.runtime.communicator import Communicator
from syncline.runtime.reduction import Reduction
from syncline.runtime.work import Work
from syncline.updates.memory import bytes_of, dtype_name, reduction_for

Operation = Literal["sum", "mean", "max", "min", "product"]


class TensorWork:
    """A collective on tensors that is under way; the result is there after :meth:`wait`. Any thread may wait."""

    def __init__(self, works: Iterable[Work], finish: Callable[[], None]) -> None:
        self.works = tuple(works)
        """What moves; when all are done, :meth:`wait` has only to put the result in place."""
        self._finish: Callable[[], None] | None = finish
        self._finishing = threading.Lock()
        self.under_way: PendingCalls | None = None
        """Where a barrier finds it, as long as nobody has waited for it."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and put the result in place; raises what went wrong."""
        try:
            for work in self.works:
                work.wait(timeout_s)
            with self._finishing:
                if self._finish is not None:
                    self._finish()
                    self._finish = None
        finally:
            if self.under_way is not None and self.done():
                self.under_way.remove(self)

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.done() for work in self.works)

    def aside(self) -> AbstractContextManager[object]:
        """Wait within this on a thread other than the caller's, whose streams of a device must not be held up."""
        return nullcontext()

    def then(self, finish: Callable[[], object]) -> TensorWork:
        """Return a work that is this one, and ``finish`` at the end of its first wait."""

        def finish_both() -> None:
            self.wait()
            finish()

        return TensorWork(self.works, finish_both)

    @classmethod
    def together(cls, parts: Sequence[TensorWork]) -> TensorWork:
        """Return a work that is over when all ``parts`` are."""

        def finish_all() -> None:
            for part in parts:
                part.wait()

        return cls([work for part in parts for work in part.works], finish_all)


class PendingCalls:
    """The calls of a group for which nobody has waited yet: its barriers join them. Any thread may add and take."""

    def __init__(self) -> None:
        self._works: dict[TensorWork, None] = {}
        self._lock = threading.Lock()

    def add(self, work: TensorWork) -> None:
        """Keep a call that goes on while its caller does; end those in front that are over, as nobody may wait."""
        work.under_way = self
        while (first := self._first()) is not None and first.done():
            with suppress(Exception):  # it is told to whoever waits for that call
                first.wait()
            self.remove(first)
        with self._lock:
            self._works[work] = None

    def remove(self, work: TensorWork) -> None:
        """Forget a call that is over."""
        with self._lock:
            self._works.pop(work, None)

    def all(self) -> list[TensorWork]:
        """Return them in the order in which they were made."""
        with self._lock:
            return list(self._works)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until each is over and its result is in place; raises what went wrong in one."""
        for work in self.all():
            work.wait(timeout_s)

    def _first(self) -> TensorWork | None:
        with self._lock:
            return next(iter(self._works), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReduction:
    """How the tensors of all ranks become one, where no :data:`Operation` says it."""

    reduction: Reduction
    meaning: str
    """What other ranks must mean too, such as "mean"."""
    prepare: Callable[[torch.Tensor], object] | None = None
    """Changes what this rank brings, in place."""
    finish: Callable[[torch.Tensor], object] | None = None
    """Changes the result, in place."""


class TensorCollectives:
    """Collectives on the tensors of one rank; they match by the order in which each rank calls them.

    ``is_awaited`` says that the caller does nothing else until the work is over; then it may be over on return. What is
    kept in ``scratch`` from call to call may be shared with others.
    """

    def __init__(self, communicator: Communicator, scratch: ScratchPool | None = None) -> None:
        self._communicator = communicator
        self._scratch = scratch or ScratchPool()

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: Operation | TensorReduction,
        weight: float | None = None,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``tensor`` the sum, mean, ... of those of all ranks."""
        reduction = _reduction(tensor.dtype, op)
        host = host_memory_of(tensor)
        divide = self._weigh(host, op, weight, settings)
        work = self._communicator.all_reduce(bytes_of(host), reduction, **settings, op=_meaning(op, weight))

        def finish() -> None:
            divide(host)
            put_back(host, tensor)

        return TensorWork([work], finish)

    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        op: Operation | TensorReduction,
        weight: float | None = None,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make ``tensor`` of rank ``dst`` the sum, mean, ... of those of all ranks; the others keep theirs."""
        self.check_rank(dst, "dst")
        reduction = _reduction(tensor.dtype, op)
        is_result = dst == self._communicator.rank
        host = host_memory_of(tensor)
        if not is_result and shares_memory(host, tensor):
            host = host.clone()
        divide = self._weigh(host, op, weight, settings)
        settings["label"] = "reduce"
        meaning = f"{_meaning(op, weight)} for rank {dst}"
        work = self._communicator.all_reduce(bytes_of(host), reduction, **settings, op=meaning)

        def finish() -> None:
            divide(host)
            if is_result:
                put_back(host, tensor)

        return TensorWork([work], finish)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        op: Operation | TensorReduction,
        weight: float | None = None,
        parts: Sequence[int] = (),
        may_overwrite: bool = False,
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Make rank k's ``output`` part k of the sum, mean, ... of ``source`` over all ranks.

        ``parts`` are the elements of each rank's part, where they are not equal. Only with ``may_overwrite`` does
        ``source`` hold something else afterwards.
        """
        self.check_parts(output, source, parts, "reduce_scatter")
        reduction = _reduction(source.dtype, op)
        host = host_memory_of(source)
        is_kept = shares_memory(host, source) and not may_overwrite
        scratch = self._scratch.borrow(host) if is_kept else None
        host = host if scratch is None else scratch
        divide = self._weigh(host, op, weight, settings)
        meaning = _meaning(op, weight)
        work = self._communicator.reduce_scatter(bytes_of(host), reduction, parts=parts, **settings, op=meaning)

        def finish() -> None:
            part = self._part(host, output, parts)
            divide(part)
            put_back(part, output)
            if scratch is not None:
                self._scratch.give_back(scratch)

        return TensorWork([work], finish)

    def all_gather(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        parts: Sequence[int] = (),
        **settings: Unpack[CallSettings],
    ) -> TensorWork:
        """Make ``output`` the parts of all ranks, rank k's ``source`` being part k.

        ``parts`` are the elements of each rank's part, where they are not equal.
        """
        self.check_parts(source, output, parts, "all_gather")
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

    def gather(self, tensor: torch.Tensor, *, dst: int) -> list[torch.Tensor] | None:
        """Return the ``tensor`` of every rank on rank ``dst``, in rank order, and None on the others."""
        self.check_rank(dst, "dst")
        size = self._communicator.world_size
        whole = torch.empty((size, *tensor.shape), dtype=tensor.dtype)
        self.all_gather(whole, tensor, is_awaited=True, op=f"for rank {dst}", label="gather").wait()
        return list(whole.to(tensor.device).unbind()) if dst == self._communicator.rank else None

    def broadcast(self, tensor: torch.Tensor, *, root: int, **settings: Unpack[CallSettings]) -> TensorWork:
        """Give every rank the ``tensor`` of ``root``."""
        self.check_rank(root, "root")
        host = host_memory_of(tensor)
        settings["elements"] = dtype_name(host.dtype)
        work = self._communicator.broadcast(bytes_of(host), root=root, **settings)
        is_result = root != self._communicator.rank
        return TensorWork([work], lambda: put_back(host, tensor) if is_result else None)

    def _weigh(
        self, host: torch.Tensor, op: Operation | TensorReduction, weight: float | None, settings: BasicSettings
    ) -> Callable[[torch.Tensor], object]:
        """Multiply by this rank's weight; return what divides the sum by that of all."""
        if isinstance(op, TensorReduction):
            if op.prepare is not None:
                op.prepare(host)
            return op.finish or _leave
        if weight is not None:
            _check_weight(host.dtype, op, weight)
        if op != "mean":
            if weight is not None:
                host.mul_(weight)
            return _leave
        if weight is None:
            return self._divide_by_ranks
        weights = torch.tensor([weight], dtype=torch.float64)
        adds = reduction_for(weights.dtype)
        label = f"weight of {host.numel()} x {dtype_name(host.dtype)}"
        settings = {**settings, "label": label}
        total_weight = self._communicator.all_reduce(bytes_of(weights), adds, **settings, op="total weight of a mean")
        host.mul_(weight)

        def divide(total: torch.Tensor) -> None:
            total_weight.wait()
            total.div_(float(weights[0]))

        return divide

    def check_rank(self, rank: int, name: str) -> None:
        """Raise :class:`ConfigurationError` if there is no such rank; ``name`` is the argument's."""
        last = self._communicator.world_size - 1
        if not isinstance(rank, Integral) or not 0 <= rank <= last:
            raise ConfigurationError(f"{name} must be a rank, 0 to {last}, not {rank!r}")

    def _divide_by_ranks(self, total: torch.Tensor) -> None:
        total.detach().div_(self._communicator.world_size)

    def _part(self, whole: torch.Tensor, like: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        rank = self._communicator.rank
        start = sum(parts[:rank]) if parts else rank * like.numel()
        return whole.reshape(-1)[start : start + like.numel()].view(like.shape)

    def check_parts(self, part: torch.Tensor, whole: torch.Tensor, parts: Sequence[int], call: str) -> None:
        """Raise :class:`ConfigurationError` unless ``part`` is this rank's part of ``whole``."""
        size = self._communicator.world_size
        if parts and (len(parts) != size or parts[self._communicator.rank] != part.numel()):
            raise ConfigurationError(
                f"{call} needs as many parts as ranks, {size}, and that of this rank to be of {part.numel()} elements, "
                f"not {list(parts)}"
            )
        if whole.numel() != (sum(parts) if parts else size * part.numel()) or whole.dtype != part.dtype:
            raise ConfigurationError(
                f"{call} needs a whole of {size} (ranks) times the part's elements and the same type, not "
                f"{whole.numel()} of {whole.dtype} and {part.numel()} of {part.dtype}; pad it"
            )


def _reduction(dtype: torch.dtype, op: Operation | TensorReduction) -> Reduction:
    """Return how ``op`` makes one number of two; a mean is a sum that is divided in the end."""
    if isinstance(op, TensorReduction):
        return op.reduction
    if op not in get_args(Operation):
        raise ConfigurationError(f"op must be one of {', '.join(get_args(Operation))}, not {op!r}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"A mean of {dtype} is not of that type; convert the tensor to a float type")
    return reduction_for(dtype, "sum" if op == "mean" else op)


def _meaning(op: Operation | TensorReduction, weight: float | None) -> str:
    if isinstance(op, TensorReduction):
        return op.meaning
    return op if weight is None else f"weighted {op}"


def _check_weight(dtype: torch.dtype, op: Operation, weight: float) -> None:
    if op not in {"sum", "mean"}:
        raise ConfigurationError(f"A {op} has no weights; leave weight={weight} out, or multiply the tensor by it")
    if not (dtype.is_floating_point or dtype.is_complex or isinstance(weight, int)):
        raise ConfigurationError(f"{dtype} times {weight} is not of that type; convert the tensor to a float type")


def _leave(_: torch.Tensor) -> None:
    """Do nothing to a sum."""
