"""How many connection classes there are, how they are marked, and how parameters are divided among them.

The settings belong to a network as much as to a program (its switches honour some marks and not others), so a topology
file may hold them too, in its section ``priorities``. Here they are only checked; the fabric opens the connections, and
the tuner decides which bucket travels on which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from syncline.arguments import Bounds, check_fields
from syncline.errors import ConfigurationError

MAX_CLASSES = 16
MAX_DSCP = 63
DEFAULT_DSCP = (46, 34, 18, 8)
"""Expedited forwarding, two assured classes, and the lowest-effort class selector (RFC 3246, RFC 2597, RFC 2474)."""
_LADDER = (46, 40, 34, 36, 38, 26, 28, 30, 18, 20, 22, 10, 12, 14, 8)
"""Standard marks from the most urgent to the least: EF, CS5, AF41 to AF13, CS1; what goes below them is LE, 1."""
_LOWEST_EFFORT = 1

Search = Literal["auto", "equal"] | tuple[Annotated[float, Bounds(above=0, below=math.inf)], ...]
"""How the proportions of bytes come about: searched, equal, or as given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priorities:
    """Several connections to each peer, each with a priority, so that what the next forward pass needs first is first.

    All ranks give the same. Class 0 is the most urgent. ``Priorities.off()`` is one connection without marks. Raises
    :class:`~syncline.errors.ConfigurationError` for values out of range, and for another number of marks than classes.

    >>> syncline.Priorities(num_classes=2, search=(1, 2)).proportions
    (0.3333333333333333, 0.6666666666666666)
    """

    num_classes: Annotated[int, Bounds(1, MAX_CLASSES)] = 4
    """Data connections to each peer, 1 to 16; small control messages have one of their own beside them."""
    dscp: tuple[Annotated[int, Bounds(0, MAX_DSCP)], ...] | None = DEFAULT_DSCP
    """The mark (0 to 63) of each class; None leaves marks alone. The default is fitted to ``num_classes``."""
    search: Search = "auto"
    """``"auto"`` measures and searches; ``"equal"``, or one share of bytes for each class, does not."""
    measure_steps: Annotated[int, Bounds(1, 1_000_000)] = 8
    """How many steps are measured before a search, and between two comparisons with the model."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dscp == DEFAULT_DSCP:
            object.__setattr__(self, "dscp", _standard_marks(self.num_classes))
        for name, given in (("dscp", self.dscp), ("search", self.search)):
            if isinstance(given, tuple) and len(given) != self.num_classes:
                raise ConfigurationError(
                    f"Priorities: {name} must have one value for each of the {self.num_classes} classes, not {given!r}"
                )

    @classmethod
    def off(cls) -> Priorities:
        """Return one class without a mark: everything goes on one connection, ordered by its sender alone."""
        return cls(num_classes=1, dscp=None)

    @classmethod
    def choose(cls, given: Priorities | bool | None, of_topology: Priorities | None) -> Priorities:
        """Return the argument if it says something, else what the topology file says, else the defaults."""
        if isinstance(given, Priorities):
            return given
        return (of_topology or cls()) if given is True else cls.off()

    @property
    def is_on(self) -> bool:
        """Whether there are several classes."""
        return self.num_classes > 1

    @property
    def is_searched(self) -> bool:
        """Whether proportions come from measurement."""
        return self.is_on and self.search == "auto"

    @property
    def proportions(self) -> tuple[float, ...]:
        """The fixed share of bytes of each class, adding up to 1; equal ones where they are to be searched."""
        weights = self.search if isinstance(self.search, tuple) else (1.0,) * self.num_classes
        total = math.fsum(weights)
        return tuple(weight / total for weight in weights)


def _standard_marks(num_classes: int) -> tuple[int, ...]:
    """Return marks from the most urgent to the least, far apart where there are few."""
    if num_classes == len(DEFAULT_DSCP):
        return DEFAULT_DSCP
    if num_classes > len(_LADDER):
        return (*_LADDER, _LOWEST_EFFORT)
    step = (len(_LADDER) - 1) / max(1, num_classes - 1)
    return tuple(_LADDER[round(number * step)] for number in range(num_classes))
