"""What a user says of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How a training survives the loss of ranks: ``distribute(..., elastic=Elastic(min_ranks=2))``.

    ``min_ranks``: with fewer the job stops, with :class:`QuorumLostError` on every rank that is left. Whatever it is, a
    part of the job goes on only with more than half of the last members, or with half and the lowest of them.

    Raises :class:`ConfigurationError` for less than 1.

    >>> model, optimizer = syncline.distribute(
    ...     model, optimizer, syncline.AllReduce(), elastic=syncline.Elastic(min_ranks=1)
    ... )
    """

    min_ranks: int = 1

    def __post_init__(self) -> None:
        if self.min_ranks < 1:
            raise ConfigurationError(f"min_ranks is a number of ranks, 1 or more, not {self.min_ranks}")

    @classmethod
    def choose(cls, value: Elastic | bool | None) -> Elastic | None:
        """Return what ``distribute(elastic=...)`` was given as settings; None if the job is not elastic."""
        if value is None or isinstance(value, Elastic):
            return value
        if isinstance(value, bool):
            return cls() if value else None
        raise ConfigurationError(f"elastic is True, False, or syncline.Elastic(...), not {value!r}")
