"""Collectives on torch tensors: any number type, memory order and device, in the calls of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from syncline.errors import ConfigurationError
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.updates.memory import bytes_of, reduction_for

Operation = Literal["sum", "mean"]


class TensorWork:
    """A collective on tensors that is under way; the result is there after :meth:`wait`."""

    def __init__(self, works: list[Work], finish: Callable[[], None]) -> None:
        self._works = works
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and put the result in place; raises what went wrong."""
        for work in self._works:
            work.wait(timeout_s)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.done() for work in self._works)


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
        """Sum or average ``tensor`` over all ranks, in place."""
        host = _host(tensor)
        divide = self._weigh(host, op, weight, is_awaited=is_awaited)
        work = self._communicator.all_reduce(bytes_of(host), reduction_for(host.dtype), is_awaited=is_awaited)

        def finish() -> None:
            divide(host)
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
        """Sum or average ``source`` over all ranks; rank k's ``output`` becomes part k of it."""
        self._check_parts(output, source, "reduce_scatter")
        host = _host(source)
        scratch = self._scratch.borrow(host) if _shares(host, source) else None  # the input stays as it is
        host = host if scratch is None else scratch
        divide = self._weigh(host, op, weight, is_awaited=is_awaited)
        work = self._communicator.reduce_scatter(bytes_of(host), reduction_for(host.dtype), is_awaited=is_awaited)

        def finish() -> None:
            part = self._part(host, output)
            divide(part)
            output.detach().copy_(part)
            if scratch is not None:
                self._scratch.give_back(scratch)

        return TensorWork([work], finish)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, is_awaited: bool = False) -> TensorWork:
        """Make ``output`` the parts of all ranks, rank k's ``source`` being part k."""
        self._check_parts(source, output, "all_gather")
        host = output.detach() if _is_plain(output) else torch.empty(output.shape, dtype=output.dtype)
        own_part = None
        if is_awaited and _is_plain(source):
            own_part = bytes_of(source.detach())
        else:
            self._part(host, source).copy_(source.detach())
        work = self._communicator.all_gather(bytes_of(host), is_awaited=is_awaited, own_part=own_part)
        return TensorWork([work], lambda: _put(host, output))

    def broadcast(self, tensor: torch.Tensor, *, root: int, is_awaited: bool = False) -> TensorWork:
        """Give every rank the ``tensor`` of ``root``."""
        if not 0 <= root < self._communicator.world_size:
            raise ConfigurationError(f"root must be a rank, 0 to {self._communicator.world_size - 1}, not {root}")
        host = _host(tensor)
        work = self._communicator.broadcast(bytes_of(host), root=root, is_awaited=is_awaited)
        return TensorWork([work], lambda: _put(host, tensor))

    def _weigh(
        self, host: torch.Tensor, op: Operation, weight: float | None, *, is_awaited: bool
    ) -> Callable[[torch.Tensor], None]:
        """Multiply by this rank's weight; return what divides the sum by that of all."""
        if op not in {"sum", "mean"}:
            raise ConfigurationError(f'op must be "sum" or "mean", not {op!r}')
        if op == "sum":
            if weight is not None:
                host.mul_(weight)
            return _leave
        if not (host.dtype.is_floating_point or host.dtype.is_complex):
            raise ConfigurationError(f"A mean of {host.dtype} is not of that type; convert the tensor to a float type")
        if weight is None:
            return self._divide_by_ranks
        weights = torch.tensor([weight], dtype=torch.float64)
        adds = reduction_for(weights.dtype)
        total_weight = self._communicator.all_reduce(bytes_of(weights), adds, is_awaited=is_awaited)
        host.mul_(weight)

        def divide(total: torch.Tensor) -> None:
            total_weight.wait()
            total.div_(float(weights[0]))

        return divide

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
