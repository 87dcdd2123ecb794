"""How this process joins its job: the arguments of ``init()``, else the variables of launchers and Syncline's own.

Everything is checked once, here. An argument that is given goes before its variable (:mod:`syncline.variables`).

A process group that exists before ``init()`` counts where launchers say nothing: Ray has made one when user code
begins, and so have many scripts. Its ranks and its store are those of the job, and it has been proved by meeting once.
Where launchers say something else, or the caller does, two parts of one process would train as different ranks.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed as dist

from syncline.arguments import Seconds, check_fields
from syncline.endpoints import DEFAULT_MASTER_PORT, MAX_PORT, parse_endpoint, parse_ports, without_brackets
from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.fabric.options import NOWHERE
from syncline.observe import Trace
from syncline.pytorch.launchers import Place, find_place
from syncline.pytorch.notices import OnPreemption
from syncline.pytorch.secret import read_secret
from syncline.runtime.communicator import DEFAULT_TIMEOUT_S
from syncline.topology import Topology
from syncline.updates.private_torch import default_store
from syncline.variables import behind_limit_s, live_place, process_variables, switch, whole_number

FLAT = "flat"
"""In place of a topology: one switch for all hosts, of which nothing is known."""
MEASURE = "measure"
"""In place of a topology: measured, whatever was measured before."""
UNWRITTEN = (None, FLAT, MEASURE)
DEFAULTS_S = {"connect_timeout_s": 60.0, "silence_s": 10.0, "timeout_s": DEFAULT_TIMEOUT_S}
MIN_SILENCE_S = 1.0
HEARTBEAT_S = 1.0
HANDSHAKE_S = 5.0
WITHOUT_VARIABLE = frozenset({"rank", "world_size", "master", "job_id", "insecure", "secret"})
"""Arguments that have no variable named as they are, but one of launchers, none, or also one of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Settings of ``init_process_group("syncline", pg_options=...)``, named and meant as those of :func:`init`.

    What is None is read from its variable (``SYNCLINE_TOPOLOGY``, ``SYNCLINE_SECRET_FILE`` ...), else it is the
    default. The ranks' places and the timeout are what ``torch.distributed`` was told.

    >>> syncline.BackendOptions(silence_s=30.0).silence_s  # seconds
    30.0
    """

    topology: str | Path | Topology | None = None
    """A file, the name of a shipped topology, a :class:`Topology`, "flat", "measure", or "auto", if nobody says; as
    with :func:`init`."""
    host: str | None = None
    """The name of this rank's host in the topology; the launcher's or the machine's if nobody says."""
    job_id: str | None = None
    """Ranks of another job are refused."""
    secret: bytes | str | None = None
    """At least 32 bytes that all ranks share; without one only loopback is used, unless ``insecure``."""
    insecure: bool = False
    """Use other addresses than loopback without a secret. Whoever reaches the port can then join the job."""
    authenticate_frames: bool | None = None
    """Let every frame carry a code keyed by the secret; where ranks are on several machines, if nobody says."""
    interface: str | None = None
    """The address, or the interface's name, that the other ranks reach; "none" has ranks of its host lend theirs."""
    ports: str | None = None
    """On which ports this rank may listen, as ``"29600-29631"``; any, if nobody says."""
    advertise: str | None = None
    """Where the others reach this rank, ``"address[:port]"``, if not where it listens."""
    connect_timeout_s: Seconds | None = None
    """How long a new group waits for its ranks to connect, in seconds."""
    silence_s: Seconds | None = None
    """From when on a rank without a sign of life is lost, in seconds."""
    stall_s: Seconds | None = None
    """From when on a rank that lives, but makes no call, is not waited for any more; default: the group's timeout."""
    trace: str | Path | Trace | None = None
    """The file of this rank's trace, or a folder that takes all ranks'."""
    shared_memory: bool | None = None
    """Whether small synchronous calls may go through memory that the ranks of one machine share."""
    bind_thread: bool | None = None
    """Whether the communication thread may be bound to cores."""
    congestion: str | None = None
    """TCP's congestion control, as ``"bbr"``; cubic where the topology has rates, if nobody says."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(BackendOptions):
    """What ``init()`` was given; what is None is read from its variable."""

    rank: int | None = None
    world_size: int | None = None
    master: str | None = None
    timeout_s: float | None = None
    join: str | None = None
    join_port: int | None = None
    on_preemption: OnPreemption | None = None
    replan: bool | None = None

    @classmethod
    def of_group(cls, options: BackendOptions, **place: Any) -> Arguments:
        """Return the options of a process group, with what ``torch.distributed`` was told beside them."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(options)}, **place)


