"""``syncline doctor``: what this machine has and lacks for training, each with its remedy, and what to do about it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from syncline.cli.commands import new_app
from syncline.endpoints import PROBE_PORT
from syncline.errors import ConfigurationError
from syncline.report.terminal import answer, new_table

OLDEST_TORCH = (2, 11)
TESTED_TORCH = ("2.13.0", "2.14.1")
"""What the tests run with: all of them with the first, those of process groups and frameworks with each."""
MIN_OPEN_FILES = 4096
"""Two connections to each of a thousand peers, with room for data loaders."""
MIN_SOCKET_BUFFER_BYTES = 4 << 20
"""What a 10 Gbit/s link over 3 ms needs to be full."""
NET_ADMIN_BIT = 12
app = new_app()


class Verdict(Enum):
    """How a check ended."""

    FINE = "ok"
    LIMITED = "limited"
    """Training works; something else does not, or is slower."""
    LACKING = "lacking"
    """Training does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the diagnosis; ``remedy`` is empty where nothing is to be done."""

    subject: str
    verdict: Verdict
    what: str
    remedy: str = ""


def judge(subject: str, is_fine: bool, what: str, remedy: str, *, otherwise: Verdict = Verdict.LIMITED) -> Finding:
    """Build a finding whose remedy is shown only where it is needed."""
    return Finding(
        subject=subject, verdict=Verdict.FINE if is_fine else otherwise, what=what, remedy="" if is_fine else remedy
    )


def diagnose() -> tuple[Finding, ...]:
    """Run every check."""
    return tuple(check() for check in CHECKS)


def check_python() -> Finding:
    """Tell the interpreter, which is new enough: pip sees to that."""
    return judge("Python", True, platform.python_version(), "")


def check_torch() -> Finding:
    """Judge torch by its version alone; importing it takes seconds."""
    oldest, tested = ".".join(map(str, OLDEST_TORCH)), " and ".join(TESTED_TORCH)
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        remedy = f"install torch {oldest} or newer; {tested} are tested"
        return judge("torch", False, "not installed", remedy, otherwise=Verdict.LACKING)
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        return judge("torch", False, version, f"install torch {oldest} or newer; {tested} are tested")
    is_tested = version.startswith(tuple(one.rpartition(".")[0] + "." for one in TESTED_TORCH))
    return judge(
        "torch", is_tested, version if is_tested else f"{version}, untested", f"the tests run with torch {tested}"
    )


def check_loopback() -> Finding:
    """Judge whether two processes of this machine can talk."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2.0).close()
    except OSError as error:
        remedy = "bring the loopback interface up: ip link set lo up"
        return judge("loopback", False, f"127.0.0.1: {error.strerror}", remedy, otherwise=Verdict.LACKING)
    return judge("loopback", True, "127.0.0.1 answers", "")


def check_host_name() -> Finding:
    """Judge whether the machine's own name leads to an address, which gloo insists on."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = f"add '{name}' to /etc/hosts; Syncline does without, but gloo does not"
        return judge("host name", False, f"'{name}' has no address", remedy)
    return judge("host name", True, f"'{name}' is {address}", "")


def check_open_files() -> Finding:
    """Judge the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_fine = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    remedy = f"for jobs of some hundred ranks: ulimit -n {MIN_OPEN_FILES} (the hard limit is {hard})"
    return judge("open files", is_fine, f"at most {soft}", remedy)


def check_cores() -> Finding:
    """Tell how many cores the ranks will share."""
    num_cores = len(os.sched_getaffinity(0))
    what = f"{num_cores} for this process; more ranks than that share them"
    return judge("cores", num_cores >= 2, what, "one core is enough to try things, not to measure them")


def check_socket_buffers() -> Finding:
    """Judge how far TCP's buffers may grow by themselves."""
    sizes = [_proc_text(f"net/ipv4/tcp_{kind}").split() for kind in ("rmem", "wmem")]
    largest = min((int(size[-1]) for size in sizes if size), default=0)
    remedy = "for fast long links: sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216' (and tcp_wmem)"
    what = f"TCP grows them to {largest / (1 << 20):.1f} MiB"
    return judge("socket buffers", largest >= MIN_SOCKET_BUFFER_BYTES, what, remedy)


def check_congestion_control() -> Finding:
    """Tell which congestion control this machine's TCP uses; any works, and figures depend on it."""
    used = _proc_text("net/ipv4/tcp_congestion_control")
    available = _proc_text("net/ipv4/tcp_available_congestion_control")
    what = f"{used or 'unknown'} (available: {available or 'unknown'})"
    if _proc_text("net/ipv4/tcp_slow_start_after_idle") == "1":
        what += "; slow after each pause, which on links with latency net.ipv4.tcp_slow_start_after_idle=0 spares"
    return judge("congestion control", bool(used), what, "")


