"""``syncline doctor --hosts``: which hosts can dial which, on the ports that a job is to use, and what to do.

Each host listens on them, and dials those of all others; it runs on every host at once, before a job. Whoever is
dialled answers with what it has found so far, and hears what the dialler has, so that a host knows in the end also what
others found, by whatever way there is. Two that cannot reach each other learn of one another from a third. Messages
bear a code of the job's secret, where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations

import psutil
from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape

from syncline.endpoints import PROBE_PORT, format_endpoint, parse_ports
from syncline.errors import ConfigurationError
from syncline.report.terminal import new_table
from syncline.topology.host_matching import expand_hostlist
from syncline.variables import process_variables

MAX_BYTES = 1 << 20
TRIES = 3
"""Of one port, once its host is known to be there."""
DIAL_S = 2.0
PAUSE_S = 0.3


class Outcome(StrEnum):
    """How a dial ended."""

    OPEN = "open"
    REFUSED = "refused"
    """The machine said that nobody listens, or a firewall said so for it."""
    SILENT = "silent"
    """Nothing came back in time."""
    OTHER = "other program"
    """Something accepted that does not speak as we do, or has another secret."""


Found = dict[int, dict[int, Outcome]]
"""By host and port, how one host's dials ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a host tells another: what it probes, and what it knows."""

    hosts: list[str]
    ports: list[int]
    own: int
    done: list[int]
    found: dict[int, Found]


_TOLD = TypeAdapter(_Told)