class Environment(NamedTuple):
    """Place of this process in its job, and how it takes part: every setting, chosen once."""

    rank: int
    world_size: int
    master_address: str | None
    master_port: int | None
    uses_agent_store: bool
    """Whether torchrun's agent serves the store already."""
    topology: str | Path | Topology | None
    """A file or name of one, "flat", "measure", or None: what was measured, if it still holds, or is measured now."""
    interface: str | None
    """Address or name of the interface that other ranks reach."""
    host: str
    """What this rank calls its host: the topology is matched by it."""
    trace: Path | Trace | None
    uses_shared_memory: bool
    """Whether small calls may be made in memory that the ranks of one machine share, if all want it."""
    join: tuple[tuple[str, int], ...]
    """Where members of the running job listen that this process is to come into; empty: it is there at the start."""
    join_port: int | None
    """Where this rank listens for newcomers; 0 is a free port, and None one that is opened when it is needed."""
    on_preemption: OnPreemption | None
    """What to do when this process is told that it is to end; None leaves its signals alone."""
    replan: bool | None
    """Whether training plans again where links' rates change; None leaves it to how the topology was found."""
    fabric: FabricOptions
    """How its fabric behaves; of an address only from :func:`~syncline.pytorch.connecting.with_address` on."""

    @property
    def timeout_s(self) -> float:
        """How long a collective may take, for which a foreign call may hold the interpreter's lock as well."""
        return self.fabric.held_s


def read_environment(
    variables: Mapping[str, str] | None = None,
    given: Arguments | None = None,
    *,
    group: Place | None = None,
    has_store: bool = False,
) -> Environment:
    """Choose and check every setting; :class:`ConfigurationError` names the argument or variable that is wrong.

    ``group``: the process group that exists already, whose ranks and store are those of the job. With ``has_store`` the
    ranks meet in a store that they have already, and no master is asked for.
    """
    values = process_variables() if variables is None else variables
    said = given or Arguments()
    chosen = choose_settings(values, said)
    join = _choose_join(chosen, said, group)
    place = Place(rank=0, world_size=1, source="join") if join else _choose_place(values, said, group)
    address, port = (None, None) if has_store or join else _choose_master(values, chosen, place, group)
    # the variable tells of the job at its start, and a newcomer's job knows its tree by itself
    topology, trace = said.topology if join else chosen["topology"], chosen["trace"]
    if chosen["on_preemption"] not in (None, "leave", "checkpoint"):
        raise ConfigurationError(f"on_preemption must be 'leave' or 'checkpoint', not {chosen['on_preemption']!r}")
    for check in (behind_limit_s, live_place):  # which are read once all ranks are connected: too late for an error
        check(values)
    return Environment(
        rank=place.rank,
        world_size=place.world_size,
        master_address=address,
        master_port=port,
        uses_agent_store=not said.master and values.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        topology=None if topology == "auto" else topology,
        interface=chosen["interface"],
        host=chosen["host"] or place.host or socket.gethostname(),
        trace=trace if trace is None or isinstance(trace, Trace) else Path(trace),
        uses_shared_memory=_switch(chosen, "shared_memory") is not False,
        join=join,
        join_port=_choose_join_port(values, chosen),
        on_preemption=chosen["on_preemption"],
        replan=_switch(chosen, "replan"),
        fabric=_choose_fabric(values, chosen),
    )


