"""What one launcher starts: which ranks, where they meet, and with what command.

Which host am I? The first of these that applies:

1. ``--host NAME``;
2. the environment variable ``SYNCLINE_HOST`` (the lab sets it);
3. this machine's own name, where the topology has a host of that name;
4. none: every rank of the topology starts here, so that one machine stands for all its hosts.

``LOCAL_RANK`` and ``GROUP_RANK`` describe machines, as torchrun has it (``LOCAL_RANK`` picks a GPU); ``SYNCLINE_HOST``
names the topology's host. They differ in case 4 alone.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from syncline.endpoints import DEFAULT_MASTER_PORT, LOOPBACK, format_endpoint, is_ipv6, parse_endpoint, without_brackets
from syncline.errors import ConfigurationError
from syncline.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One process to start."""

    rank: int
    local_rank: int
    """Its place among the ranks that this launcher starts."""
    host: str

    @property
    def name(self) -> str:
        """``"rank 3 (host b1)"``."""
        return f"rank {self.rank} (host {self.host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that one launcher needs to know before it starts a process."""

    command: tuple[str, ...]
    processes: tuple[RankProcess, ...]
    world_size: int
    machine_index: int
    """Which of the job's launchers this is."""
    num_machines: int
    master_address: str
    master_port: int
    topology: str | None
    """Path or shipped name, as the ranks are told; None: one flat switch."""
    join: str | None = None
    """Where members of a running job listen, which these ranks join: of several, the first that answers."""

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the job start here."""
        return len(self.processes) == self.world_size and self.join is None


def choose_host(
    topology: Topology, *, asked: str | None, environment: Mapping[str, str], machine: str | None = None
) -> str | None:
    """Find the host whose ranks start here, or None for all of them; the rule stands above."""
    names = [host.name for host in topology.hosts]
    wanted, who = (asked, "--host") if asked else (environment.get("SYNCLINE_HOST"), "SYNCLINE_HOST")
    if wanted:
        if wanted not in names:
            raise ConfigurationError(
                f"{who} must name a host of topology '{topology.name}', got '{wanted}'; "
                f"its hosts are {', '.join(names)}"
            )
        return wanted
    machine = (machine or socket.gethostname()).split(".")[0]
    return machine if machine in names else None


def place_ranks(topology: Topology, host: str | None) -> tuple[RankProcess, ...]:
    """List the ranks of ``host``, or of all hosts, in rank order."""
    ranks = range(topology.num_ranks) if host is None else topology.ranks_of(host)
    return tuple(
        RankProcess(rank=rank, local_rank=local_rank, host=topology.host_of(rank).name)
        for local_rank, rank in enumerate(ranks)
    )


def build_job(
    topology: Topology,
    *,
    command: tuple[str, ...],
    host: str | None,
    master: tuple[str, int],
    named_as: str | None,
) -> Job:
    """Put the parts together; ``host`` comes from :func:`choose_host`, ``named_as`` is what the ranks will load."""
    names = [each.name for each in topology.hosts]
    return Job(
        command=command,
        processes=place_ranks(topology, host),
        world_size=topology.num_ranks,
        machine_index=0 if host is None else names.index(host),
        num_machines=1 if host is None else len(names),
        master_address=master[0],
        master_port=master[1],
        topology=named_as,
    )


def newcomers(number: int, *, command: tuple[str, ...], join: str, host: str | None, topology: str | None) -> Job:
    """Describe ranks that join a running job at ``join``; they are numbered from 0 as long as they have no rank."""
    doors = [parse_endpoint(one.strip(), default_port=DEFAULT_MASTER_PORT, what="--join") for one in join.split(",")]
    processes = (RankProcess(rank=place, local_rank=place, host=host or "") for place in range(number))
    return Job(
        command=command,
        processes=tuple(processes),
        world_size=number,
        machine_index=0,
        num_machines=1,
        master_address=doors[0][0],
        master_port=doors[0][1],
        topology=topology,
        join=",".join(format_endpoint(*door) for door in doors),
    )


def parse_master(text: str) -> tuple[str, int]:
    """Read ``"a1:29500"`` or ``"a1"``; an IPv6 address with a port stands in brackets."""
    return parse_endpoint(text, default_port=DEFAULT_MASTER_PORT, what="--master")


def choose_master(
    *, asked: str | None, environment: Mapping[str, str], is_whole: bool, free_port: int, host: str | None
) -> tuple[str, int]:
    """Say where rank 0 listens: ``--master``; else here, if all ranks are here; else MASTER_ADDR."""
    if asked:
        return parse_master(asked)
    if is_whole:
        return LOOPBACK, free_port
    address = environment.get("MASTER_ADDR")
    if not address:
        raise ConfigurationError(
            f"host '{host}' starts only some of the job's ranks, so they must be told where rank 0 listens; "
            "add --master HOST:PORT (the same on every host), or set MASTER_ADDR and MASTER_PORT"
        )
    bare = without_brackets(address)
    port = environment.get("MASTER_PORT", str(DEFAULT_MASTER_PORT))
    return parse_master(f"[{bare}]:{port}" if is_ipv6(bare) else f"{bare}:{port}")
