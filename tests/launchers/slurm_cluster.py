"""A Slurm cluster of this machine's own: munged, slurmctld, and a slurmd for each node, in a temporary folder.

Each slurmd has a host name of its own, which leads to loopback on all nodes, as a cluster's names lead to its nodes.
Daemons run in the foreground, are waited for by the lines that they write, and end with the test. Nothing of a Slurm
that the machine may have is used or changed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rank_scripts import reserved_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel")
PACKAGES = "munge slurmctld slurmd slurm-client"
CPUS_OF_A_NODE = 8
START_S = 60.0
END_S = 30.0
BE_HOST = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && shift 2 && exec "$@"'
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
KillWait=1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A running cluster; its commands find it by ``variables``."""

    nodes: tuple[str, ...]
    variables: dict[str, str]


def missing_programs() -> list[str]:
    """Return which of the programs are not installed."""
    return [name for name in PROGRAMS if _find(name) is None]


@contextmanager
def slurm_cluster(folder: Path, nodes: Sequence[str]) -> Iterator[SlurmCluster]:
    """Yield a cluster whose nodes are all this machine, under these names; end its daemons, and see that all have."""
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as ending:
        _configure(folder, nodes, ending)
        ending.enter_context(_munged(folder, variables))
        hosts_file = folder / "hosts"
        hosts_file.write_text(f"127.0.0.1 localhost {' '.join(nodes)} {_machine()}\n")
        controller = ending.enter_context(_Daemon(["slurmctld", "-D", "-c", "-vvv"], variables))
        controller.wait_line(r"Running as primary controller", START_S)
        for node in nodes:
            ending.enter_context(_Daemon(["slurmd", "-D"], variables, host=node, hosts_file=hosts_file))
        for node in nodes:
            controller.wait_line(rf"node_registration complete for {node}\b", START_S)
        yield SlurmCluster(nodes=tuple(nodes), variables=variables)
    left = [process for process in psutil.process_iter(["environ"]) if _belongs(process, variables)]
    for process in left:
        process.kill()
    assert not left, f"the cluster left {left}"


def _belongs(process: psutil.Process, variables: dict[str, str]) -> bool:
    """Whether the cluster started a process, which has its variables; of one that has ended, nothing is known."""
    return (process.info["environ"] or {}).items() >= variables.items()


def _configure(folder: Path, nodes: Sequence[str], ending: ExitStack) -> None:
    machine = socket.gethostname().split(".")[0]
    lines = [
        CONFIGURATION.format(folder=folder, machine=machine, controller_port=ending.enter_context(reserved_port()))
    ]
    for node in nodes:
        port = ending.enter_context(reserved_port())
        lines.append(f"NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_OF_A_NODE} State=UNKNOWN\n")
    lines.append(f"PartitionName=main Nodes={','.join(nodes)} Default=YES State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "state").mkdir()
    for node in nodes:
        (folder / node).mkdir()


@contextmanager
def _munged(folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """Serve credentials of a key of this cluster's own; munged returns when it answers, and is ended by its socket."""
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    at = [_found("munged"), "--socket", str(folder / "munge.socket")]
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    environment = os.environ | variables
    subprocess.run([*at, *files, "--force"], check=True, timeout=START_S, capture_output=True, env=environment)
    try:
        yield
    finally:
        subprocess.run([*at, "--stop"], check=True, timeout=END_S, capture_output=True)


class _Daemon:
    """A daemon in the foreground; what it writes is read all the time, so that it never waits for a reader."""

    def __init__(
        self, command: list[str], variables: dict[str, str], *, host: str = "", hosts_file: Path | None = None
    ) -> None:
        name, *arguments = command
        renamed = ["unshare", "--mount", "--uts", "sh", "-c", BE_HOST, "sh", str(hosts_file), host] if host else []
        self._process = subprocess.Popen(
            [*renamed, _found(name), *arguments],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._read = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()

    def __enter__(self) -> _Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def wait_line(self, pattern: str, timeout_s: float) -> None:
        """Wait until a line that ``pattern`` is found in has been written."""
        with self._read:
            self._read.wait_for(lambda: self._has_ended or self._has_line(pattern), timeout_s)
            assert self._has_line(pattern), f"no {pattern!r} within {timeout_s:g} s:\n" + "".join(self._lines)

    def _has_line(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self._lines)

    def _read_lines(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._read:
                self._lines.append(line)
                self._read.notify_all()
        with self._read:
            self._has_ended = True
            self._read.notify_all()


def _machine() -> str:
    return socket.gethostname().split(".")[0]


def _find(name: str) -> str | None:
    """Return where a program is; daemons are often in places that a user's PATH leaves out."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _found(name: str) -> str:
    path = _find(name)
    assert path is not None, f"{name} is not installed"
    return path