def choose_settings(values: Mapping[str, str], said: Arguments) -> dict[str, Any]:
    """Return by its argument's name what was given, else the text of its variable of ours, else None."""
    given = {field.name: getattr(said, field.name) for field in fields(said)}
    asked = [name for name in given.keys() - WITHOUT_VARIABLE if given[name] in (None, "")]
    return given | {name: values.get(variable_of(name)) or None for name in asked}


def variable_of(name: str) -> str:
    """Return the variable of ours that an argument goes before."""
    return f"SYNCLINE_{name.removesuffix('_s').upper()}"


def _choose_place(values: Mapping[str, str], said: Arguments, group: Place | None) -> Place:
    rank, world_size = said.rank, said.world_size
    if group is not None:
        check_same(group, values, rank=rank, world_size=world_size)
        return group
    if rank is None and world_size is None:
        return find_place(values)
    if rank is None or world_size is None:
        raise ConfigurationError(
            f"init() was given rank={rank} and world_size={world_size}; give both, or neither and let the launcher say"
        )
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank must be from 0 to world_size - 1, but they are {rank} and {world_size}")
    return Place(rank=rank, world_size=world_size, source="world_size")


def _choose_master(
    values: Mapping[str, str], chosen: Mapping[str, Any], place: Place, group: Place | None
) -> tuple[str | None, int | None]:
    """Return where rank 0 serves the store; a job of one rank need not say, nor one whose process group has a store."""
    if master := chosen["master"]:
        return parse_endpoint(master, default_port=DEFAULT_MASTER_PORT, what="master")
    if group is not None:
        return group.master_address or without_brackets(values.get("MASTER_ADDR", "")) or None, None
    address = without_brackets(values.get("MASTER_ADDR", "")) or place.master_address
    ports = parse_ports(chosen["ports"] or "")
    port = whole_number(values, "MASTER_PORT", ports[0] if ports and place.master_port else place.master_port or 0)
    if place.world_size > 1 and not (address and (port or values.get("MASTER_PORT"))):
        raise ConfigurationError(
            f"{place.source} is {place.world_size}, but MASTER_ADDR or MASTER_PORT is not set; {place.remedy}"
        )
    if place.world_size > 1 and not 0 < port <= MAX_PORT:
        raise ConfigurationError(f"MASTER_PORT must be from 1 to {MAX_PORT}, not {port}")
    return address, port or None


def _choose_join(chosen: Mapping[str, Any], said: Arguments, group: Place | None) -> tuple[tuple[str, int], ...]:
    """Return the members to ask; a newcomer has no rank yet, whatever a launcher says."""
    has_place = group is not None or said.rank is not None or said.world_size is not None
    text = said.join if has_place else chosen["join"]
    if not text:
        return ()
    if has_place:
        raise ConfigurationError(
            f"join={text!r} comes into a job that runs, which gives this process its rank: leave out rank and "
            "world_size, and make no process group"
        )
    return tuple(parse_endpoint(each.strip(), default_port=0, what="join") for each in text.split(","))


def _choose_join_port(values: Mapping[str, str], chosen: Mapping[str, Any]) -> int | None:
    port: int | str | None = chosen["join_port"]
    if isinstance(port, str):
        port = whole_number(values, "SYNCLINE_JOIN_PORT", 0)
    if port is not None and not 0 <= port <= MAX_PORT:
        raise ConfigurationError(f"join_port must be from 0 to {MAX_PORT}, not {port}")
    return port


def _choose_fabric(values: Mapping[str, str], chosen: Mapping[str, Any]) -> FabricOptions:
    secret = chosen["secret"]
    options = FabricOptions(
        job_id=chosen["job_id"] or values.get("TORCHELASTIC_RUN_ID") or "syncline",
        secret=read_secret(values) if not secret else secret.encode() if isinstance(secret, str) else secret,
        insecure=chosen["insecure"],
        authenticate_frames=_switch(chosen, "authenticate_frames"),
        binds_thread=_switch(chosen, "bind_thread") is not False,
        congestion=chosen["congestion"],
        ports=parse_ports(chosen["ports"] or ""),
        advertised=_choose_advertised(chosen["advertise"]),
    )
    return with_times(options, **choose_times(chosen))


