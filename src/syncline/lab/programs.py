"""`ip` and `tc`, run in batches, and their refusals made into errors that say what this machine lacks."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import LabError
from syncline.lab import latency

NAMESPACE_FOLDER = Path("/run/netns")
_TIMEOUT_S = 60.0
_BRIDGE_SETTINGS = Path("/proc/sys/net/bridge")
_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_REMEDIES = (  # in the failed command, in what the program said, what is missing, how to get it
    (r"type veth", r"Unknown device type|not supported", "virtual Ethernet pairs", "CONFIG_VETH, modprobe veth"),
    (r"type bridge", r"Unknown device type|not supported", "bridges", "CONFIG_BRIDGE, modprobe bridge"),
    (r" htb", r"kind is unknown|No such file", "the HTB queue", "CONFIG_NET_SCH_HTB, modprobe sch_htb"),
    (r" tbf", r"kind is unknown|No such file", "the token bucket", "CONFIG_NET_SCH_TBF, modprobe sch_tbf"),
    (r" bfifo", r"kind is unknown|No such file", "the byte queue", "CONFIG_NET_SCH_FIFO"),
    (r" pfifo", r"kind is unknown|No such file", "the packet queue", "CONFIG_NET_SCH_FIFO"),
    (r" u32", r"not found|No such file", "the u32 classifier", "CONFIG_NET_CLS_U32, modprobe cls_u32"),
    (
        r"latency",
        r"TAP interface",
        "TAP interfaces",
        "CONFIG_TUN, modprobe tun; or leave latency and loss out of the topology",
    ),
    (r"netns", r"Invalid argument|not implemented", "network namespaces", "CONFIG_NET_NS"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Commands for one program in one namespace (None: the machine's own)."""

    program: str
    namespace: str | None
    lines: tuple[str, ...]


def check_machine(*, user_id: int | None = None, find: Callable[[str], str | None] = shutil.which) -> None:
    """Raise unless this user can build a lab here, as far as can be seen without trying."""
    for program in ("ip", "tc"):
        if find(program) is None:
            raise LabError(f"the lab needs the program {program!r}, which is not on the PATH; install iproute2")
    user = os.geteuid() if user_id is None else user_id
    if user != 0:
        raise LabError(f"the lab needs root, to make network namespaces, but the user is {user}; run it with sudo")


def run_batch(batch: Batch) -> str:
    """Run a batch and return what it printed; stop at the first command that fails."""
    if not batch.lines:
        return ""
    where = ["-n", batch.namespace] if batch.namespace else []
    result = _call([batch.program, *where, "-batch", "-"], "\n".join(batch.lines) + "\n")
    if result.returncode:
        failed = re.search(r"Command failed -:(\d+)", result.stderr)
        command = batch.lines[int(failed[1]) - 1] if failed else "; ".join(batch.lines[:3])
        raise explain_failure(f"{batch.program} {command}", result.stderr)
    return result.stdout


def run_program(*argv: str) -> str:
    """Run one command and return what it printed."""
    result = _call(list(argv), None)
    if result.returncode:
        raise explain_failure(" ".join(argv), result.stderr)
    return result.stdout


def hold_back(namespace: str, links: Sequence[tuple[str, str, float, float]]) -> None:
    """Make pairs of interfaces in a namespace, and leave a process in it that passes packets on: late, and not all."""
    if links:
        program = (sys.executable, "-I", "-S", latency.__file__)
        run_program("ip", "netns", "exec", namespace, *program, json.dumps(links))


def skip_packet_filters(namespace: str) -> None:
    """Let the bridges of a namespace forward as switches do, without asking the machine's packet filters.

    They ask where ``br_netfilter`` is loaded (Docker loads it), for each packet at each hop: that takes processor time,
    and rules of the machine could drop what they do not know. Where the setting cannot be changed it stays.
    """
    for table in ("iptables", "ip6tables", "arptables"):
        setting = _BRIDGE_SETTINGS / f"bridge-nf-call-{table}"
        if setting.exists():
            _call(["ip", "netns", "exec", namespace, "tee", str(setting)], "0")


