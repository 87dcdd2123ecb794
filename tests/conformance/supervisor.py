"""Runs groups of ranks, one group for each rule: forks them, hands them programs, and replaces a group that hangs.

``python supervisor.py FOLDER``: reads ``FOLDER/plan.json``, a list of ``{"rule", "world", "programs"}``, and leaves the
results of each rank in the folder. All ranks are forked from one process that has imported torch.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from declarations import ALONE, all_programs
from rank_worker import PROGRAM_TIMEOUT_S, serve
from torch.distributed import TCPStore

import syncline

MAX_GROUPS_AT_ONCE = 2
PROGRAMS_PER_JOB = 12
"""A job that goes on need not plan its collectives anew; one ends earlier if a program of it fails."""


@dataclass(slots=True)
class _Rank:
    pid: int
    orders: TextIO
    answers: TextIO


class Group:
    """The processes of one rule."""

    def __init__(self, folder: Path, rule: str, world: int) -> None:
        self._folder = folder
        self._rule = rule
        self._world = world
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = None
        self._num_jobs = 0

    def run(self, programs: list[str]) -> None:
        """Run the programs one after another; what hangs or dies takes its processes along, and new ones go on."""
        left = PROGRAMS_PER_JOB
        for name in programs:
            if not self._ranks:
                self._begin()
            left -= 1
            answers = self._run_one(name, is_last=left == 0 or name == programs[-1])
            if answers != {"done\n"} or left == 0:
                left = PROGRAMS_PER_JOB
                self._num_jobs += 1
            if "" in answers:
                self._end(signal.SIGKILL)
        self._end(signal.SIGTERM)

    def _begin(self) -> None:
        """Fork the ranks, and then, as a launcher does, serve the store where they meet: it has threads."""
        self._ranks = [self._fork(rank) for rank in range(1 if self._rule == ALONE else self._world)]
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _run_one(self, name: str, *, is_last: bool) -> set[str]:
        """Return what the ranks answered; one that hangs or dies answers with nothing."""
        assert self._store is not None
        deadline = time.monotonic() + PROGRAM_TIMEOUT_S
        for rank in self._ranks:
            rank.orders.write(f"{name} {self._store.port} {self._num_jobs} {int(is_last)}\n")
            rank.orders.flush()
        answers = set()
        for rank in self._ranks:
            left = max(0.0, deadline - time.monotonic())
            answers.add(rank.answers.readline() if select.select([rank.answers], [], [], left)[0] else "")
        return answers

    def _fork(self, rank: int) -> _Rank:
        orders, answers = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_rank(rank, orders[0], answers[1])
        os.close(orders[0])
        os.close(answers[1])
        return _Rank(pid, os.fdopen(orders[1], "w"), os.fdopen(answers[0]))

    def _be_rank(self, rank: int, orders: int, answers: int) -> None:
        status = 1
        try:
            output = os.open(self._folder / f"{self._rule}.{rank}of{self._world}.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with os.fdopen(orders) as told, os.fdopen(answers, "w") as answering:
                serve(self._folder, self._rule, rank, self._world, told, answering)
            status = 0
        finally:
            os._exit(status)

    def _end(self, number: int) -> None:
        for rank in self._ranks:
            rank.orders.close()
            rank.answers.close()
            os.kill(rank.pid, number)
            os.waitpid(rank.pid, 0)
        self._ranks, self._store = [], None


def warm_up() -> None:
    """Import what every rank would import for itself, some to compile a model, and find every program."""
    import torch._dynamo.backends.debugging
    import torch._inductor.compile_fx

    assert torch._inductor.compile_fx is not None
    assert all((syncline.init, syncline.distribute, syncline.AllReduce, syncline.Sharded))  # imported when named
    torch.set_num_threads(1)
    all_programs()
    gc.freeze()  # so that a rank that collects garbage copies only its own


def main(folder: Path) -> None:
    """Run all groups of the plan, a few at a time."""
    warm_up()
    plan: list[dict[str, Any]] = json.loads((folder / "plan.json").read_text())
    running = 0
    for group in plan:
        if running == MAX_GROUPS_AT_ONCE:
            os.wait()
            running -= 1
        if os.fork() == 0:
            status = 1
            try:
                Group(folder, group["rule"], group["world"]).run(group["programs"])
                status = 0
            finally:
                os._exit(status)
        running += 1
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
