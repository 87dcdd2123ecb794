"""What is said when too many are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncline.errors import UpdateError
from syncline.updates.overlapped.terms import Terms


class QuorumLostError(UpdateError):
    """Fewer workers live than a global gradient needs; ``missing`` are the ranks that are lost."""

    def __init__(self, message: str, *, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


def describe_ranks(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    """``"rank 1 (host a1) and rank 3 (host b1)"``."""
    names = [describe(rank) for rank in ranks]
    if len(names) <= 1:
        return "".join(names) or "nobody"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def minority(living: Sequence[int], base: Sequence[int], describe: Callable[[int], str]) -> QuorumLostError:
    """Return the error of a rank that is among too few: the others may go on elsewhere."""
    missing = [rank for rank in base if rank not in living]
    return QuorumLostError(
        f"{len(living)} of {len(base)} workers are in reach: {describe_ranks(missing, describe)} lost, who may live "
        "and go on elsewhere; only more than half go on, or half with the lowest rank; start again from a checkpoint",
        missing=tuple(missing),
    )


def quorum_lost(missing: Sequence[int], terms: Terms, describe: Callable[[int], str]) -> QuorumLostError:
    """Return the error that every rank that lives ends with."""
    num_left = len(terms.workers) - len(missing)
    return QuorumLostError(
        f"A global gradient needs {terms.quorum} of {len(terms.workers)} workers, but {num_left} are left: "
        f"{describe_ranks(missing, describe)} lost; start again from a checkpoint, or with a smaller quorum",
        missing=tuple(missing),
    )
