"""A schedule that was proved: the only thing that the engine runs. Only :func:`~syncline.schedule.verify` makes one.

Below it each rank's part: what it sends and receives, phase by phase.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from syncline.errors import ScheduleError
from syncline.schedule.draft import Collective, Draft
from syncline.schedule.transfers import BoolArray, Transfers
from syncline.topology import DirectedLink, Topology

_PROOF_TOKEN = object()
"""Held by the verifier; a schedule that was not proved cannot be built."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule(Draft):
    """A draft that was proved: which rank sends which range to whom, in which step, and what is added where.

    Semantics of a step at a rank: (1) sends read the buffer as it is after all receives of earlier steps; (2) receives
    that add are added in rank order of their sources, the own value at its own place; (3) other receives overwrite.
    It is correct for any monotone map from cuts to element offsets, so also for sizes that do not divide, and for none.
    ``digest`` is equal where drafts are, in all processes. Only :func:`verify` makes one: the constructor raises
    :class:`ScheduleError` for all others.

    >>> schedule = plan_tree(Topology.load("two-racks-5-3"), Collective.ALL_REDUCE)
    >>> schedule.num_ranks, schedule.num_steps, len(schedule.transfers)
    (8, 4, 80)
    """

    digest: str
    token: InitVar[object]
    _programs: dict[int, tuple[Phase, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self, token: object) -> None:
        if token is not _PROOF_TOKEN:
            raise ScheduleError("a schedule is made by syncline.schedule.verify(draft) alone; pass it the draft")
        Draft.__post_init__(self)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.planner} {self.collective} of {self.num_ranks} ranks, {self.num_atoms} atoms,"
            f" {len(self.transfers)} transfers in {self.num_steps} steps, {self.digest[:12]}>"
        )

    @property
    def draft(self) -> Draft:
        """What was proved, as a claim that can be changed."""
        return Draft(**_columns(self))

    def program(self, rank: int) -> tuple[Phase, ...]:
        """Return what ``rank`` does, phase by phase (cached); :class:`ScheduleError` if there is no such rank.

        Steps in which it has nothing to do are left out.
        """
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError(f"the schedule has ranks 0 to {self.num_ranks - 1}, not {rank}; ask for one of these")
        if rank not in self._programs:
            self._programs[rank] = build_program(self.transfers, rank)
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

        return link_bytes(self, topology, num_bytes)


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


def prove(draft: Draft) -> Schedule:
    """Turn a draft into a schedule. For the verifier alone, which has just proved it."""
    return Schedule(**_columns(draft), digest=digest_of(draft), token=_PROOF_TOKEN)


def _columns(draft: Draft) -> dict[str, Any]:
    return {column.name: getattr(draft, column.name) for column in fields(Draft)}


class Send(NamedTuple):
    """Send the atoms [first, last) to ``peer``; ``index`` numbers the messages from this rank to that peer.

    >>> PLANNERS["ring"].plan(Topology.flat(2), Collective.ALL_GATHER).program(0)[0].sends[0].peer
    1
    """

    peer: int
    first: int
    last: int
    index: int  # type: ignore[assignment]  # a message's number; nobody searches in a message


class Receive(NamedTuple):
    """Receive the atoms [first, last) from ``peer`` and add or overwrite; ``index`` is the sender's.

    >>> PLANNERS["ring"].plan(Topology.flat(2), Collective.REDUCE_SCATTER).program(0)[0].receives[0].add
    True
    """

    peer: int
    first: int
    last: int
    index: int  # type: ignore[assignment]  # a message's number; nobody searches in a message
    add: bool


class Phase(NamedTuple):
    """What a rank does in one step.

    Sends read the buffer as it is after all receives of earlier phases. Receives that add come first in ``receives``
    and in rank order of their peers; contributions to a range are added in that order, the rank's own value at its
    own place.

    >>> (phase,) = PLANNERS["ring"].plan(Topology.flat(2), Collective.ALL_GATHER).program(0)
    >>> phase.sends
    (Send(peer=1, first=0, last=1, index=0),)
    """

    step: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


def build_program(transfers: Transfers, rank: int) -> tuple[Phase, ...]:
    """Pick and order what concerns ``rank``; takes time in proportion to all transfers (one scan) and to its own."""
    sends, receives = defaultdict[int, list[Send]](list), defaultdict[int, list[Receive]](list)
    going = transfers.take(np.flatnonzero(transfers.src == rank))
    for row, index in zip(going, _running_numbers(going.dst).tolist(), strict=True):
        sends[row.step].append(Send(row.dst, row.first, row.last, index))
    coming = transfers.take(np.flatnonzero(transfers.dst == rank))
    order = np.lexsort((coming.first, coming.src, ~coming.add, coming.step))
    for row, index in zip(coming.take(order), _running_numbers(coming.src)[order].tolist(), strict=True):
        receives[row.step].append(Receive(row.src, row.first, row.last, index, row.add))
    return tuple(
        Phase(step=step, sends=tuple(sends[step]), receives=tuple(receives[step]))
        for step in sorted(sends.keys() | receives.keys())
    )


def _running_numbers(peers: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the number of each value's occurrence: [5, 7, 5] gives [0, 0, 1]."""
    order = np.argsort(peers, kind="stable")
    sorted_peers = peers[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_peers[1:] != sorted_peers[:-1]))) if len(peers) else order
    lengths = np.diff(np.append(starts, len(peers)))
    numbers = np.empty(len(peers), dtype=np.int64)
    numbers[order] = np.arange(len(peers)) - np.repeat(starts, lengths)
    return numbers
