"""A schedule that was proved: the only thing that the engine runs. Only :func:`~syncline.schedule.verify` makes one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from syncline.errors import ScheduleError
from syncline.schedule.collective import Collective
from syncline.schedule.draft import Draft
from syncline.schedule.program import RankProgram, build_program
from syncline.schedule.transfers import BoolArray, IntArray, Transfers
from syncline.topology import DirectedLink, Topology

_PROOF_TOKEN = object()
"""Held by the verifier; a schedule that was not proved cannot be built."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Which rank sends which range to whom, in which step, and what is added where.

    Semantics of a step at a rank: (1) sends read the buffer as it is after all receives of earlier steps; (2) receives
    that add are added in rank order of their sources, the own value at its own place; (3) other receives overwrite.
    It is correct for any monotone map from cuts to element offsets, so also for sizes that do not divide, and for none.
    ``proved`` says in words what the verifier established; ``digest`` is equal where drafts are, in all processes.
    Only :func:`verify` makes one: the constructor raises :class:`ScheduleError` for all others.

    >>> schedule = plan_tree(Topology.load("two-racks-5-3"), Collective.ALL_REDUCE)
    >>> schedule.num_ranks, schedule.num_steps, len(schedule.transfers)
    (8, 4, 80)
    """

    draft: Draft
    digest: str
    proved: str
    token: object = field(repr=False)
    _programs: dict[int, RankProgram] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.token is not _PROOF_TOKEN:
            raise ScheduleError("a schedule is made by syncline.schedule.verify(draft) alone; pass it the draft")

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.planner} {self.collective} of {self.num_ranks} ranks, {self.num_atoms} atoms,"
            f" {len(self.transfers)} transfers in {self.num_steps} steps, {self.digest[:12]}>"
        )

    @property
    def collective(self) -> Collective:
        """What it brings about."""
        return self.draft.collective

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part."""
        return self.draft.num_ranks

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts 0 = c_0 < ... < c_m = denominator."""
        return self.draft.cuts

    @property
    def denominator(self) -> int:
        """What the cuts are counted in."""
        return self.draft.denominator

    @property
    def num_atoms(self) -> int:
        """Number of atoms, m."""
        return self.draft.num_atoms

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.draft.num_steps

    @property
    def transfers(self) -> Transfers:
        """All transfers, in columns."""
        return self.draft.transfers

    @property
    def owners(self) -> IntArray:
        """The rank that owns each atom in each replica, or -1 (int32, [replicas, atoms])."""
        return self.draft.owners

    @property
    def planner(self) -> str:
        """Which planner drew it."""
        return self.draft.planner

    @property
    def root(self) -> int:
        """Where a broadcast begins."""
        return self.draft.root

    def program(self, rank: int) -> RankProgram:
        """Return what ``rank`` does, phase by phase (cached); :class:`ScheduleError` if there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError(f"the schedule has ranks 0 to {self.num_ranks - 1}, not {rank}; ask for one of these")
        if rank not in self._programs:
            self._programs[rank] = build_program(self.transfers, rank, self.num_atoms)
        return self._programs[rank]

    def offsets(self, num_elements: int) -> tuple[int, ...]:
        """Return the element at which each cut falls (m + 1 numbers): cuts are floored, never padded."""
        return tuple(cut * num_elements // self.denominator for cut in self.cuts)

    def owned(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the runs [first, last) of atoms that ``rank`` owns, merged and in order."""
        return _runs((self.owners == rank).any(axis=0))

    def owned_alike(self, rank: int, *, row: int | None = None) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return what ``rank`` owns as runs of atoms, those together that have the same owner in each other replica.

        With one replica there is one such group, or none; replicas that divide the data alike have one, too. ``row``:
        only what it owns by this row of :attr:`owners`, such as the first of an owner and its spare.
        """
        rows = self.owners if row is None else self.owners[row : row + 1]
        mine = np.flatnonzero((rows == rank).any(axis=0))
        places: dict[tuple[int, ...], list[int]] = {}
        for atom, owners in zip(mine.tolist(), self.owners[:, mine].T.tolist(), strict=True):
            places.setdefault(tuple(owners), []).append(atom)
        return tuple(_runs(np.isin(np.arange(self.num_atoms), atoms)) for atoms in places.values())

    def link_bytes(self, topology: Topology, num_bytes: int) -> Mapping[DirectedLink, int]:
        """Return the bytes that cross each directed link when ``num_bytes`` go through as one slice of bytes."""
        from syncline.schedule.traffic import link_bytes

        return link_bytes(self.draft, topology, num_bytes)


def _runs(held: BoolArray) -> tuple[tuple[int, int], ...]:
    """Return where a mask of atoms is set, as runs [first, last)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], held, [False])).astype(np.int8))).tolist()
    return tuple(zip(edges[0::2], edges[1::2], strict=True))


def digest_of(draft: Draft) -> str:
    """Return a hash of what the draft does, equal in all processes.

    The planner's name does not count, nor does the order of rows but for that in which a rank sends.
    """
    hasher = hashlib.blake2b(digest_size=16)
    root = draft.root if draft.collective is Collective.BROADCAST else 0
    header = (draft.collective.value, draft.num_ranks, root, draft.denominator, draft.cuts, len(draft.transfers))
    hasher.update(repr(header).encode())
    rows = draft.transfers
    rows = rows.take(np.argsort(rows.step.astype(np.int64) * draft.num_ranks + rows.src, kind="stable"))
    for column in (rows.step, rows.src, rows.dst, rows.first, rows.last, draft.owners):
        hasher.update(column.astype("<i4", copy=False).tobytes())
    hasher.update(rows.add.tobytes())
    return hasher.hexdigest()


def prove(draft: Draft, statement: str) -> Schedule:
    """Turn a draft into a schedule. For the verifier alone, which has just proved ``statement``."""
    return Schedule(draft=draft, digest=digest_of(draft), proved=statement, token=_PROOF_TOKEN)
