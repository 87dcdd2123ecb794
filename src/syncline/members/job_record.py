"""What every member knows of its job in one epoch, what follows when ranks are lost or come, and attempts to grow."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any

from syncline.errors import TopologyError, name_ranks
from syncline.topology import Topology
from syncline.topology.host_matching import plain_name, same_host
from syncline.topology.tree import Host, Link, Rank, Switch, changed, with_children

Address = tuple[str, int]
Flags = tuple[int, int]
"""What the first member tells of newcomers: the attempt that is under way, and the one to which all switch now."""
NO_FLAGS: Flags = (0, 0)
NONCE_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """Who wants to come in, as it says."""

    machine: str
    """What it calls its host."""
    join_address: Address
    """Where it listens for those that come after it."""
    topology: str | None = None
    """The tree of the larger job, as text; None: it is put beside the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def topology(self) -> Topology:
        """The tree of the members alone, by rank."""
        is_whole = self.places == tuple(range(self.known.num_ranks))
        return self.known if is_whole else self.known.restricted(self.places)

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

        Raises :class:`TopologyError` where one has no clear place (:func:`with_places`), or where the topology that one
        brings is not of all these ranks and hosts.
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
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"known": self.known.to_yaml()}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> JobRecord:
        """Undo :meth:`to_json`."""
        return cls(
            epoch=int(told["epoch"]),
            numbers=tuple(map(int, told["numbers"])),
            next_number=int(told["next_number"]),
            machines=tuple(map(str, told["machines"])),
            join_addresses=tuple(address_of(each) for each in told["join_addresses"]),
            known=Topology.parse(str(told["known"]), source="of the job"),
            places=tuple(map(int, told["places"])),
        )


def address_of(value: Any) -> Address:
    """Return an address that JSON said."""
    host, port = value
    return str(host), int(port)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Who of the larger job listens, and who is connected to all others; ranks are those of the larger job.

    >>> job = JobRecord.first(Topology.flat(1), machines=["a"], join_addresses=[("127.0.0.1", 1)])
    >>> attempt = Attempt(number=1, job=job)
    >>> attempt.listens(0, ["a", "127.0.0.1", 2])
    True
    >>> attempt.connected(0)
    True
    """

    number: int
    job: JobRecord
    num_newcomers: int = 1
    is_told: bool = False
    """Whether the members are about to hear of it, so that newcomers find them when they connect."""
    is_decided: bool = False
    """Whether the members may have switched: from then on it is not given up."""
    _listening: dict[int, list[Any]] = field(default_factory=dict)
    _connected: set[int] = field(default_factory=set)

    @property
    def is_connected(self) -> bool:
        """Whether all ranks are connected to one another."""
        return len(self._connected) == self.job.world_size

    def plan(self, rank: int) -> dict[str, Any]:
        """Return what a rank is told at first."""
        told = {"attempt": self.number, "rank": rank, "num_newcomers": self.num_newcomers}
        return told | {"job": self.job.to_json()}

    def listens(self, rank: int, member: list[Any]) -> bool:
        """Note where a rank listens (host, address and port); return whether it is the last one."""
        self._listening[rank] = member
        return len(self._listening) == self.job.world_size

    def generation(self) -> dict[str, Any]:
        """Return where all listen, as every rank is told then."""
        members = [self._listening[rank] for rank in range(self.job.world_size)]
        return {"epoch": secrets.randbits(64) or 1, "nonce": secrets.token_hex(NONCE_BYTES), "members": members}

    def connected(self, rank: int) -> bool:
        """Note that a rank is connected to all others; return whether all are."""
        self._connected.add(rank)
        return self.is_connected

    def describe_missing(self) -> str:
        """Say who has not done its part."""
        ranks = range(self.job.world_size)
        silent = [rank for rank in ranks if rank not in self._listening]
        if silent:
            return f"{name_ranks(silent)} of the larger job did not come"
        return f"{name_ranks([rank for rank in ranks if rank not in self._connected])} did not connect to all others"


def with_places(
    known: Topology, taken: Sequence[int], newcomers: Sequence[str], *, machines: Sequence[str]
) -> tuple[Topology, tuple[int, ...]]:
    """Return ``known``, larger where it must be, and a place in it for each of ``newcomers``, which are hosts' names.

    A job keeps the largest tree that it has known; each of its ranks has a *place* there, which is a rank of that tree.
    What is lost leaves its place free. A newcomer gets, in this order:

    - the lowest free place of the host that is called as its machine is;
    - where that host has no free place, a new one beside the host's last, with the same link;
    - where one machine stands for all hosts (all ranks run on it, and the tree does not know it), the lowest free
      place;
    - else a host of its own under the root, with the slowest uplink that is known there: each direction the slowest,
      and the longest latency. Where a host is the root, both come under a new switch, without rates.

    ``taken`` are the places of the job's ranks, and ``machines`` what their machines are called. Raises
    :class:`TopologyError` where a name may mean several hosts.

    >>> racks = syncline.Topology.load("two-racks-5-3")
    >>> larger, places = with_places(racks, [0, 1, 2], ["h4", "elsewhere"], machines=["h0", "h1", "h2"])
    >>> places, larger.host_of(places[1]).name
    ((4, 8), 'elsewhere')
    """
    used, places = set(taken), []
    is_one_machine = len({*machines, *newcomers}) == 1
    for name in newcomers:
        hosts = same_host(name, known.hosts)
        if len(hosts) > 1:
            raise TopologyError(
                f"A newcomer's host {name!r} may be {' or '.join(repr(host.name) for host in hosts)} of the topology; "
                "tell it which (SYNCLINE_HOST, or init(host=))"
            )
        free = _free(hosts or (known.hosts if is_one_machine else ()), used)
        place = min(free, default=known.num_ranks)
        if not free:
            known = _with_rank(known, hosts[0]) if hosts else _with_host(known, name)
        used.add(place)
        places.append(place)
    return known, tuple(places)


def _free(hosts: Iterable[Host], used: Collection[int]) -> list[int]:
    return [rank.rank for host in hosts for rank in host.ranks if rank.rank not in used]


def _with_rank(known: Topology, host: Host) -> Topology:
    last = host.ranks[-1]
    parent = known.parent_of(last.name)
    assert parent is not None, "a rank is below its host"
    new = replace(last, rank=known.num_ranks)
    larger = changed(known.root, lambda node: with_children(node, (*node.children, new)) if node is parent else node)
    return replace(known, root=larger)


def _with_host(known: Topology, name: str) -> Topology:
    names = {node.name for node in known.walk()}
    plain = plain_name(name)
    own = plain if plain and plain not in names else _free_name("h", names)
    root, rank = known.root, Rank(rank=known.num_ranks)
    if isinstance(root, Host):
        old = replace(root, link=Link.unlimited())
        hosts = (old, Host(name=own, link=Link.unlimited(), ranks=(rank,)))
        return replace(known, root=Switch(name=_free_name("switch-", {*names, own}), link=None, children=hosts))
    host = Host(name=own, link=_slowest([child.link for child in root.children if child.link]), ranks=(rank,))
    return replace(known, root=replace(root, children=(*root.children, host)))


def _slowest(links: Sequence[Link]) -> Link:
    return Link(
        up_bytes_per_s=min(link.up_bytes_per_s for link in links),
        down_bytes_per_s=min(link.down_bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
    )


def _free_name(stem: str, names: Collection[str]) -> str:
    return next(name for number in count() if (name := f"{stem}{number}") not in names)
