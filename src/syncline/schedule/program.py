"""One rank's part of a schedule: what it sends and receives, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from syncline.schedule.transfers import Transfers


class Send(NamedTuple):
    """Send the atoms [first, last) to ``peer``; ``index`` numbers the messages from this rank to that peer.

    >>> plan_ring(Topology.flat(2), Collective.ALL_GATHER).program(0).phases[0].sends[0].peer
    1
    """

    peer: int
    first: int
    last: int
    index: int  # type: ignore[assignment]  # a message's number; nobody searches in a message


class Receive(NamedTuple):
    """Receive the atoms [first, last) from ``peer`` and add or overwrite; ``index`` is the sender's.

    ``after_send``: a send of the same phase reads some of these atoms. It must have left before they are written.

    >>> plan_ring(Topology.flat(2), Collective.REDUCE_SCATTER).program(0).phases[0].receives[0].add
    True
    """

    peer: int
    first: int
    last: int
    index: int  # type: ignore[assignment]  # a message's number; nobody searches in a message
    add: bool
    after_send: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a rank does in one step.

    Sends read the buffer as it is after all receives of earlier phases. Receives that add come first in ``receives``
    and in rank order of their peers; contributions to a range are added in that order, the rank's own value at its
    own place.

    >>> (phase,) = plan_ring(Topology.flat(2), Collective.ALL_GATHER).program(0).phases
    >>> phase.sends
    (Send(peer=1, first=0, last=1, index=0),)
    """

    step: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """All phases of one rank, in order; steps in which it has nothing to do are left out.

    >>> program = plan_ring(Topology.flat(3), Collective.ALL_GATHER).program(0)
    >>> [phase.step for phase in program.phases]
    [0, 1]
    """

    rank: int
    phases: tuple[Phase, ...]

    @property
    def num_messages(self) -> int:
        """Number of messages that this rank sends or receives."""
        return sum(len(phase.sends) + len(phase.receives) for phase in self.phases)


def build_program(transfers: Transfers, rank: int, num_atoms: int) -> RankProgram:
    """Pick and order what concerns ``rank``; takes time in proportion to all transfers (one scan) and to its own."""
    sends = _sends_of(transfers, rank)
    receives = _receives_of(transfers, rank)
    phases = []
    for step in sorted(sends.keys() | receives.keys()):
        going, coming = sends.get(step, []), receives.get(step, [])
        phases.append(Phase(step=step, sends=tuple(going), receives=tuple(_mark_hazards(going, coming, num_atoms))))
    return RankProgram(rank=rank, phases=tuple(phases))


def _sends_of(transfers: Transfers, rank: int) -> dict[int, list[Send]]:
    rows = np.flatnonzero(transfers.src == rank)
    peers = transfers.dst[rows]
    columns = (transfers.step[rows], peers, transfers.first[rows], transfers.last[rows], _running_numbers(peers))
    by_step: dict[int, list[Send]] = {}
    for step, peer, first, last, index in zip(*(column.tolist() for column in columns), strict=True):
        by_step.setdefault(step, []).append(Send(peer, first, last, index))
    return by_step


def _receives_of(transfers: Transfers, rank: int) -> dict[int, list[Receive]]:
    rows = np.flatnonzero(transfers.dst == rank)
    peers = transfers.src[rows]
    first, add = transfers.first[rows], transfers.add[rows]
    columns = (transfers.step[rows], peers, first, transfers.last[rows], _running_numbers(peers), add)
    order = np.lexsort((first, peers, ~add, columns[0]))
    by_step: dict[int, list[Receive]] = {}
    rows_in_order = zip(*(column[order].tolist() for column in columns), strict=True)
    for step, peer, first_atom, last_atom, index, adds in rows_in_order:
        by_step.setdefault(step, []).append(Receive(peer, first_atom, last_atom, index, adds, False))
    return by_step


def _running_numbers(peers: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the number of each value's occurrence: [5, 7, 5] gives [0, 0, 1]."""
    order = np.argsort(peers, kind="stable")
    sorted_peers = peers[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_peers[1:] != sorted_peers[:-1]))) if len(peers) else order
    lengths = np.diff(np.append(starts, len(peers)))
    numbers = np.empty(len(peers), dtype=np.int64)
    numbers[order] = np.arange(len(peers)) - np.repeat(starts, lengths)
    return numbers


def _mark_hazards(sends: list[Send], receives: list[Receive], num_atoms: int) -> list[Receive]:
    if not sends or not receives:
        return receives
    if len(sends) * len(receives) <= 64:
        return [
            receive._replace(after_send=True)
            if any(send.first < receive.last and receive.first < send.last for send in sends)
            else receive
            for receive in receives
        ]
    edges = np.zeros(num_atoms + 1, dtype=np.int64)
    np.add.at(edges, [send.first for send in sends], 1)
    np.add.at(edges, [send.last for send in sends], -1)
    read_before = np.concatenate(([0], np.cumsum(np.cumsum(edges[:-1]) > 0))).tolist()
    return [
        receive._replace(after_send=True) if read_before[receive.last] > read_before[receive.first] else receive
        for receive in receives
    ]
