"""What a planner makes: a schedule that nobody has proved yet, and that therefore cannot be run.

The range [0, 1) of the data is divided by *cuts*: Python integers 0 = c_0 < ... < c_m = denominator. Atom i is the
range [c_i, c_{i+1}). A transfer moves a contiguous run of atoms. Which elements that is, is settled when data is
bound: see :mod:`syncline.schedule.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from syncline.schedule.collective import Collective
from syncline.schedule.transfers import IntArray, Transfers

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
        sizes = np.diff(np.array([cut / self.denominator for cut in self.cuts]))
        return tuple(np.bincount(self.owners[0], sizes, self.num_ranks).tolist())

    @property
    def num_steps(self) -> int:
        """Number of steps, those counted in which nothing moves."""
        return int(self.transfers.step[-1]) + 1 if len(self.transfers) else 0


def lowest_terms(cuts: Sequence[int]) -> tuple[int, ...]:
    """Divide cuts by what they have in common, so that equal divisions have equal cuts."""
    divisor = math.gcd(*cuts) or 1
    return tuple(cut // divisor for cut in cuts)
