"""Collectives on Python objects, pickled, as in ``torch.distributed``.

Whoever can send a pickle can run code, so objects are exchanged only with ranks that are known: those that have the
job's secret, which on one machine is at least their user's. Packets are not signed, so who can change them on the way
is trusted too.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from syncline.errors import ConfigurationError, name_ranks
from syncline.tensors.collectives import TensorCollectives
from syncline.tensors.memory import bytes_of

_UNPICKLABLE = -1
"""In place of a size: the object of this rank cannot be sent, which all ranks must know, or they would wait for it."""


class ObjectCollectives:
    """Collectives on objects of one rank; each is two collectives on tensors, of sizes and of pickles.

    ``is_trusted`` says whether the connections are authenticated, or on loopback.
    """

    def __init__(self, tensors: TensorCollectives, *, rank: int, world_size: int, is_trusted: bool) -> None:
        self._tensors = tensors
        self._rank = rank
        self._world_size = world_size
        self._is_trusted = is_trusted

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        return [_unpickled(one) for one in self._gather(value, "all_gather_object", op="")]

    def gather(self, value: Any, *, dst: int) -> list[Any] | None:
        """Return every rank's ``value`` on rank ``dst``, which alone unpickles them, and None on the others."""
        self._tensors.check_rank(dst, "dst")
        pickles = self._gather(value, "gather_object", op=f"for rank {dst}")
        return [_unpickled(one) for one in pickles] if dst == self._rank else None

    def broadcast(self, value: Any, *, root: int) -> Any:
        """Return the ``value`` of rank ``root``, which is that rank's own object there."""
        self._check_trust("broadcast_object")
        pickled, error = _pickled(value) if root == self._rank else (torch.empty(0, dtype=torch.uint8), None)
        size = torch.tensor([_UNPICKLABLE if error else len(pickled)])
        self._tensors.broadcast(size, root=root, is_awaited=True, label="broadcast_object").wait()
        _check_sizes([int(size)], [root], error)
        payload = pickled if root == self._rank else torch.empty(int(size), dtype=torch.uint8)
        self._tensors.broadcast(payload, root=root, is_awaited=True, label="broadcast_object").wait()
        return value if root == self._rank else _unpickled(payload)

    def _gather(self, value: Any, label: str, *, op: str) -> list[torch.Tensor]:
        """Return every rank's pickle; all travel in as many bytes as the longest."""
        self._check_trust(label)
        pickled, error = _pickled(value)
        sizes = torch.empty(self._world_size, dtype=torch.int64)
        own_size = torch.tensor([_UNPICKLABLE if error else len(pickled)])
        self._tensors.all_gather_single(sizes, own_size, is_awaited=True, label=label, op=op).wait()
        _check_sizes(sizes.tolist(), range(self._world_size), error)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(pickled)] = pickled
        whole = torch.empty((self._world_size, len(padded)), dtype=torch.uint8)
        self._tensors.all_gather_single(whole, padded, is_awaited=True, label=label, op=op).wait()
        return [row[:size] for row, size in zip(whole, sizes.tolist(), strict=True)]

    def _check_trust(self, call: str) -> None:
        if not self._is_trusted:
            raise ConfigurationError(
                f"{call} loads pickles, which can run any code, and this job was started with insecure=True and "
                "without a secret, so that strangers can join it; give all ranks a secret (SYNCLINE_SECRET_FILE), or "
                "exchange tensors"
            )


def _pickled(value: Any) -> tuple[torch.Tensor, Exception | None]:
    """Return the pickle of ``value`` as bytes, or what kept it from being pickled."""
    try:
        text = bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # a class can raise anything there
        return torch.empty(0, dtype=torch.uint8), error
    return torch.frombuffer(text, dtype=torch.uint8), None


def _unpickled(payload: torch.Tensor) -> Any:
    return pickle.loads(bytes_of(payload))  # noqa: S301 - of ranks that are trusted alone: see _check_trust


def _check_sizes(sizes: list[int], ranks: list[int] | range, error: Exception | None) -> None:
    guilty = [rank for rank, size in zip(ranks, sizes, strict=True) if size == _UNPICKLABLE]
    if guilty:
        what = f": {error!r}" if error is not None else ""
        raise ConfigurationError(
            f"The object of {name_ranks(guilty)} cannot be pickled{what}; give what pickle takes (no lambdas, open "
            "files or locks)"
        ) from error
