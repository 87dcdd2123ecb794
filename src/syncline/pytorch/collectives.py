"""Collectives on torch tensors: any number type, memory order and device, in the calls of ``torch.distributed``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, Unpack, get_args

import torch

from syncline.errors import ConfigurationError
from syncline.runtime.call import CallSettings
from syncline.runtime.communicator import Communicator
from syncline.runtime.reduction import Reduction
from syncline.runtime.work import Work
from syncline.updates.memory import bytes_of, dtype_name, reduction_for

Operation = Literal["sum", "mean", "max", "min", "product"]


class TensorWork:
    """A collective on tensors that is under way; the result is there after :meth:`wait`. Any thread may wait."""

    def __init__(self, works: list[Work], finish: Callable[[], None]) -> None:
        self.works = tuple(works)
        """What moves; when all are done, :meth:`wait` has only to put the result in place."""
        self._finish: Callable[[], None] | None = finish
        self._finishing = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and put the result in place; raises what went wrong."""
        for work in self.works:
            work.wait(timeout_s)
        with self._finishing:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.done() for work in self.works)


class _Scratch:
    """One tensor of memory that is kept from call to call: fresh pages cost more than the copy into them."""

    MAX_BYTES = 256 << 20

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def borrow(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``source`` in memory of its own."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.dtype == source.dtype and kept.numel() == source.numel():
            return kept.view(source.shape).copy_(source)
        return source.clone()

    def give_back(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` for the next call, unless it is very large."""
        self._kept = tensor if tensor.nbytes <= self.MAX_BYTES else None


class TensorCollectives:
    """Collectives on the tensors of one rank; they match by the order in which each rank calls them.

    ``is_awaited`` says that the caller does nothing else until the work is over; then it may be over on return.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._scratch = _Scratch()

    def all_reduce(
        self, tensor: torch.Tensor, *, op: Operation, weight: float | None, is_awaited: bool = False
    ) -> TensorWork:
        """Make ``tensor`` the sum, mean, ... of those of all ranks."""
        reduction = _reduction(tensor.dtype, op)
        host = _host(tensor)
        divide = self._weigh(host, op, weight, is_awaited=is_awaited)
        meaning = _meaning(op, weight)
        work = self._communicator.all_reduce(bytes_of(host), reduction, is_awaited=is_awaited, op=meaning)

        def finish() -> None:
            divide(host)
            _put(host, tensor)

        return TensorWork([work], finish)

    def reduce(
        self, tensor: torch.Tensor, *, dst: int, op: Operation, weight: float | None, is_awaited: bool = False
    ) -> TensorWork:
        """Make ``tensor`` of rank ``dst`` the sum, mean, ... of those of all ranks; the others keep theirs."""
        self._check_rank(dst, "dst")
        reduction = _reduction(tensor.dtype, op)
        is_result = dst == self._communicator.rank
        host = _host(tensor)
        if not is_result and _shares(host, tensor):
            host = host.clone()
        divide = self._weigh(host, op, weight, is_awaited=is_awaited)
        meaning = f"{_meaning(op, weight)} for rank {dst}"
        work = self._communicator.all_reduce(
            bytes_of(host), reduction, is_awaited=is_awaited, op=meaning, label="reduce"
        )

        def finish() -> None:
            divide(host)
            if is_result:
                _put(host, tensor)

        return TensorWork([work], finish)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        op: Operation,
        weight: float | None,
        is_awaited: bool = False,
    ) -> TensorWork:
        """Make rank k's ``output`` part k of the sum, mean, ... of ``source`` over all ranks."""
        self._check_parts(output, source, "reduce_scatter")
        reduction = _reduction(source.dtype, op)
        host = _host(source)
        scratch = self._scratch.borrow(host) if _shares(host, source) else None  # the input stays as it is
        host = host if scratch is None else scratch
        divide = self._weigh(host, op, weight, is_awaited=is_awaited)
        meaning = _meaning(op, weight)
        work = self._communicator.reduce_scatter(bytes_of(host), reduction, is_awaited=is_awaited, op=meaning)

        def finish() -> None:
            part = self._part(host, output)
            divide(part)
            output.detach().copy_(part)
            if scratch is not None:
                self._scratch.give_back(scratch)

        return TensorWork([work], finish)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, **settings: Unpack[CallSettings]) -> TensorWork:
        """Make ``output`` the parts of all ranks, rank k's ``source`` being part k."""
        self._check_parts(source, output, "all_gather")
        host = output.detach() if _is_plain(output) else torch.empty(output.shape, dtype=output.dtype)
        own_part = None
        if settings.get("is_awaited") and _is_plain(source):
            own_part = bytes_of(source.detach())
        else:
            self._part(host, source).copy_(source.detach())
        settings["elements"] = dtype_name(host.dtype)
        work = self._communicator.all_gather(bytes_of(host), own_part=own_part, **settings)
        return TensorWork([work], lambda: _put(host, output))

    def gather(self, tensor: torch.Tensor, *, dst: int) -> list[torch.Tensor] | None:
        """Return the ``tensor`` of every rank on rank ``dst``, in rank order, and None on the others."""
        self._check_rank(dst, "dst")
        size = self._communicator.world_size
        whole = torch.empty((size, *tensor.shape), dtype=tensor.dtype)
        self.all_gather(whole, tensor, is_awaited=True, op=f"for rank {dst}", label="gather").wait()
        return list(whole.to(tensor.device).unbind()) if dst == self._communicator.rank else None

    def broadcast(self, tensor: torch.Tensor, *, root: int, **settings: Unpack[CallSettings]) -> TensorWork:
        """Give every rank the ``tensor`` of ``root``."""
        self._check_rank(root, "root")
        host = _host(tensor)
        settings["elements"] = dtype_name(host.dtype)
        work = self._communicator.broadcast(bytes_of(host), root=root, **settings)
        return TensorWork([work], lambda: _put(host, tensor))

    def _weigh(
        self, host: torch.Tensor, op: Operation, weight: float | None, *, is_awaited: bool
    ) -> Callable[[torch.Tensor], None]:
        """Multiply by this rank's weight; return what divides the sum by that of all."""
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
        total_weight = self._communicator.all_reduce(
            bytes_of(weights), adds, is_awaited=is_awaited, op="total weight of a mean", label=label
        )
        host.mul_(weight)

        def divide(total: torch.Tensor) -> None:
            total_weight.wait()
            total.div_(float(weights[0]))

        return divide

    def _check_rank(self, rank: int, name: str) -> None:
        if not 0 <= rank < self._communicator.world_size:
            raise ConfigurationError(f"{name} must be a rank, 0 to {self._communicator.world_size - 1}, not {rank}")

    def _divide_by_ranks(self, total: torch.Tensor) -> None:
        total.div_(self._communicator.world_size)

    def _part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        start = self._communicator.rank * like.numel()
        return whole.reshape(-1)[start : start + like.numel()].view(like.shape)

    def _check_parts(self, part: torch.Tensor, whole: torch.Tensor, call: str) -> None:
        size = self._communicator.world_size
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ConfigurationError(
                f"{call} needs a whole of {size} (ranks) times the part's elements and the same type, not "
                f"{whole.numel()} of {whole.dtype} and {part.numel()} of {part.dtype}; pad it"
            )


def _reduction(dtype: torch.dtype, op: Operation) -> Reduction:
    """Return how ``op`` makes one number of two; a mean is a sum that is divided in the end."""
    if op not in get_args(Operation):
        raise ConfigurationError(f"op must be one of {', '.join(get_args(Operation))}, not {op!r}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"A mean of {dtype} is not of that type; convert the tensor to a float type")
    return reduction_for(dtype, "sum" if op == "mean" else op)


def _meaning(op: Operation, weight: float | None) -> str:
    return op if weight is None else f"weighted {op}"


def _check_weight(dtype: torch.dtype, op: Operation, weight: float) -> None:
    if op not in {"sum", "mean"}:
        raise ConfigurationError(f"A {op} has no weights; leave weight={weight} out, or multiply the tensor by it")
    if not (dtype.is_floating_point or dtype.is_complex or isinstance(weight, int)):
        raise ConfigurationError(f"{dtype} times {weight} is not of that type; convert the tensor to a float type")


def _leave(_: torch.Tensor) -> None:
    """Do nothing to a sum."""


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it can be sent as it is, else a copy in host memory."""
    return tensor.detach() if _is_plain(tensor) else tensor.detach().cpu().contiguous()


def _shares(host: torch.Tensor, tensor: torch.Tensor) -> bool:
    return host.data_ptr() == tensor.data_ptr()


def _put(host: torch.Tensor, tensor: torch.Tensor) -> None:
    if not _shares(host, tensor):
        tensor.detach().copy_(host)
