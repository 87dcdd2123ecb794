"""What the environment says about this process: the variables of launchers and Syncline's own, checked once."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.endpoints import MAX_PORT, without_brackets
from syncline.errors import ConfigurationError
from syncline.pytorch.launchers import find_place, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Place of this process in its job. Arguments of ``init()`` go before what stands here."""

    rank: int
    world_size: int
    master_address: str | None
    master_port: int | None
    uses_agent_store: bool
    """Whether torchrun's agent serves the store already."""
    job_id: str
    topology: str | None
    interface: str | None
    """Address or name of the interface that other ranks reach."""
    secret: bytes | None
    trace: Path | None
    binds_thread: bool
    """Whether the communication thread may be bound to cores."""
    uses_shared_memory: bool
    """Whether small calls may be made in memory that the ranks of one machine share, if all want it."""
    authenticates_frames: bool
    """Whether every frame carries a code that only who knows the secret can make."""


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read and check the variables; :class:`ConfigurationError` names the one that is wrong."""
    values = os.environ if variables is None else variables
    place = find_place(values)
    port = values.get("MASTER_PORT")
    if place.world_size > 1 and not (values.get("MASTER_ADDR") and port):
        raise ConfigurationError(
            f"{place.source} is {place.world_size}, but MASTER_ADDR or MASTER_PORT is not set; set both, alike for all "
            "ranks, to the host of rank 0 and a free port there, or use `syncline run`"
        )
    master_port = whole_number(values, "MASTER_PORT", 0) if port else None
    if place.world_size > 1 and master_port is not None and not 0 < master_port <= MAX_PORT:
        raise ConfigurationError(f"MASTER_PORT must be from 1 to {MAX_PORT}, not {master_port}")
    trace = values.get("SYNCLINE_TRACE")
    return Environment(
        rank=place.rank,
        world_size=place.world_size,
        master_address=without_brackets(values.get("MASTER_ADDR", "")) or None,
        master_port=master_port,
        uses_agent_store=values.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        job_id=values.get("TORCHELASTIC_RUN_ID") or "syncline",
        topology=values.get("SYNCLINE_TOPOLOGY") or None,
        interface=values.get("SYNCLINE_INTERFACE") or None,
        secret=read_secret(values),
        trace=Path(trace) if trace else None,
        binds_thread=_switch(values, "SYNCLINE_BIND_THREAD"),
        uses_shared_memory=_switch(values, "SYNCLINE_BOARD"),
        authenticates_frames=_switch(values, "SYNCLINE_AUTHENTICATE_FRAMES", "off"),
    )


def own_address(master_address: str | None) -> str | None:
    """Return the address from which this machine reaches rank 0's; None if that is this machine's IPv4 loopback."""
    if master_address is None:
        return None
    try:
        found = socket.getaddrinfo(master_address, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigurationError(
            f"MASTER_ADDR {master_address!r} cannot be resolved ({error}); give rank 0's host name or address"
        ) from error
    family, kind, protocol, _, address = found
    master = ipaddress.ip_address(str(address[0]))
    if master.is_loopback:
        return str(master) if master.version == 6 else None
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(address)  # a datagram socket sends nothing here; it only learns its route
        except OSError as error:
            raise ConfigurationError(
                f"There is no route to MASTER_ADDR {master_address!r} ({error}); set SYNCLINE_INTERFACE to the address "
                "that the other ranks reach"
            ) from error
        return str(probe.getsockname()[0])


def _switch(values: Mapping[str, str], name: str, default: str = "on") -> bool:
    text = values.get(name) or default
    if text not in ("on", "off"):
        raise ConfigurationError(f"{name} must be on or off, not {text!r}")
    return text == "on"


def read_secret(values: Mapping[str, str]) -> bytes | None:
    """Return the job's secret: that of its file, else the variable itself."""
    named = values.get("SYNCLINE_SECRET_FILE")
    if named:
        return read_secret_file(named, who="SYNCLINE_SECRET_FILE")
    text = values.get("SYNCLINE_SECRET")
    return text.strip().encode() if text else None


def read_secret_file(path: str | Path, *, who: str) -> bytes:
    """Return the secret in a file; :class:`ConfigurationError`, which begins with ``who``, if others may read it."""
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(64 << 10).strip()
    except OSError as error:
        raise ConfigurationError(f"{who} '{path}' cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"{who} '{path}' may be read by others (mode {stat.S_IMODE(mode):04o}); run chmod 600 on it"
        )
    return secret
