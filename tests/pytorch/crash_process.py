"""Saves checkpoints in forked processes that are ended, or refused, at each of their calls; looks what is left.

``crash_process.py FOLDER SCENARIO:KIND:EVERY ...``, with crash_points.c preloaded, tries every EVERY-th call and prints
what it counted, one JSON a line. All of them, some minutes:

    cc -shared -fPIC -o /tmp/crash_points.so tests/pytorch/crash_points.c -ldl
    LD_PRELOAD=/tmp/crash_points.so PYTHONPATH=tests python tests/pytorch/crash_process.py /tmp/crashes all
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline
from syncline.errors import CheckpointError
from thread_fleets import run_fleets

KINDS = {"kill": (0, False), "io_error": (errno.EIO, False), "full_disk": (errno.ENOSPC, True)}
OLDER, OLD, NEW, NEXT = 1.0, 2.0, 3.0, 4.0
shim = ctypes.CDLL(None)
shim.crash_points_calls.restype = ctypes.c_char_p


def arm(folder: Path | None, number: int = 0, failure: int = 0, *, stays: bool = False) -> None:
    shim.crash_points_arm(os.fsencode(folder or ""), ctypes.c_long(number), failure, int(stays))


def calls() -> list[str]:
    return shim.crash_points_calls().decode().splitlines()


def make(value: float) -> tuple[nn.Module, Any]:
    """Return a model and an optimizer all of whose values tell ``value``."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=value)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        moments = {key: torch.full_like(parameter, value) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(value), **moments}
    return model, optimizer


def values_of(model: nn.Module, optimizer: Any) -> set[float]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value.reshape(-1) for value in (*model.parameters(), *states)]
    return {*torch.cat(tensors).tolist(), float(optimizer.param_groups[0]["lr"])}


def save_alone(path: Path, value: float) -> None:
    syncline.save_checkpoint(path, *make(value), extra=value)


def save_kept(path: Path, value: float) -> None:
    """In the background, with two that are kept."""
    work = syncline.save_checkpoint(path, *make(value), extra=value, iteration=int(value), keep=2, wait=False)
    assert work is not None
    work.wait()


def save_together(path: Path, value: float) -> None:
    """By two ranks, in the background."""

    def body(fleet: Any) -> None:
        model, optimizer = make(value)
        model, optimizer = syncline.distribute(model, optimizer, syncline.Sharded(bucket_bytes=64), fleet=fleet)
        work = syncline.save_checkpoint(path, model, optimizer, extra=value, iteration=int(value), keep=2, wait=False)
        assert work is not None
        work.wait()

    run_fleets(2, body)


SCENARIOS: dict[str, tuple[Callable[[Path, float], None], tuple[float, ...]]] = {
    "first": (save_alone, ()),
    "replaced": (save_alone, (OLDER, OLD)),
    "kept": (save_kept, (OLDER, OLD)),
    "two_ranks": (save_together, (OLDER, OLD)),
}


def look(path: Path) -> float | None:
    """Return which checkpoint is found, whole to the last value."""
    model, optimizer = make(0.0)
    begin = syncline.resume(path, model, optimizer)
    if begin.path is None:
        return None
    assert values_of(model, optimizer) == {begin.extra}, f"torn: {values_of(model, optimizer)}"
    if int(begin.extra) != NEXT:
        assert syncline.latest_checkpoint(path) == begin.path
    return float(begin.extra)


def run_child(folder: Path, number: int, kind: str, save: Callable[[Path, float], None]) -> tuple[str, list[str]]:
    """Save once in a process of its own; return how it ended, and the calls that were made if it tells."""
    failure, stays = KINDS[kind]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        arm(folder, number, failure, stays=stays)
        try:
            save(folder / "run1", NEW)
            ended = "saved"
        except CheckpointError:
            ended = "refused"
        except BaseException as error:
            ended = f"{type(error).__name__}: {error}"
        made = calls()
        arm(None)
        os.write(writer, json.dumps([ended, made]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        told = answers.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return "killed", []
    assert status == 0, status
    ended, made = json.loads(told)
    return ended, made


def check_synced(made: list[str]) -> None:
    """Every file was forced to the disk before the folder got its name, and so was the name."""
    last = next(number for number in reversed(range(len(made))) if made[number].startswith("rename "))
    named = max(
        number for number in range(last + 1) if made[number].startswith("rename ") and ".removed" not in made[number]
    )
    written = {line.split(" ")[1] for line in made[:named] if line.startswith("write ")}
    assert written
    for path in written:
        forced = max((n for n, line in enumerate(made) if line == f"fsync {path}"), default=-1)
        assert max(n for n, line in enumerate(made) if line == f"write {path}") < forced < named, path
    parent = made[named].split(" ")[1].rpartition("/")[0]
    assert f"fsync {parent}" in made[named:], "the folder's name is forced to the disk too"


def try_calls(base: Path, scenario: str, kind: str, every: int) -> dict[str, int]:
    """Try every ``every``-th call; return how often a save ended how, and which checkpoint was there then."""
    save, before = SCENARIOS[scenario]
    template, folder = base / "template", base / "work"
    template.mkdir(parents=True)
    for value in before:
        save(template / "run1", value)
    shutil.copytree(template, folder)
    ended, made = run_child(folder, 0, kind, save)
    assert ended == "saved"
    check_synced(made)
    counts: Counter[str] = Counter()
    for number in range(1, len(made) + 1, every):
        shutil.rmtree(folder)
        shutil.copytree(template, folder)
        ended, _ = run_child(folder, number, kind, save)
        found = look(folder / "run1")
        place = f"{scenario}, call {number} ({made[number - 1]}), {kind}: {ended}, and then there is {found}"
        assert ended in {"saved", "refused", "killed"}, place
        assert found == NEW or (ended != "saved" and found == (before[-1] if before else None)), place
        counts[f"{ended}, {'new' if found == NEW else 'old'}"] += 1
        save(folder / "run1", NEXT)
        assert look(folder / "run1") == NEXT, place
        left = [path.name for path in folder.rglob("*") if path.name.endswith((".writing", ".removed"))]
        assert not left, f"{place}; the next save leaves {left}"
    return {"calls": len(made), "tried": counts.total(), **counts}


def main(base: Path, runs: list[str]) -> None:
    """Print the counts of each run."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # so that a process that collects garbage copies only its own
    every_run = [f"{scenario}:{kind}:1" for scenario in SCENARIOS for kind in KINDS]
    for number, run in enumerate(every_run if runs == ["all"] else runs):
        scenario, kind, every = run.split(":")
        counts = try_calls(base / str(number), scenario, kind, int(every))
        print(json.dumps({"scenario": scenario, "kind": kind, **counts}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
