"""The lab that jobs run in, and what can be done to its links, routes and connections, and undone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from syncline.lab import Lab
from syncline.lab.plan import LabLink
from syncline.lab.programs import run_program
from syncline.topology import Topology

MAX_RANKS = 8
RATE = "1 Gbit/s"
SLOW_RATE = "2mbit"


def host_of(rank: int, world_size: int) -> str:
    """Return the host of a rank: the first half of a job is in the first rack."""
    half = (world_size + 1) // 2
    return f"a{rank}" if rank < half else f"b{rank - half}"


def topology_text(world_size: int) -> str:
    """Return the topology of a job: two racks, a host for each rank."""
    half = (world_size + 1) // 2
    racks = (("rack-a", f"a[0-{half - 1}]"), ("rack-b", f"b[0-{world_size - half - 1}]"))
    lines = [
        f"  - {{switch: {rack}, uplink: {RATE}, children: [{{host: '{hosts}', uplink: {RATE}}}]}}\n"
        for rack, hosts in racks
    ]
    return f"topology: soak-{world_size}\nswitch: core\nchildren:\n{''.join(lines)}"


class SoakNetwork:
    """A lab of as many hosts as a job may have ranks."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._links = {link.child: link for link in lab.plan.links}

    def address(self, host: str) -> str:
        """Return a host's address."""
        return self.lab.plan.host(host).address

    def namespace(self, host: str) -> str:
        """Return a host's namespace."""
        return self.lab.plan.host(host).namespace

    def cut(self, node: str) -> None:
        """Pull the cable of a host or a rack."""
        self._set_upper(node, "down")

    def mend(self, node: str) -> None:
        """Put the cable back."""
        self._set_upper(node, "up")

    def hide(self, host: str, other: str) -> None:
        """Let what ``host`` sends to ``other`` vanish; what comes from there still arrives."""
        run_program("ip", "-n", self.namespace(host), "neigh", "replace", self.address(other), *self._to("nobody"))

    def show(self, host: str, other: str) -> None:
        """Let it arrive again."""
        run_program("ip", "-n", self.namespace(host), "neigh", "replace", self.address(other), *self._to(other))

    def slow_down(self, host: str) -> None:
        """Give both directions of a host's link a small part of their rate."""
        self._set_rate(self._links[host], SLOW_RATE)

    def speed_up(self, host: str) -> None:
        """Give them their rate again."""
        self._set_rate(self._links[host], RATE.replace(" Gbit/s", "gbit"))

    def reset(self, host: str, other: str) -> int:
        """Reset the connections between two hosts, as a firewall might that has forgotten them; return how many."""
        shown = run_program(
            "ip", "netns", "exec", self.namespace(host), *f"ss -K -Htn dst {self.address(other)}".split()
        )
        return len(shown.splitlines())

    def connections(self) -> list[str]:
        """Return the TCP sockets of all hosts that are not over: left behind, where no process runs."""
        states = (
            "exclude time-wait exclude close exclude fin-wait-2 exclude fin-wait-1 exclude last-ack exclude closing"
        )
        command = f"ss -Htna {states}"
        found = []
        for host in self.lab.plan.hosts:
            found += run_program("ip", "netns", "exec", host.namespace, *command.split()).splitlines()
        return found

    def listeners(self, host: str) -> list[tuple[str, int]]:
        """Return where anybody listens on a host."""
        shown = run_program("ip", "netns", "exec", self.namespace(host), *["ss", "-Htnl"])
        places = re.findall(r"^\S+\s+\d+\s+\d+\s+(\d+\.\d+\.\d+\.\d+):(\d+)", shown, re.MULTILINE)
        return [(address, int(port)) for address, port in places]

    def _set_upper(self, node: str, state: str) -> None:
        link = self._links[node]
        run_program("ip", "-n", self.lab.plan.switch_namespace, "link", "set", "dev", link.upper_interface, state)

    def _set_rate(self, link: LabLink, rate: str) -> None:
        ends = ((link.lower_namespace, link.lower_interface), (self.lab.plan.switch_namespace, link.upper_interface))
        for namespace, interface in ends:
            change = f"class change dev {interface} parent 1: classid 1:1 htb rate {rate} ceil {rate}"
            leaf = f"class change dev {interface} parent 1:1 classid 1:a htb rate {rate} ceil {rate}"
            for command in (change, leaf):
                run_program("tc", "-n", namespace, *command.split())

    def _to(self, other: str) -> tuple[str, ...]:
        known = "02:00:00:00:00:00" if other == "nobody" else self.lab.plan.host(other).ethernet_address
        return ("lladdr", known, "dev", "eth0", "nud", "permanent")


@contextmanager
def open_network() -> Iterator[SoakNetwork]:
    """Build the lab, and remove it."""
    with Lab(Topology.parse(topology_text(MAX_RANKS), source="soak")) as lab:
        yield SoakNetwork(lab)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Let ``folder`` be a disk of its own with little room."""
    run_program("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "soak", str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            run_program("umount", str(folder))