def _choose_advertised(text: str | None) -> tuple[str, int] | None:
    if text == "none":
        return NOWHERE
    if text is None or ":" not in text:
        return None if text is None else (text, 0)
    return parse_endpoint(text, default_port=0, what="advertise")


def _switch(chosen: Mapping[str, Any], name: str) -> bool | None:
    value = chosen[name]
    return switch(variable_of(name), value) if isinstance(value, str) else value


def choose_times(chosen: Mapping[str, Any]) -> dict[str, float]:
    """Return the four of :func:`with_times`; where nobody says, the default, which of ``stall_s`` is ``timeout_s``."""
    times = {name: _choose_seconds(chosen, name, default) for name, default in DEFAULTS_S.items()}
    if times["silence_s"] < MIN_SILENCE_S:
        raise ConfigurationError(
            f"silence_s must be at least {MIN_SILENCE_S:g} s, not {times['silence_s']:g} s: a busy machine is silent "
            "for as long"
        )
    return times | {"stall_s": _choose_seconds(chosen, "stall_s", times["timeout_s"])}


def with_times(
    options: FabricOptions, *, connect_timeout_s: float, silence_s: float, timeout_s: float, stall_s: float
) -> FabricOptions:
    """Return ``options`` with all times that follow from those of a user; every rank of a job is given the same.

    ``connect_timeout_s``: from ``init()`` until all ranks are connected. ``silence_s``: from when on a rank of which
    nothing is heard, not even a heartbeat, is lost. ``timeout_s``: how long a collective may take. ``stall_s``: from
    when on a rank that lives, and for which others wait, has hung.
    """
    return replace(
        options,
        heartbeat_s=min(HEARTBEAT_S, silence_s / 10),
        suspect_s=0.3 * silence_s,
        dead_s=silence_s,
        stall_s=stall_s,
        held_s=timeout_s,
        handshake_s=min(HANDSHAKE_S, connect_timeout_s),
        connect_s=connect_timeout_s,
    )


def _choose_seconds(chosen: Mapping[str, Any], name: str, default: float) -> float:
    value = chosen[name]
    try:
        seconds = default if value is None else float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        who = variable_of(name) if isinstance(value, str) else name
        raise ConfigurationError(f"{who} must be a positive number of seconds, not {value!r}")
    return seconds


def find_group() -> Place | None:
    """Return the place in the default process group, whose master serves its store; None if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return Place(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        source="the process group's size",
        master_address=address_of(default_store()),
    )


def check_same(group: Place, values: Mapping[str, str], *, rank: int | None, world_size: int | None) -> None:
    """Raise :class:`ConfigurationError` if the arguments, or else RANK and WORLD_SIZE, are not those of the group.

    Slurm's and MPI's variables are not compared: what starts Ray leaves them to all that Ray starts.
    """
    pairs = (
        ("rank", "RANK", rank, group.rank),
        ("world_size", "WORLD_SIZE", world_size, group.world_size),
    )
    for argument, variable, given, of_group in pairs:
        said = f"init({argument}={given})" if given is not None else f"{variable}={values.get(variable)}"
        found = str(given) if given is not None else values.get(variable) or str(of_group)
        if found.strip() != str(of_group):
            raise ConfigurationError(
                f"{said}, but this process is rank {group.rank} of {group.world_size} in the process group of "
                "torch.distributed that exists already; leave the argument or the variable out, or call "
                "torch.distributed.destroy_process_group() before syncline.init()"
            )


def address_of(store: Any) -> str | None:
    """Return the host that serves a store of torch; None of a file, or of one in memory."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