def check_packet_filters(settings: Path = _BRIDGE_SETTINGS) -> None:
    """Raise where bridges cannot ask the packet filters, because ``br_netfilter`` is not there."""
    if not settings.is_dir():
        raise LabError(
            f"packet filters cannot be left on: the kernel's bridges ask none ({settings} is not there); it needs "
            "CONFIG_BRIDGE_NETFILTER, modprobe br_netfilter"
        )


def check_congestion(name: str, available: Path = _CONGESTION_CONTROLS) -> None:
    """Raise unless the kernel has this congestion control."""
    known = available.read_text(encoding="utf-8").split()
    if name not in known:
        raise LabError(
            f"the kernel has no congestion control {name!r}, only {', '.join(sorted(known))}; it may come with "
            f"modprobe tcp_{name}"
        )


def explain_failure(command: str, output: str) -> LabError:
    """Make the error for a command that failed: what, why, and what to do."""
    reason = output.strip().splitlines()[0] if output.strip() else "no reason given"
    if re.search(r"not permitted|denied", output):
        return LabError(
            f"'{command}' was not permitted ({reason}); in a container, give it the capabilities NET_ADMIN and "
            "SYS_ADMIN (docker run --privileged)"
        )
    for in_command, in_output, feature, remedy in _REMEDIES:
        if re.search(in_command, command) and re.search(in_output, output):
            return LabError(f"the kernel lacks {feature} ('{command}': {reason}); it needs {remedy}")
    return LabError(f"'{command}' failed: {reason}")


def routed_networks() -> tuple[ipaddress.IPv4Network, ...]:
    """Return the destinations of the machine's IPv4 routes."""
    routes: list[dict[str, Any]] = json.loads(run_program("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    destinations = (str(route.get("dst", "default")) for route in routes)
    return tuple(ipaddress.IPv4Network(dst, strict=False) for dst in destinations if dst != "default")


def namespace_names() -> tuple[str, ...]:
    """Return the names of all network namespaces."""
    listed: list[dict[str, Any]] = json.loads(run_program("ip", "-j", "netns", "list") or "[]")
    return tuple(str(entry["name"]) for entry in listed)


def processes_in(namespaces: Iterable[str]) -> set[int]:
    """Return the ids of the processes that run in any of the namespaces, this process excepted."""
    inodes = {inode for name in namespaces if (inode := _inode(NAMESPACE_FOLDER / name))}
    numbered = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {int(entry.name) for entry in numbered if _inode(entry / "ns/net") in inodes} - {os.getpid()}


def interface_bytes(namespace: str) -> dict[str, tuple[int, int]]:
    """Return what each interface of a namespace received and sent, in bytes."""
    shown: list[dict[str, Any]] = json.loads(run_program("ip", "-n", namespace, "-j", "-s", "link", "show") or "[]")
    return {str(link["ifname"]): (_count(link, "rx"), _count(link, "tx")) for link in shown}


def queue_drops(namespace: str) -> dict[str, int]:
    """Return how many packets the queue of each interface of a namespace has dropped."""
    shown: list[dict[str, Any]] = json.loads(run_program("tc", "-n", namespace, "-j", "-s", "qdisc", "show") or "[]")
    return {str(queue["dev"]): int(queue["drops"]) for queue in shown if queue.get("root")}


def resent_segments(namespace: str) -> int:
    """Return how many TCP segments a namespace has sent again."""
    lines = run_program("ip", "netns", "exec", namespace, "cat", "/proc/net/snmp").splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def delete_namespaces(names: Iterable[str]) -> None:
    """Delete namespaces with everything in them."""
    run_batch(Batch(program="ip", namespace=None, lines=tuple(f"netns delete {name}" for name in names)))


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None  # the process, or the namespace, is gone


def _count(link: dict[str, Any], direction: str) -> int:
    return int(link["stats64"][direction]["bytes"])


def _call(argv: list[str], text: str | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise LabError(f"the lab needs the program {argv[0]!r}, which is not on the PATH; install iproute2") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(
            f"'{' '.join(argv)}' did not end within {_TIMEOUT_S:g} s; the kernel may be overloaded"
        ) from error
