"""Kill a rank of a job every 15 s, at random, rank 0 too; say what that costs, and replay the training in one process.

    python benchmarks/kills.py benchmarks/kills_sharded.py --minutes 60 --every 15 --seed 1 --output FOLDER
    python benchmarks/kills.py benchmarks/kills_ddp.py --minutes 60 --output FOLDER

The job runs under ``syncline run --elastic --restarts``, so who died comes back as a newcomer. Each rank writes what it
did into FOLDER (``PID-TIME.jsonl``: a line for each step). At the end the harness trains once more by itself, with the
batches of those who counted in each step, and compares all bits of the parameters after the last one.

*Goodput* is the steps that count, times the time of an undisturbed step (the median of those in which all ranks were
there before and after), over the time from the first step to the last one. *Goodput in batches* counts a step by the
part of the ranks whose batches are in it. *Lost to changes* is the time from the last step of one epoch to the first of
the next, less a step each: what kills and newcomers cost by themselves, on a machine where others work too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import kills_task
import psutil
import torch

STEPS_TO_THE_END = 60
"""All ranks hear of the last step before they come to it."""
START_S = END_S = 120.0
LATE_S = 5.0
"""A rank that has written nothing for so long is not there: it died, or is not in yet."""


@dataclass(slots=True, kw_only=True)
class Watched:
    """What the ranks of a job have written so far."""

    folder: Path
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By the name of the file: numbers of processes come again within the hour."""
    _places: dict[str, int] = field(default_factory=dict)

    def read(self) -> None:
        """Read what is new."""
        for path in self.folder.glob("*.jsonl"):
            with path.open() as log:
                log.seek(self._places.get(path.stem, 0))
                text = log.read()  # at once: what is written meanwhile may be the rest of a line
            whole = text[: text.rfind("\n") + 1]
            self._places[path.stem] = self._places.get(path.stem, 0) + len(whole)
            self.lines.setdefault(path.stem, []).extend(map(json.loads, whole.splitlines()))

    def ranks(self) -> dict[int, int]:
        """Return the rank of each process that makes steps now."""
        now_s = time.monotonic()
        ends = [(name, lines[-1]) for name, lines in self.lines.items() if lines]
        recent = [(name, end["rank"]) for name, end in ends if now_s - end["at_s"] < LATE_S and _is_alive(name)]
        return {int(name.partition("-")[0]): rank for name, rank in recent}

    @property
    def step(self) -> int:
        """The newest step; -1 as long as nobody has made one."""
        return max((int(lines[-1]["step"]) for lines in self.lines.values() if lines), default=-1)

    def history(self) -> list[dict[str, Any]]:
        """Return each step as those tell it who went on from it; raise where two of them tell different things.

        Who ended a step that was not the others' yet, and died, tells of one that counts no more: a later epoch made
        it anew. Where parameters are divided, a line is of one shard; here ``digests`` has all of them.
        """
        newest: dict[int, dict[str, Any]] = {}
        for line in (line for lines in self.lines.values() for line in lines):
            known = newest.get(line["step"])
            if known is None or line["epoch"] > known["epoch"]:
                known = newest[line["step"]] = line | {"digests": {}}
            if line["epoch"] < known["epoch"]:
                continue
            told = known["digests"].setdefault(line.get("shard", 0), line["digest"])
            if (line["counted"], line["digest"]) != (known["counted"], told):
                raise SystemExit(f"Ranks differ after step {line['step']}: {known} and {line}")
        if sorted(newest) != list(range(len(newest))):
            raise SystemExit("Steps are missing")
        return [newest[step] for step in range(len(newest))]


def _is_alive(name: str) -> bool:
    """Whether the process lives that has written a file: another one that has got its number began later."""
    pid, _, opened_ns = name.partition("-")
    try:
        process = psutil.Process(int(pid))
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() < int(opened_ns) / 1e9)
    except psutil.NoSuchProcess:
        return False


@dataclass(slots=True, kw_only=True)
class Kills:
    """Whom the harness killed."""

    at_s: list[float] = field(default_factory=list)
    ranks: Counter[int] = field(default_factory=Counter)
    num_postponed: int = 0
    """How often a kill had to wait until all ranks were there again."""


