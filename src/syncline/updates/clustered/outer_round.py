"""An outer round, as one cluster's server sees it: who takes part, who has the result already, and what is to be done.

Each server tells all others that it is *ready*, naming the participants that it knows of and whether it has the result.
Once it heard so from all of them, for the same participants, it knows what they all know, and decides as they all do:

- nobody has the result: they exchange;
- some have it: the first of them sends it to those who lack it (only where the result is the same for all clusters);
- everybody has it: nothing is to be done.

When a participant dies its cluster draws another one, or is dead as a whole; either way the participants are others,
and all servers start over with being ready. A server that was done says so again: so whoever was left behind is
helped, and what one cluster has applied all will apply. What a cluster brings to an outer round is held by all its
members before its server is ready; therefore its next server brings the very same.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from syncline.updates.clustered.instructions import Abandon, Run
from syncline.updates.clustered.member import Provided
from syncline.updates.clustered.messages import NO_PROPOSAL, Measurement, Participants, Proposal, Ready
from syncline.updates.clustered.record_schedule import Record
from syncline.updates.clustered.view import View


class OuterRoundState(Enum):
    """How far an outer round is."""

    READYING = "waiting until all servers are ready"
    AVERAGING = "exchanging"
    FETCHING = "waiting for a server that has the result"
    DONE = "done"


class OuterRound:
    """One exchange of one server."""

    def __init__(
        self,
        view: View,
        record: Record,
        provided: Provided,
        *,
        measurements: Mapping[int, Measurement],
        has_result: bool,
        is_shared: bool,
    ) -> None:
        self.record = record
        self.has_result = has_result
        self._view = view
        self._cluster = view.own_cluster(record.term)
        self.proposal = NO_PROPOSAL
        self._provided = provided
        self._measurements = tuple(sorted(measurements.items()))
        self._is_shared = is_shared
        self._announced: Participants | None = None
        self._heard: dict[Participants, dict[int, Ready]] = {}
        self._decided: Participants | None = None
        self._running: Participants | None = None

    def __repr__(self) -> str:
        return f"<OuterRound of record {self.record.index}: {self.state.value}>"

    @property
    def state(self) -> OuterRoundState:
        """How far it is."""
        if self.has_result:
            return OuterRoundState.DONE
        if self._running is not None:
            return OuterRoundState.AVERAGING
        return OuterRoundState.READYING if self._decided != self._announced else OuterRoundState.FETCHING

    def refresh(self) -> tuple[list[Abandon], list[tuple[int, Ready]]]:
        """Be ready for those who take part now, if they are others than before."""
        participants = self._view.participants(self.record.term)
        if participants == self._announced:
            return [], []
        abandoned = [] if self._running is None else [Abandon(record=self.record, participants=self._running)]
        self._running = None
        self._announced = participants
        ready = Ready(
            term=self.record.term,
            index=self.record.index,
            cluster=self._cluster,
            participants=participants,
            samples=self._provided.samples,
            has_result=self.has_result,
            measurements=self._measurements,
            clusters=self._provided.proposal.clusters,
            state=self._provided.proposal.state,
        )
        self.hear(ready)
        return abandoned, [(server, ready) for _, server in participants if server != self._view.rank]

    def hear(self, ready: Ready) -> None:
        """Note what a server said. A server says it once for each set of participants."""
        self._heard.setdefault(ready.participants, {})[ready.cluster] = ready

    def decide(self) -> tuple[list[Run], list[int]]:
        """Return what is to be done once all are ready: run the outer round, or send the result to some servers."""
        assert self._announced is not None
        said = self._heard.get(self._announced, {})
        if self._decided == self._announced or len(said) < len(self._announced):
            return [], []
        self._decided = self._announced
        servers = dict(self._announced)
        lacking = [cluster for cluster in servers if not said[cluster].has_result]
        holders = [cluster for cluster in servers if said[cluster].has_result]
        if holders and self._is_shared:
            return [], [servers[cluster] for cluster in lacking] if self._cluster == holders[0] else []
        if not lacking:
            return [], []
        self._running = self._announced
        first = said[self._announced[0][0]]
        self.proposal = Proposal(clusters=first.clusters, state=first.state)
        samples = tuple(said[cluster].samples for cluster in servers)
        payload = self._provided.payload
        return [Run(record=self.record, participants=self._announced, samples=samples, payload=payload)], []

    def finish(self, participants: Participants) -> bool:
        """Note that the outer round among ``participants`` is over; whether its result is this cluster's."""
        if self._running != participants:
            return False
        self._running = None
        is_new = not self.has_result
        self.has_result = True
        return is_new
