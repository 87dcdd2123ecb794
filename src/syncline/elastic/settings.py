"""What a user says of an elastic job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.arguments import Count, check_fields, checked
from syncline.errors import ConfigurationError
from syncline.variables import process_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How a training survives the loss of ranks: ``distribute(..., elastic=Elastic(min_ranks=2))``.

    ``min_ranks``: with fewer the job stops, with :class:`QuorumLostError` on every rank that is left. Whatever it is, a
    part of the job goes on only with more than half of the last members, or with half and the lowest of them.

    ``checkpoint``: where ``save_checkpoint`` writes, a folder that all ranks see. If the state of some parameters is
    lost (with ``Sharded()`` that of any rank, with ``Sharded(spares=1)`` that of an owner and its spare), all ranks go
    back to the newest checkpoint there at the end of the step, and ``optimizer.iteration`` goes back too.

    Raises :class:`ConfigurationError` for less than 1.

    >>> model, optimizer = syncline.distribute(
    ...     model, optimizer, syncline.AllReduce(), elastic=syncline.Elastic(min_ranks=1)
    ... )
    """

    min_ranks: Count = 1
    checkpoint: str | Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    @checked
    def choose(cls, value: Elastic | bool | None) -> Elastic | None:
        """Return what ``distribute(elastic=...)`` was given as settings; None if the job is not elastic.

        If nothing was said, it is what ``syncline run --elastic --min-ranks`` tells, in two variables.
        """
        if value is None:
            return cls._of_variables(process_variables())
        if isinstance(value, Elastic):
            return value
        return cls() if value else None

    @classmethod
    def _of_variables(cls, values: Mapping[str, str]) -> Elastic | None:
        said, least = values.get("SYNCLINE_ELASTIC") or "off", values.get("SYNCLINE_MIN_RANKS") or "1"
        if said not in ("on", "off"):
            raise ConfigurationError(f"SYNCLINE_ELASTIC must be on or off, not {said!r}")
        if not least.isdecimal():
            raise ConfigurationError(f"SYNCLINE_MIN_RANKS must be a whole number, not {least!r}")
        return cls(min_ranks=int(least)) if said == "on" else None
