"""How often the lookout names the rank or link at fault first, with its reason, and how often it accuses wrongly.

    sudo python benchmarks/hidden_faults.py --trials 100 --seed 1 --to faults.jsonl
    sudo python benchmarks/hidden_faults.py --healthy --trials 100 --seed 1 --to healthy.jsonl

Each row of ``--to`` is a trial; those that are there with the same seed are not made again. A job of four
ranks, whose kind is drawn (``--where``, ``--job``: on loopback or in the lab, ``distribute`` with a rule or DDP on a
process group), lives through ``--per-job`` trials. Each draws a fault of ``hidden_faults_kinds.py``, and a rank or a
link. The fault begins when nobody was named for some seconds, and ends when a line names somebody, or after
``--patience`` seconds. The line is right if it names that rank or link; of nothing, if there is none. That a link is
full is no accusation: where the network is the limit it is true of a healthy job. ``--healthy``:
each trial is a job of its own that has no fault for ``--seconds``, and is right if nobody is named. ``others`` is how
many processors were used by what is not of the job. Where a line says that a rank's processor is shared, on a machine
with others' work, it may be true: such trials are counted as wrong, and then once more by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hidden_faults_kinds import MAPPED_BYTES, REASONS, Target, broken, possible_faults

from syncline.cli.launcher.scratch import shared_secret
from syncline.lab import Lab
from syncline.topology import DirectedLink, Topology

RANK = Path(__file__).with_name("hidden_faults_rank.py")
NUM_RANKS = 4
NETWORKS = {
    "two racks of two": "{topology: two-two, switch: s, children: ["
    "{switch: rack-a, uplink: UPLINK, children: [{host: 'h[0-1]', uplink: RATE}]}, "
    "{switch: rack-b, uplink: UPLINK, children: [{host: 'h[2-3]', uplink: RATE}]}]}",
    "a rack and two hosts": "{topology: two-one-one, switch: s, children: ["
    "{switch: rack-a, uplink: UPLINK, children: [{host: 'h[0-1]', uplink: RATE}]}, "
    "{host: 'h[2-3]', uplink: RATE}]}",
    "a switch": "{topology: four, switch: s, children: [{host: 'h[0-3]', uplink: RATE}]}",
}
SLOWER = "1 Gbit/s", "100 Mbit/s"
RATES = (SLOWER, SLOWER, ("1 Gbit/s", "400 Mbit/s"), ("10 Gbit/s", "10 Gbit/s"))
"""Of hosts, and of racks; a plan matters where the latter are far slower."""
WORK = {"computes": (256, 256), "talks": (512, 64)}
"""The model's width, and the batch. What talks has steps that are mostly messages; it is drawn where faults are not."""
SYNCHRONOUS = ("AllReduce", "Sharded", "Sharded, overlap_forward")
"""Rules under which a slow rank holds the others up in each step; the others hide it."""
NAMED = re.compile(
    r"syncline: (?:no step was finished.*?: )?"
    r"(?P<name>the links? of .+?(?= holds? the)|rank \d+(?= .*?(?:holds the|has told nothing|is behind)))"
)
"""A line that accuses; of nobody does one that says who holds nobody up any more."""
FULL = re.compile(r" is used \([^)]*\), and they wait ")
"""In a line of a link that is full, and loses nothing: true of a healthy job, where the network is the limit."""
SHARED, BUSY_LOAD = "had no processor", 2.5
"""What a line says of a rank where the machine has others' work, and the load from which on that may be true."""
WELL_S = 16.0
"""Of a healthy job between two trials: two windows of the lookout."""
ENV = {"SYNCLINE_SILENCE": "120", "SYNCLINE_BEHIND": "8", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What kind of job it is."""

    where: str
    job: str
    rule: str
    network: str
    rates: tuple[str, str]
    work: str

    @classmethod
    def draw(cls, draw: random.Random, options: argparse.Namespace) -> Kind:
        """Draw what the options leave open."""
        where, job = draw.choice(("lab", "loopback")), draw.choice(("distribute", "group"))
        where, job = options.where or where, options.job or job
        rule = draw.choice((*SYNCHRONOUS, "LocalSteps", "Overlapped") if options.healthy else SYNCHRONOUS)
        network, rates, work = draw.choice(list(NETWORKS)), draw.choice(RATES), draw.choice(list(WORK))
        if options.faults == ["plan"]:
            network, rates = "two racks of two", SLOWER
        is_in_lab = where == "lab"
        return cls(
            where=where,
            job=job,
            rule=rule if job == "distribute" else "DDP",
            network=network if is_in_lab else "",
            rates=rates if is_in_lab else ("", ""),
            work=work if options.healthy else "computes",
        )

    @property
    def topology(self) -> Topology:
        """The network of the lab."""
        of_hosts, of_racks = self.rates
        return Topology.parse(NETWORKS[self.network].replace("UPLINK", of_racks).replace("RATE", of_hosts))

    def task(self, folder: Path) -> str:
        """Return what the ranks are told."""
        width, batch = WORK[self.work]
        told = {"folder": str(folder), "job": self.job, "rule": self.rule, "width": width, "batch": batch}
        return json.dumps(told)


class Job:
    """The ranks, and what they write."""

    def __init__(self, kind: Kind, folder: Path, stack: ExitStack) -> None:
        (folder / "go").touch()
        self.lab = stack.enter_context(Lab(kind.topology)) if kind.where == "lab" else None
        command = [sys.executable, "-m", "syncline", "run"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        if self.lab is None:
            command += ["--ranks", str(NUM_RANKS), str(RANK), kind.task(folder)]
            self.processes = [subprocess.Popen(command, env=os.environ | ENV, **pipes)]
        else:
            env = {**ENV, **stack.enter_context(shared_secret(os.environ))}
            command += [str(RANK), kind.task(folder)]
            hosts = [host.name for host in self.lab.plan.hosts]
            self.processes = [self.lab.spawn(host, command, env=env, **pipes) for host in hosts]
        stack.callback(self._end, folder)
        self._lines: queue.Queue[str] = queue.Queue()
        for process in self.processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()
        self.pids: dict[int, int] = {}
        self.last_lines: list[str] = []
        while len(self.pids) < NUM_RANKS:
            line = self._lines.get(timeout=300)
            self.last_lines.append(line)
            if found := re.search(r"pid (\d+) (\d+)", line):
                self.pids[int(found[1])] = int(found[2])

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line.rstrip())

    def _end(self, folder: Path) -> None:
        (folder / "go").unlink()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(timeout=60)

    def named(self, seconds: float) -> str:
        """Return the first line within so many seconds that names someone, or nothing."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except queue.Empty:
                break
            self.last_lines.append(line)
            if any(process.poll() is not None for process in self.processes):
                raise SystemExit("the job has ended:\n" + "\n".join(self.last_lines[-30:]))
            if NAMED.search(line) and not FULL.search(line):
                return line
        return ""

    def processor_s(self) -> float:
        """Return the seconds of processors that the ranks have used."""
        used = 0
        for pid in self.pids.values():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            used += int(fields[11]) + int(fields[12])
        return used / TICKS_PER_S


@contextmanager
def observed(job: Job, row: dict[str, Any]) -> Iterator[None]:
    """Write down how long this took, the load, and how many processors were used by what is not of the job."""
    began_s, own_s, all_s = time.monotonic(), job.processor_s(), machine_s()
    yield
    seconds = time.monotonic() - began_s
    row["load"], row["seconds"] = round(os.getloadavg()[0], 1), round(seconds, 1)
    row["others"] = round((machine_s() - all_s - job.processor_s() + own_s) / seconds, 2)


def machine_s() -> float:
    """Return the seconds that all processors of this machine have been busy."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def hide(job: Job, kind: Kind, draw: random.Random, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make one trial; return what came of it."""
    while job.named(WELL_S):  # what is left of the one before
        pass
    faults = possible_faults(is_in_lab=job.lab is not None)
    links = [] if job.lab is None else [each.child for each in job.lab.plan.links]
    if kind.rates != SLOWER or len(links) == NUM_RANKS:
        faults = [fault for fault in faults if fault != "plan"]
    if options.faults:
        faults = [fault for fault in faults if fault in options.faults] or ["nothing"]
    fault, number = draw.choice(faults), draw.randrange(NUM_RANKS)
    link = DirectedLink(draw.choice(links), draw.choice(("up", "down"))) if links else None
    target = Target(rank=number, pid=job.pids[number], folder=folder, lab=job.lab, link=link)
    row: dict[str, Any] = {"fault": fault, "rank": number, "link": str(link or "")}
    job.last_lines.clear()
    with observed(job, row), broken(fault, target):
        line = job.named(options.patience)
    found = NAMED.search(line)
    row["named"] = found["name"] if found else ""
    row["right"] = not line if fault == "nothing" else found is not None and target.is_named(fault, found["name"])
    row["reason"] = row["right"] and (fault == "nothing" or re.search(REASONS[fault], line) is not None)
    return row | {"line": line}


def let_be(job: Job, seconds: float) -> dict[str, Any]:
    """Let a job without a fault run; return what was said of it."""
    row: dict[str, Any] = {"fault": "nothing"}
    end_s = time.monotonic() + seconds
    lines = []
    with observed(job, row):
        while left_s := max(0.0, end_s - time.monotonic()):
            lines += [line] if (line := job.named(left_s)) else []
    return row | {"right": not lines, "said": [one for one in job.last_lines if "syncline:" in one]}


def trials(options: argparse.Namespace, done: set[int]) -> Iterator[dict[str, Any]]:
    """Make all trials that are not done; yield their rows."""
    per_job = 1 if options.healthy else options.per_job
    for first in range(0, options.trials, per_job):
        left = [trial for trial in range(first, min(first + per_job, options.trials)) if trial not in done]
        if not left:
            continue
        kind = Kind.draw(random.Random(f"{options.seed} job {first}"), options)
        with tempfile.TemporaryDirectory(prefix="syncline-faults-") as name, ExitStack() as stack:
            folder = Path(name)
            (folder / "mapped").write_bytes(bytes(MAPPED_BYTES))
            job = Job(kind, folder, stack)
            for trial in left:
                draw = random.Random(f"{options.seed} trial {trial}")
                made = let_be(job, options.seconds) if options.healthy else hide(job, kind, draw, folder, options)
                yield {"seed": options.seed, "trial": trial, **asdict(kind), **made}


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print how often each fault was named."""
    counts: Counter[str] = Counter(row["fault"] for row in rows)
    for fault, number in sorted(counts.items()):
        here = [row for row in rows if row["fault"] == fault]
        right, reasons = (sum(bool(row.get(key)) for row in here) for key in ("right", "reason"))
        seconds = [row["seconds"] for row in here if row["right"]] or [0.0]
        when = f"{reasons} with the reason, after {median(seconds):.1f} s, at most {max(seconds):.1f} s"
        shared = sum(not row["right"] and row["load"] > BUSY_LOAD and SHARED in json.dumps(row) for row in here)
        busy = f"; of the others {shared} name a rank whose processor was shared, at a load above {BUSY_LOAD}"
        print(f"{fault}: {right} of {number} right; {when}{busy if shared else ''}", file=sys.stderr)


def _stop(*_: object) -> None:
    sys.exit("stopped")


def main() -> None:
    """Make trials, append each to the record as it comes, and say at the end how often the lookout was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", choices=("lab", "loopback"))
    parser.add_argument("--job", choices=("distribute", "group"))
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--per-job", type=int, default=5)
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--faults", nargs="*", help="draw among these alone")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)  # the ranks and the lab are not to be left
    rows = [json.loads(line) for line in options.to.read_text().splitlines()] if options.to.exists() else []
    done = {row["trial"] for row in rows if row["seed"] == options.seed}
    with options.to.open("a") as file:
        for row in trials(options, done):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            print(json.dumps(row), flush=True)
    summarize(rows)


if __name__ == "__main__":
    main()
