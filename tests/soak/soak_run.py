"""Train for a while on real processes in the lab, let every kind of fault happen, and judge each job.

    make soak MINUTES=120 SEED=1            # or: python tests/soak/soak_run.py --minutes 120 --seed 1 --output FOLDER

Needs root and iproute2. Jobs of 4 to 8 ranks, each a process on a host of its own, come one after another; of each, the
rule, the faults, their times and places follow from the seed, and are written down beside what came of them. Ends with
status 1 where the oracle found anything, where too few faults or steps were made to mean something, or where memory,
open files or threads of what stays alive have grown. `--job SEED` runs one job again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

sys.path.append(str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from soak_forker import Forker
from soak_job import Job
from soak_memory import growth_kib, rss_kib
from soak_network import SoakNetwork, open_network
from soak_oracle import Oracle, invalid, longest_stall_s, memory_of
from soak_plan import RULES, JobPlan, plan_job
from soak_record import JobRecord

LIMIT_S = 45.0
"""A job of which nothing is heard for so long hangs."""
MIN_STEPS_PER_MINUTE = 200
MIN_FAULTS_PER_MINUTE = 17
"""Two thousand in two hours."""
MOST_INVALID = 0.1
MOST_GROWTH_KIB = 16 << 10
"""Of this process and the nursery, which keep what steps ended with before, to compare."""
WARM_JOBS = 10
"""Memory is compared with that after so many: until then what is imported late, and caches, are filled."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a soak amounts to so far."""

    jobs: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    """Jobs of a rule that goes on, which did after a loss."""
    ended: int = 0
    """Jobs that ended with errors that name the fault."""
    invalid: int = 0
    newcomers: int = 0
    """Processes that came into a job that ran."""
    steps: int = 0
    rank_growth_kib: list[int] = field(default_factory=list)
    """Of each rank whose job was long enough: its memory late in the job less that after its first steps."""
    longest_stall_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)

    def add(self, record: JobRecord, wrong: list[str], reason: str | None) -> None:
        """Count a job."""
        self.jobs[record.plan.rule] += 1
        self.faults.update(one["kind"] for one in record.injected)
        self.newcomers += sum(bool(record.of(rank, "ready")) for rank in record.newcomers)
        found = [growth_kib(memory_of(record, rank)) for rank in record.statuses]
        self.rank_growth_kib += [one for one in found if one is not None]
        self.steps += sum(event["event"] == "step" for event in record.events)
        self.longest_stall_s = max(self.longest_stall_s, longest_stall_s(record))
        self.invalid += reason is not None
        has_error = any(event["event"] == "error" for event in record.events)
        self.ended += has_error and not record.plan.is_tolerant
        self.recovered += record.plan.is_tolerant and any(event["event"] == "done" for event in record.events)
        if wrong:
            self.failures.append({"seed": record.plan.seed, "plan": record.plan.as_record(), "wrong": wrong})

    def growth_kib(self) -> int:
        """Return by how much what stays alive has grown since the first jobs; 0 for a soak of few."""
        return growth_kib([size["rss_kib"] for size in self.sizes[WARM_JOBS:]]) or 0


class Soak:
    """Jobs one after another on one network."""

    def __init__(self, network: SoakNetwork, forker: Forker, output: Path, log: TextIO) -> None:
        self._network, self._forker, self._output, self._log = network, forker, output, log
        self._oracle = Oracle()
        self.tally = Tally()

    def play(self, plan: JobPlan) -> list[str]:
        """Run one job; return what is wrong with it."""
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            record = Job(plan, self._network, self._forker, Path(folder) / "job").run(limit_s=LIMIT_S)
        wrong = self._oracle.judge(record)
        reason = invalid(record)
        self.tally.add(record, wrong, reason)
        self.tally.sizes.append(self._sizes())
        line = {
            "plan": plan.as_record(),
            "injected": [{**one, "at_s": round(one["at_s"] - record.began_s, 3)} for one in record.injected],
            "took_s": round(record.ended_s - record.began_s, 3),
            "stall_s": round(longest_stall_s(record), 3),
            "steps": max((event["step"] for event in record.events if event["event"] == "step"), default=0),
            "growth_kib": [growth_kib(memory_of(record, rank)) for rank in record.statuses],
            "newcomers": len(record.newcomers),
            "errors": {event["rank"]: event["text"] for event in record.events if event["event"] == "error"},
            "invalid": reason,
            "wrong": wrong,
            **self.tally.sizes[-1],
        }
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        if wrong:
            self._keep(record, wrong)
        return wrong

    def _keep(self, record: JobRecord, wrong: list[str]) -> None:
        """Write down all that is known of a job that did not end as it may."""
        lines = [*({"wrong": sentence} for sentence in wrong), *record.injected, *record.events, record.outputs]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self._output / f"wrong-{record.plan.seed}.jsonl").write_text(text)

    def _sizes(self) -> dict[str, int]:
        """Return what the processes that stay alive hold."""
        gc.collect()
        nursery = psutil.Process(self._forker.pid)
        processes = [psutil.Process(), nursery]
        return {
            "rss_kib": rss_kib() + nursery.memory_info().rss // 1024,
            "num_files": sum(process.num_fds() for process in processes),
            "num_threads": sum(process.num_threads() for process in processes),
        }


