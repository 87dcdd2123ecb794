"""What every member knows of its job in one epoch, and what follows when ranks are lost or come. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from syncline.schedule import with_gateways_chosen
from syncline.topology import Topology
from syncline.topology.growing import with_places

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """Who wants to come in, as it says."""

    machine: str
    """What it calls its host."""
    join_address: Address
    """Where it listens for those that come after it."""
    topology: str | None = None
    """The tree of the larger job, as text; None: it is put beside the others."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One epoch of a job, alike on all members; by rank, if nothing else is said.

    >>> job = JobRecord.first(Topology.flat(2), machines=["a", "b"], join_addresses=[("a", 1), ("b", 1)])
    >>> larger = job.without([0]).grown([Newcomer(machine="c", join_address=("c", 1))])
    >>> larger.numbers, larger.machines, larger.epoch
    ((1, 2), ('b', 'c'), 2)
    """

    epoch: int
    numbers: tuple[int, ...]
    """How errors call the members: those of the start are 0 to N-1, who comes gets the next number, also if it was in
    the job before."""
    next_number: int
    machines: tuple[str, ...]
    join_addresses: tuple[Address, ...]
    known: Topology
    """The largest tree that the job has known."""
    places: tuple[int, ...]
    """Which of its ranks the members are."""

    @classmethod
    def first(cls, topology: Topology, *, machines: Sequence[str], join_addresses: Sequence[Address]) -> JobRecord:
        """Return the record of a job at its start."""
        numbers = tuple(range(topology.num_ranks))
        return cls(
            epoch=0,
            numbers=numbers,
            next_number=len(numbers),
            machines=tuple(machines),
            join_addresses=tuple(join_addresses),
            known=topology,
            places=numbers,
        )

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.numbers)

    @cached_property
    def topology(self) -> Topology:
        """The tree of the members alone, by rank."""
        if self.places == tuple(range(self.known.num_ranks)):
            return with_gateways_chosen(self.known)
        return with_gateways_chosen(self.known.restricted(self.places))

    def without(self, lost: Collection[int], *, epoch: int | None = None) -> JobRecord:
        """Return the next epoch's record when these ranks are lost; ranks are dense again."""
        kept = [rank for rank in range(self.world_size) if rank not in lost]
        return replace(
            self,
            epoch=self.epoch + 1 if epoch is None else epoch,
            numbers=tuple(self.numbers[rank] for rank in kept),
            machines=tuple(self.machines[rank] for rank in kept),
            join_addresses=tuple(self.join_addresses[rank] for rank in kept),
            places=tuple(self.places[rank] for rank in kept),
        )

    def grown(self, newcomers: Sequence[Newcomer]) -> JobRecord:
        """Return the next epoch's record with these as its last ranks.

        Raises :class:`TopologyError` where one has no clear place (see :mod:`syncline.topology.growing`), or where the
        topology that one brings is not of all these ranks and hosts.
        """
        machines = (*self.machines, *(newcomer.machine for newcomer in newcomers))
        given = [newcomer.topology for newcomer in newcomers if newcomer.topology is not None]
        if given:
            known = Topology.parse(given[-1], source="of a newcomer").matched(machines)
            places = tuple(range(len(machines)))
        else:
            names = [newcomer.machine for newcomer in newcomers]
            known, new = with_places(self.known, self.places, names, machines=self.machines)
            places = (*self.places, *new)
        count = len(newcomers)
        return replace(
            self,
            epoch=self.epoch + 1,
            numbers=(*self.numbers, *range(self.next_number, self.next_number + count)),
            next_number=self.next_number + count,
            machines=machines,
            join_addresses=(*self.join_addresses, *(newcomer.join_address for newcomer in newcomers)),
            known=known,
            places=places,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can say of it."""
        return {
            "epoch": self.epoch,
            "numbers": self.numbers,
            "next_number": self.next_number,
            "machines": self.machines,
            "join_addresses": self.join_addresses,
            "known": self.known.to_yaml(),
            "places": self.places,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> JobRecord:
        """Undo :meth:`to_json`."""
        return cls(
            epoch=int(fields["epoch"]),
            numbers=tuple(map(int, fields["numbers"])),
            next_number=int(fields["next_number"]),
            machines=tuple(map(str, fields["machines"])),
            join_addresses=tuple(address_of(each) for each in fields["join_addresses"]),
            known=Topology.parse(str(fields["known"]), source="of the job"),
            places=tuple(map(int, fields["places"])),
        )


def address_of(value: Any) -> Address:
    """Return an address that JSON said."""
    host, port = value
    return str(host), int(port)
