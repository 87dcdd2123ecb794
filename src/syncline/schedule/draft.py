"""What is to be achieved, a collective, and what a planner makes of it: a draft, which nobody has proved yet.

A collective says what must be true before and after. A draft says how, and cannot be run before it is proved.

The range [0, 1) of the data is divided by *cuts*: Python integers 0 = c_0 < ... < c_m = denominator. Atom i is the
range [c_i, c_{i+1}). A transfer moves a contiguous run of atoms. Which elements that is, is settled when data is
bound: see :mod:`syncline.schedule.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from syncline.errors import ScheduleError
from syncline.schedule.transfers import IntArray, Transfers

if TYPE_CHECKING:
    from syncline.topology import Topology

MAX_PLANNED_RANKS = 4096
"""Of a job: time and memory of drawing schedules grow with the square of the ranks."""


class Before(Enum):
    """What the ranks hold when a collective begins."""

    CONTRIBUTION = "every rank holds its own contribution to the whole range"
    SHARD = "every rank holds the ranges that it owns"
    ROOT = "the root holds the whole range"


class After(Enum):
    """Which ranks hold the result when a collective is over."""

    OWNERS = "each owner of a range holds its result"
    EVERY_RANK = "every rank holds the whole result"


class Collective(StrEnum):
    """What is to be achieved; ``before`` and ``after`` say it exactly.

    The result of a range is the sum of all contributions, each counted once, if every rank begins with one; otherwise
    it is what the range's holder began with. A range has one owner, or one in each replica; they begin with the same.

    >>> Collective.ALL_REDUCE.after.value
    'every rank holds the whole result'
    """

    before: Before
    after: After

    REDUCE_SCATTER = ("reduce_scatter", Before.CONTRIBUTION, After.OWNERS)
    ALL_GATHER = ("all_gather", Before.SHARD, After.EVERY_RANK)
    ALL_REDUCE = ("all_reduce", Before.CONTRIBUTION, After.EVERY_RANK)
    BROADCAST = ("broadcast", Before.ROOT, After.EVERY_RANK)

    def __new__(cls, value: str, before: Before, after: After) -> Collective:
        """Make a member whose value is its name and which carries its conditions."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.before = before
        member.after = after
        return member

    @property
    def adds(self) -> bool:
        """Whether contributions are added up."""
        return self.before is Before.CONTRIBUTION

    @property
    def needs_owners(self) -> bool:
        """Whether every range must have an owner, because the conditions speak of it."""
        return self.before is Before.SHARD or self.after is After.OWNERS


UNOWNED = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A claim that these transfers bring the collective about; :func:`~syncline.schedule.verify` proves or refutes it.

    ``cuts`` rise from 0 to the denominator; atom i is the range [cuts[i], cuts[i + 1]) of it. ``owners`` (int32,
    [replicas, atoms]; one row may be given as it is) holds the rank that owns each atom in each replica, or -1;
    ``root`` matters to a broadcast alone. Nothing is checked here.

    >>> draft = PLANNERS["ring"].draft(Topology.flat(3), Collective.ALL_REDUCE)
    >>> len(draft.transfers), draft.cuts  # all in thirds of the buffer
    (12, (0, 1, 2, 3))
    """

    collective: Collective
    num_ranks: int
    cuts: tuple[int, ...]
    transfers: Transfers
    owners: IntArray
    planner: str
    root: int = 0

    def __post_init__(self) -> None:
        owners: npt.NDArray[np.int32] = np.array(self.owners, dtype=np.int32, ndmin=2)
        owners.flags.writeable = False
        object.__setattr__(self, "owners", owners)

    @property
    def denominator(self) -> int:
        """What the cuts are counted in: the last of them."""
        return self.cuts[-1]

    @property
    def num_atoms(self) -> int:
        """Number of atoms, the pieces between neighbouring cuts."""
        return len(self.cuts) - 1

    @property
    def num_messages(self) -> int:
        """Number of transfers."""
        return len(self.transfers)

    @property
    def num_replicas(self) -> int:
        """Number of owners of each atom: in each replica one."""
        return len(self.owners)

    @property
    def has_owners(self) -> bool:
        """Whether every atom has an owner."""
        return bool((self.owners != UNOWNED).all())

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the data that each rank owns, in the first replica."""
        return shares_in(self, slice(1))

    @property
    def num_steps(self) -> int:
        """Number of steps, those counted in which nothing moves."""
        return int(self.transfers.step[-1]) + 1 if len(self.transfers) else 0


def shares_in(draft: Draft, replicas: slice) -> tuple[float, ...]:
    """Return the part of the data that each rank owns in some of the replicas, all together."""
    sizes, owners = np.diff(np.array([cut / draft.denominator for cut in draft.cuts])), draft.owners[replicas]
    return tuple(np.bincount(owners.reshape(-1), np.tile(sizes, len(owners)), draft.num_ranks).tolist())


def cut_further(draft: Draft, cuts: Sequence[int]) -> Draft:
    """Return the draft with more cuts: its own are among them, over their denominator, a multiple of its own."""
    number = {cut: place for place, cut in enumerate(cuts)}
    scale, rows = cuts[-1] // draft.denominator, draft.transfers
    places: IntArray = np.array([number[cut * scale] for cut in draft.cuts], dtype=np.int32)
    return replace(
        draft,
        cuts=lowest_terms(cuts),
        transfers=replace(rows, first=places[rows.first], last=places[rows.last]),
        owners=np.repeat(draft.owners, np.diff(places), axis=1),
    )


def lowest_terms(cuts: Sequence[int]) -> tuple[int, ...]:
    """Divide cuts by what they have in common, so that equal divisions have equal cuts."""
    divisor = math.gcd(*cuts) or 1
    return tuple(cut // divisor for cut in cuts)


def check_plannable(topology: Topology) -> None:
    """Raise :class:`ScheduleError` at once where planning would take very long."""
    if topology.num_ranks > MAX_PLANNED_RANKS:
        raise ScheduleError(
            f"topology {topology.name!r} has {topology.num_ranks} ranks, and schedules are planned for at most "
            f"{MAX_PLANNED_RANKS}; describe the hosts of one job alone, or give a host fewer ranks. (`syncline plan` "
            "alone goes beyond, for all_reduce, reduce_scatter, all_gather and sharded_step.)"
        )