def play(job: subprocess.Popen[bytes], watched: Watched, options: argparse.Namespace) -> Kills:
    """Kill until the time is over."""
    kills, chance = Kills(), random.Random(options.seed)
    start_s = time.monotonic() + START_S
    while watched.step < 0:
        if job.poll() is not None or time.monotonic() > start_s:
            raise SystemExit(
                f"The job made no step within {START_S:g} s; its ranks say why in {watched.folder}/job.log"
            )
        time.sleep(0.5)
        watched.read()
    began_s = time.monotonic()
    due_s, was_late = began_s + options.every, False
    while time.monotonic() - began_s < 60 * options.minutes and len(kills.at_s) != options.kills:
        time.sleep(max(0.02, min(0.5, due_s - time.monotonic())))
        watched.read()
        if job.poll() is not None:
            raise SystemExit(f"The job ended with {job.returncode} after {len(kills.at_s)} kills")
        if time.monotonic() < due_s:
            continue
        ranks = watched.ranks()
        if len(ranks) < options.ranks:
            kills.num_postponed += not was_late
            was_late = True
            continue
        pid = chance.choice(sorted(ranks, key=lambda one: ranks[one]))
        kills.ranks[ranks[pid]] += 1
        kills.at_s.append(time.monotonic())
        victim = psutil.Process(pid)
        victim.kill()
        victim.wait(END_S)  # as long as it dies, it would count as one that is there
        due_s, was_late = max(due_s + options.every, time.monotonic() + LATE_S), False
    end_s = time.monotonic() + END_S
    # Who was killed last would come too late for a job that ended before. That a step had all batches does not say that
    # it is back: where it died after its gradients had been added, the new epoch makes that step.
    while len(watched.ranks()) < options.ranks and time.monotonic() < end_s:
        time.sleep(0.1)
        watched.read()
    return kills


def pauses_s(history: list[dict[str, Any]], kills: Kills) -> list[float]:
    """Return for each kill how long it was until a step without the killed rank had ended."""
    found = []
    for at_s in kills.at_s:
        after = [one for one in history if one["at_s"] > at_s]
        epoch = next((one["epoch"] for one in reversed(history) if one["at_s"] <= at_s), 0)
        found.append(next((one["at_s"] - at_s for one in after if one["epoch"] > epoch), float("nan")))
    return found


def measure(history: list[dict[str, Any]], num_ranks: int) -> dict[str, float]:
    """Return what the kills cost."""
    pairs = list(pairwise(history))
    whole = [
        after["at_s"] - before["at_s"]
        for before, after in pairs
        if before["epoch"] == after["epoch"] and len(after["counted"]) == num_ranks
    ]
    step_s, took_s = statistics.median(whole), history[-1]["at_s"] - history[0]["at_s"]
    batches = sum(len(one["counted"]) for one in history[1:]) / num_ranks
    changes = [after["at_s"] - before["at_s"] for before, after in pairs if before["epoch"] != after["epoch"]]
    return {
        "step_s": step_s,
        "took_s": took_s,
        "goodput": (len(history) - 1) * step_s / took_s,
        "goodput_in_batches": batches * step_s / took_s,
        "lost_to_changes": sum(each - step_s for each in changes) / took_s,
    }


def replay(program: Any, history: list[dict[str, Any]]) -> list[str]:
    """Train in this process on what counted, and return the hash of all parameters; of each shard, if there are."""
    torch.set_num_threads(1)
    model = program.make_model()
    optimizer = kills_task.make_optimizer(model.parameters())
    replay_step = getattr(program, "replay_step", kills_task.replay_step)
    digests_of = getattr(program, "digests", lambda whole: [kills_task.digest(whole.parameters())])
    found: list[str] = []
    for line in history:
        replay_step(model, optimizer, line["counted"], line["step"])
        found = digests_of(model)
        if any(found[shard] != told for shard, told in line["digests"].items()):
            raise SystemExit(f"The replay differs after step {line['step']}, in which {line['counted']} counted")
    return found


def run(options: argparse.Namespace, launcher: Sequence[str]) -> dict[str, Any]:
    """Run the job under ``launcher``, kill, measure and replay."""
    folder: Path = options.output or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    command = ["run", "--ranks", str(options.ranks), "--elastic", "--restarts", "100000", "--restart-period", "30"]
    watched = Watched(folder=folder)
    with (folder / "job.log").open("wb") as log:
        job = subprocess.Popen(
            [*launcher, *command, str(options.program), str(folder)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            kills = play(job, watched, options)
            (folder / "stop.new").write_text(str(watched.step + STEPS_TO_THE_END))
            (folder / "stop.new").rename(folder / "stop")
            status = job.wait(END_S)
        finally:
            job.terminate()
            job.wait()
    watched.read()
    history = watched.history()
    paused = sorted(pauses_s(history, kills))
    result = {
        "program": options.program.name,
        "status": status,
        "ranks": options.ranks,
        "steps": len(history),
        "kills": len(kills.at_s),
        "kills_of_rank": dict(sorted(kills.ranks.items())),
        "postponed": kills.num_postponed,
        "epochs": history[-1]["epoch"],
        **measure(history, options.ranks),
        "pause_s": {"median": statistics.median(paused), "longest": paused[-1]} if paused else None,
        "digests": [told for _, told in sorted(history[-1]["digests"].items())],
        "digests_of_replay": replay(kills_task.load(options.program), history),
        "machine": f"{platform.platform()}, {os.cpu_count()} CPUs, torch {torch.__version__}",
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def main(arguments: Sequence[str] | None = None, launcher: Sequence[str] | None = None) -> dict[str, Any]:
    """Do all that, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds from one kill to the next")
    parser.add_argument("--kills", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for what ranks write and for result.json")
    options = parser.parse_args(arguments)
    return run(options, launcher or [str(Path(sys.executable).with_name("syncline"))])


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