@dataclass(slots=True, kw_only=True)
class PortProbes:
    """What the hosts find of each other, as one of them knows it; ``own`` is its place among ``addresses``."""

    addresses: Sequence[str]
    own: int
    ports: Sequence[int]
    key: bytes = b""
    found: dict[int, Found] = field(default_factory=dict)
    """By the host that dialled."""
    taken: list[int] = field(default_factory=list)
    """Ports of this host that another program has."""
    _heard: set[int] = field(default_factory=set)
    """Hosts that have dialled or answered somebody."""
    _done: set[int] = field(default_factory=set)
    """Hosts that know all."""

    async def run(self, for_s: float) -> None:
        """Probe until all hosts know all of each other, or ``for_s`` have passed."""
        self.found[self.own] = {host: {} for host in self.others}
        servers = [await self._listen(port) for port in self.ports]
        try:
            await asyncio.wait_for(asyncio.gather(*map(self._probe, self.others)), for_s)
        except TimeoutError:
            pass  # what is not known by then is told as that
        finally:
            for server in filter(None, servers):
                server.close()

    @property
    def others(self) -> list[int]:
        """All hosts but this one."""
        return [host for host in range(len(self.addresses)) if host != self.own]

    def is_whole(self, host: int) -> bool:
        """Whether what ``host`` found is known, of all ports of all others."""
        row = self.found.get(host, {})
        return all(len(row.get(other, {})) == len(self.ports) for other in range(len(self.addresses)) if other != host)

    def opens(self, source: int, target: int) -> bool | None:
        """Whether all ports of ``target`` can be dialled from ``source``; None if that is not known."""
        outcomes = self.found.get(source, {}).get(target, {})
        if len(outcomes) < len(self.ports):
            return None
        return all(outcome is Outcome.OPEN for outcome in outcomes.values())

    async def _listen(self, port: int) -> asyncio.Server | None:
        address = self.addresses[self.own]
        try:
            return await asyncio.start_server(self._serve, address, port, limit=MAX_BYTES)
        except OSError as error:
            if port not in self.taken:
                self.taken.append(port)
            if len(self.taken) == len(self.ports):
                raise ConfigurationError(
                    f"cannot listen on {format_endpoint(address, port)}: {os.strerror(error.errno or 0)}; end what "
                    "listens there, or give other --ports"
                ) from error
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            async with asyncio.timeout(DIAL_S):
                self._hear(self._body(await reader.readline()))
                writer.write(self._message())
                await writer.drain()
                await reader.read(1)  # until the other end has it
        writer.close()

    async def _probe(self, host: int) -> None:
        """Dial all ports of a host until each is known, and then one that is open until all hosts know all."""
        outcomes = self.found[self.own][host]
        num_tries, is_open = 0, list[int]()
        while len(self._done) < len(self.addresses):
            unknown = [port for port in self.ports if port not in outcomes]
            is_open = [port for port in self.ports if outcomes.get(port) is Outcome.OPEN][:1]
            dialled = unknown or is_open
            ended = dict(zip(dialled, await asyncio.gather(*(self._dial(host, port) for port in dialled)), strict=True))
            num_tries = num_tries + 1 if host in self._heard else 0
            outcomes |= {port: how for port, how in ended.items() if how is Outcome.OPEN or num_tries >= TRIES}
            if all(self.is_whole(each) for each in range(len(self.addresses))):
                self._done.add(self.own)
            await asyncio.sleep(PAUSE_S)
        for port in is_open:  # who cannot dial this host has no other way to hear that all know all
            await self._dial(host, port)
        await asyncio.sleep(2 * PAUSE_S)  # for those that do not know yet that all do

    async def _dial(self, host: int, port: int) -> Outcome:
        try:
            async with asyncio.timeout(DIAL_S):
                reader, writer = await asyncio.open_connection(self.addresses[host], port, limit=MAX_BYTES)
        except ConnectionRefusedError:
            return Outcome.REFUSED
        except OSError:  # TimeoutError is one
            return Outcome.SILENT
        try:
            async with asyncio.timeout(DIAL_S):
                writer.write(self._message())
                self._hear(self._body(await reader.readline()))
        except (ValueError, EOFError, OSError):
            return Outcome.OTHER
        finally:
            writer.close()
        return Outcome.OPEN

    # --- messages ---

    def _message(self) -> bytes:
        body = _TOLD.dump_json(
            _Told(
                hosts=list(self.addresses),
                ports=list(self.ports),
                own=self.own,
                done=sorted(self._done),
                found=self.found,
            )
        )
        return self._code(body) + b" " + body + b"\n"

    def _code(self, body: bytes) -> bytes:
        return hmac.digest(b"syncline port probes 2\0" + self.key, body, "sha256").hex().encode()

    def _body(self, message: bytes) -> bytes:
        code, _, body = message.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(code, self._code(body)):
            raise ValueError("no probe, or with another secret")
        return body

    def _hear(self, body: bytes) -> None:
        """Take over what another host has found; ValueError if it probes something else."""
        told = _TOLD.validate_json(body)
        if (told.hosts, told.ports) != (list(self.addresses), list(self.ports)):
            raise ValueError("other hosts or ports")
        if told.own not in self.others:
            raise ValueError("no host of these")
        self._heard |= {told.own, *(source for source, row in told.found.items() if any(row.values()))}
        self._done |= set(told.done)
        for source, row in told.found.items():
            if source not in self.others:
                continue
            for other, ended in row.items():
                self.found.setdefault(source, {}).setdefault(other, {}).update(ended)


MAX_HOSTS, MAX_PORTS = 256, 1024


def show_ports(hosts: str, ports: str | None, *, for_s: float, as_json: bool, key: bytes) -> int:
    """Probe, print who can dial whom, and return the exit code: 1 if two hosts could not meet at all."""
    names = expand_hostlist(hosts)
    first, last = parse_ports(ports or process_variables().get("SYNCLINE_PORTS", "")) or (PROBE_PORT, PROBE_PORT)
    if not 2 <= len(names) <= MAX_HOSTS or last - first >= MAX_PORTS:
        raise ConfigurationError(
            f"--hosts names 2 to {MAX_HOSTS} hosts and --ports at most {MAX_PORTS} ports, not {len(names)} and "
            f"{last - first + 1}"
        )
    addresses = [_resolve(name) for name in names]
    probes = PortProbes(addresses=addresses, own=_own_place(names, addresses), ports=range(first, last + 1), key=key)
    if not as_json:
        where = f"port {first}" if first == last else f"ports {first} to {last}"
        print(f"{names[probes.own]}: probing {where} of {len(names)} hosts for up to {for_s:g} s", flush=True)
    asyncio.run(probes.run(for_s))
    lines, can_meet = judge(probes, names)
    if as_json:
        found = {
            names[source]: {
                names[target]: {str(port): outcome.value for port, outcome in sorted(ended.items())}
                for target, ended in sorted(row.items())
            }
            for source, row in sorted(probes.found.items())
        }
        print(json.dumps({"found": found, "taken": probes.taken, "says": lines, "can_meet": can_meet}, indent=2))
    else:
        _print_table(probes, names)
        for line in lines:
            Console(highlight=False).print(escape(line), soft_wrap=True)
    return 0 if can_meet else 1