def judge_soak(tally: Tally, minutes: float) -> list[str]:
    """Say why a soak has not passed."""
    wrong = [f"{len(tally.failures)} jobs did not end as they may"] if tally.failures else []
    num_jobs, num_faults = sum(tally.jobs.values()), sum(tally.faults.values())
    if tally.steps < MIN_STEPS_PER_MINUTE * minutes:
        wrong.append(f"invalid: {tally.steps} steps of ranks, fewer than {MIN_STEPS_PER_MINUTE} a minute")
    if num_faults < MIN_FAULTS_PER_MINUTE * minutes:
        wrong.append(f"invalid: {num_faults} faults, fewer than {MIN_FAULTS_PER_MINUTE} a minute")
    if tally.invalid > max(1.0, MOST_INVALID * num_jobs):
        wrong.append(f"invalid: in {tally.invalid} of {num_jobs} jobs nothing took place")
    if tally.growth_kib() > MOST_GROWTH_KIB:
        wrong.append(f"memory grew by {tally.growth_kib()} KiB")
    late = tally.sizes[WARM_JOBS:]
    counted = ("num_files", "num_threads") if late else ()
    grown = [name for name in counted if late[-1][name] > late[0][name]]
    return wrong + [f"{name} grew from {late[0][name]} to {late[-1][name]}" for name in grown]


def report(tally: Tally, seed: int, minutes: float, wrong: list[str]) -> str:
    """Return the record's page."""
    num_faults = sum(tally.faults.values())
    kinds = "\n".join(f"| {kind} | {number} |" for kind, number in sorted(tally.faults.items()))
    rules = ", ".join(f"{number} with `{rule}`" for rule, number in sorted(tally.jobs.items()))
    sizes = tally.sizes[WARM_JOBS:] or tally.sizes
    grown = sorted(tally.rank_growth_kib) or [0]
    flat = ", ".join(f"{name} {sizes[0][name]} to {sizes[-1][name]}" for name in sizes[0])
    return f"""# Soak: faults of {len(tally.faults)} kinds on real processes in the lab

    make soak MINUTES={minutes:.0f} SEED={seed}

{num_faults} faults in {minutes:.1f} minutes ({num_faults / minutes:.1f} a minute),
{sum(tally.jobs.values())} jobs of 4 to 8 ranks ({rules}),
{tally.steps} steps of ranks; {tally.newcomers} processes joined a job that ran. {tally.ended} jobs of rules
that do not go on ended with errors that name the fault; {tally.recovered} jobs of rules that do came to their end.
In {tally.invalid} jobs nothing took place. Longest time in which a rank that was not struck neither made a step
nor told an error: {tally.longest_stall_s:.1f} s.

Memory: of {len(tally.rank_growth_kib)} ranks in jobs that were long enough, the median held
{grown[len(grown) // 2]} KiB more in the last third of its steps than in the first after its warm-up, the worst
{grown[-1]} KiB. What stays alive, after the first {WARM_JOBS} jobs and at the end: {flat}.

The oracle's failures: {len(tally.failures)}. {"Passed." if not wrong else "Not passed: " + "; ".join(wrong) + "."}

| fault | times |
|---|---|
{kinds}

Each job with its plan, what took place when, and all errors: `jobs.jsonl`. {platform.platform()}, {os.cpu_count()} CPUs
for all ranks; Python {platform.python_version()}, torch {torch.__version__}.
"""


def main() -> int:
    """Soak for as long as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=RULES)
    parser.add_argument("--job", type=int, help="run the job of this seed alone")
    parser.add_argument("--output", type=Path, help="folder for jobs.jsonl and README.md")
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="soak-record-"))
    output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        forker = Forker()
        stack.callback(forker.end)
        network = stack.enter_context(open_network())
        log = stack.enter_context((output / "jobs.jsonl").open("w"))
        soak = Soak(network, forker, output, log)
        began_s = time.monotonic()
        if options.job is not None:
            wrong = soak.play(plan_job(options.job, rules=tuple(options.rules)))
            print("\n".join(wrong) or "nothing is wrong")
            return bool(wrong)
        number = 0
        while time.monotonic() - began_s < 60 * options.minutes:
            plan = plan_job(1_000_000 * options.seed + number, rules=tuple(options.rules))
            for sentence in soak.play(plan):
                print(f"job {plan.seed} ({plan.rule}): {sentence}", flush=True)
            number += 1
    minutes = (time.monotonic() - began_s) / 60
    wrong = judge_soak(soak.tally, minutes)
    (output / "README.md").write_text(report(soak.tally, options.seed, minutes, wrong))
    print((output / "README.md").read_text())
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
