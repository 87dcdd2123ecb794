"""``syncline doctor --hosts``: which hosts can dial which, on the ports that a job is to use, and what to do."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Sequence
from itertools import combinations

import psutil
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from syncline.endpoints import PROBE_PORT, parse_ports
from syncline.errors import ConfigurationError
from syncline.fabric.port_probes import Outcome, PortProbes
from syncline.topology.hostlist import expand_hostlist
from syncline.variables import process_variables

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
    table = Table(title="who can dial whom", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("from", *names):
        table.add_column(escape(heading))
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
    """Return which of the hosts this machine is."""
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    for place, address in enumerate(addresses):
        if address in own:
            return place
    raise ConfigurationError(
        f"--hosts: none of {', '.join(names)} is an address of this machine; give the addresses that the others reach"
    )


def _list(names: Sequence[str], hosts: Sequence[int]) -> str:
    return ", ".join(names[host] for host in hosts)