def judge(probes: PortProbes, names: Sequence[str]) -> tuple[list[str], bool]:
    """Say what the outcomes mean, and whether all hosts could meet, as far as is known here."""
    lines: list[str] = []
    hosts = range(len(names))
    absent = [host for host in hosts if host != probes.own and not probes.is_whole(host)]
    if absent:
        lines.append(
            f"Nothing, or not all, was heard of what {_list(names, absent)} found: run this command on all hosts at "
            "once, with the same --hosts, --ports and secret."
        )
    if probes.taken:
        lines.append(f"Other programs listen on {', '.join(map(str, probes.taken))} of this host.")
    hidden = [host for host in hosts if any(probes.opens(other, host) is False for other in hosts if other != host)]
    lines += [
        f"{names[host]} cannot be dialled {_by_whom(probes, names, host)}: let these ports through to it, or start its "
        "ranks with SYNCLINE_ADVERTISE=none, and they dial."
        for host in hidden
    ]
    can_meet = True
    for one, other in combinations(hidden, 2):
        thirds = [
            third for third in hosts if third not in hidden and probes.opens(one, third) and probes.opens(other, third)
        ]
        if thirds:
            lines.append(f"{names[one]} and {names[other]} would meet at {names[thirds[0]]}, which passes all on.")
        else:
            can_meet = False
            lines.append(f"{names[one]} and {names[other]} could not meet: there is no host that both can dial.")
    for host in hidden:
        for other in (each for each in hosts if each not in hidden):
            if probes.opens(host, other) is False:
                can_meet = False
                lines.append(f"{names[host]} and {names[other]} could not meet: neither can dial the other.")
    if not lines:
        lines.append("Every host can dial every other on these ports.")
    public = [host for host in hosts if ipaddress.ip_address(probes.addresses[host]).is_global]
    if public:
        lines.append(
            f"{_list(names, public)}: a public address. What ranks send is not encrypted; put them into a tunnel, as "
            "WireGuard (docs/guide/home.md)."
        )
    return lines, can_meet and not absent


def _by_whom(probes: PortProbes, names: Sequence[str], host: int) -> str:
    ways = []
    for other in range(len(names)):
        if other == host or probes.opens(other, host) is not False:
            continue
        failed = {port: how for port, how in probes.found[other][host].items() if how is not Outcome.OPEN}
        what = "" if len(failed) == len(probes.ports) else f" on {', '.join(map(str, sorted(failed)))}"
        ways.append(f"from {names[other]}{what} ({', '.join(sorted({how.value for how in failed.values()}))})")
    return ", ".join(ways)


def _print_table(probes: PortProbes, names: Sequence[str]) -> None:
    headings = ("from", *map(escape, names))
    table = new_table(*headings, num_texts=len(headings), title="who can dial whom", pad_edge=True)
    texts = {True: "[green]open[/]", False: "[red]closed[/]", None: "[yellow]?[/]"}
    for source, name in enumerate(names):
        cells = ["-" if source == target else texts[probes.opens(source, target)] for target in range(len(names))]
        table.add_row(escape(name), *cells)
    Console().print(table)


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"--hosts: {name!r} cannot be resolved ({error}); give names that every host knows, or addresses"
        ) from error


def _own_place(names: Sequence[str], addresses: Sequence[str]) -> int:
    """Return which of the hosts this machine is; its own name may mean loopback here, where no other host comes."""
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    near = {address for address in addresses if ipaddress.ip_address(address).is_loopback}
    if len(near) < len(set(addresses)):
        own -= near
    for place, address in enumerate(addresses):
        if address in own:
            return place
    raise ConfigurationError(
        f"--hosts: none of {', '.join(names)} is an address of this machine that others reach; give the addresses of "
        "all hosts in place of names"
    )


def _list(names: Sequence[str], hosts: Sequence[int]) -> str:
    return ", ".join(names[host] for host in hosts)