def check_compiled() -> Finding:
    """Judge whether the compiled part is there, by the file alone; importing the fabric takes a while."""
    folder = Path(__file__).parents[1] / "fabric"
    is_built = any((folder / f"_native{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return judge(
        "compiled part",
        is_built,
        "built" if is_built else "missing: no job of several ranks can start",
        "'pip install --force-reinstall --no-deps .' in the clone, or with a wheel in place of the dot",
        otherwise=Verdict.LACKING,
    )


def check_gpu() -> Finding:
    """Tell of a GPU, as its driver does, that nobody has run the paths of its tensors yet."""
    from syncline.machines.nvml import find_gpu, read_gpu  # with what measures machines, which no other check needs

    memory_bytes = read_gpu(find_gpu()).get("gpu_memory_bytes")
    if memory_bytes is None:
        return judge("GPU", True, "none", "")
    what = f"{memory_bytes / (1 << 30):.0f} GiB; Syncline's code for tensors on it has never been run on a GPU"
    return judge(
        "GPU", False, what, "compare the first results with those of another backend; in a clone, make test-gpu does"
    )


def check_lab_tools() -> Finding:
    """Judge whether the lab finds its tools."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    what = f"no {' and no '.join(missing)}" if missing else "ip and tc are there"
    return judge("lab: tools", not missing, what, "install iproute2 (apt install iproute2)")


def check_lab_rights() -> Finding:
    """Judge whether this user may build networks."""
    effective = next((line.split()[1] for line in _status_lines() if line.startswith("CapEff")), "0")
    may = bool(int(effective, 16) >> NET_ADMIN_BIT & 1)
    what = "may build networks" if may else "may not build networks"
    return judge("lab: rights", may, what, "run syncline lab as root, or in a container with --privileged")


def check_pictures() -> Finding:
    """Judge whether pictures can be drawn."""
    is_there = importlib.util.find_spec("matplotlib") is not None
    return judge("pictures", is_there, "matplotlib" if is_there else "none", "pip install 'syncline[report]'")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_loopback,
    check_host_name,
    check_open_files,
    check_cores,
    check_socket_buffers,
    check_congestion_control,
    check_compiled,
    check_gpu,
    check_lab_tools,
    check_lab_rights,
    check_pictures,
)


def _proc_text(name: str) -> str:
    path = Path("/proc/sys") / name
    return path.read_text().strip() if path.exists() else ""


def _status_lines() -> list[str]:
    path = Path("/proc/self/status")
    return path.read_text().splitlines() if path.exists() else []


@app.command()
def doctor(
    *,
    path: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Tell whether DSCP marks survive to HOST and back.")
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Answer --path of other machines, for a while.")] = False,
    hosts: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Tell which of these hosts can dial which, as 'a[0-3],b0'.")
    ] = None,
    ports: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="Ports of --hosts (default: SYNCLINE_PORTS).")
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Where --listen listens (0: any).")
    ] = PROBE_PORT,
    for_s: Annotated[
        float, typer.Option("--for", metavar="SECONDS", min=0.1, max=86400, help="How long --listen or --hosts last.")
    ] = 600.0,
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The secret of --path, --listen and --hosts (mode 0600).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings for programs.")] = False,
) -> None:
    """Say what this machine lacks, and what to do about it.

    --path HOST needs `syncline doctor --listen` on HOST. With --secret-file (or SYNCLINE_SECRET_FILE), both need
    the same secret.

    --hosts is to run on all of these hosts at once, before the job does; it ends when all know all.

    Exit code 1 if training cannot work here, no mark comes through, or two hosts could not meet; whatever is merely
    limited leaves it at 0.
    """
    if (path is not None) + listen + (hosts is not None) > 1:
        raise ConfigurationError("--path asks, --listen answers, and --hosts does both; give one of them")
    if ports is not None and hosts is None:
        raise ConfigurationError("--ports says which ports of --hosts are tried; give both")
    if path is not None or listen or hosts is not None:
        from syncline.cli.path_diagnosis import listen_for_probes, show_path  # loads the fabric
        from syncline.cli.port_diagnosis import show_ports
        from syncline.pytorch.secret import choose_secret

        key = choose_secret(secret_file) or b""
        if hosts is not None:
            raise typer.Exit(show_ports(hosts, ports, for_s=for_s, as_json=as_json, key=key))
        if path is not None:
            raise typer.Exit(show_path(path, as_json=as_json, key=key))
        listen_for_probes(port, for_s=for_s, key=key)
        return
    if secret_file is not None:
        raise ConfigurationError("--secret-file is the secret of --path, --listen and --hosts; give one of them too")
    findings = diagnose()
    told = [asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
    answer(told, partial(_show_table, findings), as_json=as_json)
    raise typer.Exit(1 if any(finding.verdict is Verdict.LACKING for finding in findings) else 0)


def _show_table(findings: tuple[Finding, ...], console: Console) -> None:
    colours = {Verdict.FINE: "green", Verdict.LIMITED: "yellow", Verdict.LACKING: "bold red"}
    table = new_table("", "subject", "found", num_texts=3)
    for finding in findings:
        remedy = f"\n[bold]{escape(finding.remedy)}[/]" if finding.remedy else ""
        colour = colours[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict.value}[/]", finding.subject, escape(finding.what) + remedy)
    console.print(table)
