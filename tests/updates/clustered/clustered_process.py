"""Ranks as processes whose temporary server is killed in a chosen state of the protocol, and what came of it.

Processes are forked from one that has imported torch already, so that a run takes a second and not ten.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

import syncline
from syncline.updates.clustered.driver import Driver
from syncline.updates.clustered.instructions import Send
from syncline.updates.clustered.messages import Agreed
from syncline.updates.clustered.server import ServerState

DEADLINE_S = 60.0
FLUSH_S = 0.05
FROZEN_S = 14.0
"""Longer than a fabric waits for a silent peer."""
DETECTION_S = 11.0
CLUSTERS = ((0, 1, 2), (3, 4))
NUM_STEPS = 14
SECOND_STATES = {ServerState.LEVELLING, ServerState.FETCHING}
"""States that exist only after another server died while it handed something out."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What is to happen in a run."""

    state: str
    nth: int
    """How many times a server must have been seen in that state before one is killed."""
    seed: int
    contribution: str = "uniform"
    fate: str = "kill"
    """Or "freeze": stopped until all others have given it up, then woken."""


class Killer:
    """Watches this rank's driver, and kills the process when its time has come. One rank dies of each cause."""

    def __init__(self, driver: Driver, assignment: Assignment, folder: Path) -> None:
        self._driver = driver
        self._state = ServerState(assignment.state)
        self._nth = assignment.nth
        self._folder = folder
        self._fate = assignment.fate
        self._num_seen = 0
        self._is_dying = False
        self._perform = driver._perform
        driver._perform = self.perform

    def perform(self, instructions) -> None:
        if self._is_dying:
            return
        if self._state in SECOND_STATES and self._dies_handing_out(instructions):
            return
        if any(server.state is self._state for server in self._driver._node.servers.values()):
            self._num_seen += 1
            is_second = self._state in SECOND_STATES
            if self._num_seen >= (1 if is_second else self._nth) and self._claim("state"):
                self._perform(instructions[: self._nth % (len(instructions) + 1)])
                self._die()
                return
        self._perform(instructions)

    def _dies_handing_out(self, instructions) -> bool:
        """Let a server die when it has handed an entry to one receiver only."""
        sends = [
            one
            for one in instructions
            if isinstance(one, Send) and isinstance(one.envelope.message, Agreed) and one.envelope.message.index >= 4
        ]
        wanted = self._state is ServerState.LEVELLING or any(
            self._driver._part.agenda.entry(one.envelope.message.index).is_exchange for one in sends
        )
        if not sends or not wanted or not self._claim("first"):
            return False
        self._perform(sends[:1] if self._state is ServerState.LEVELLING else [])
        self._die()
        return True

    def _claim(self, cause: str) -> bool:
        try:
            os.close(os.open(self._folder / cause, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _die(self) -> None:
        """Let what was said leave, then end (or stand still) without a word."""
        if self._fate == "freeze":
            asyncio.get_running_loop().call_later(FLUSH_S, os.kill, os.getpid(), signal.SIGSTOP)
            return
        self._is_dying = True
        asyncio.get_running_loop().call_later(FLUSH_S, os.kill, os.getpid(), signal.SIGKILL)


def warm_up() -> None:
    """Import, in the process that all ranks are forked from, what torch and we import when it is first used."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    assert syncline.init is not None
    assert syncline.distribute is not None


warm_up()


def run_rank(rank: int, port: int, assignment: Assignment, folder: Path) -> None:
    """Train on this rank, and write down what came of it."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="5", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    outcome: dict[str, Any] = {}
    try:
        outcome = train(rank, assignment, folder)
    except BaseException as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"rank{rank}.json").write_text(json.dumps(outcome))


def train(rank: int, assignment: Assignment, folder: Path) -> dict[str, Any]:
    rule = syncline.Clustered(
        period=2, reelect_every=2, clusters=CLUSTERS, contribution=assignment.contribution, seed=assignment.seed
    )
    with syncline.init(timeout=20) as fleet:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
        model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), rule)
        fleet.barrier()
        Killer(optimizer.training.updater._driver, assignment, folder)
        generator = torch.Generator().manual_seed(rank)
        gaps, last = [], time.monotonic()
        for _ in range(NUM_STEPS):
            inputs = torch.randn(8, 64, generator=generator)
            (model(inputs) - inputs.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        statistics = optimizer.statistics()
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    return {
        "digest": digest.hexdigest()[:16],
        "longest_gap_s": max(gaps),
        "servers": statistics.servers,
        "term": statistics.term,
        "dead": statistics.dead,
        "num_replaced": statistics.num_replaced_servers,
    }


def start_forkserver() -> Any:
    """Start the process that ranks are forked from; it finds this module by PYTHONPATH alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["clustered_process"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        forkserver.ensure_running()
    finally:
        os.environ["PYTHONPATH"] = before or ""
    return context


def run_all(assignment: Assignment, folder: Path) -> list[dict[str, Any] | None]:
    """Run the ranks as processes; return what each wrote down, None for those who were killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = start_forkserver()
    processes = [context.Process(target=run_rank, args=(rank, port, assignment, folder)) for rank in range(5)]
    deadline = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            process.start()
        if assignment.fate == "freeze":
            _wake_later(processes, folder)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not hanging, f"ranks {hanging} hang: {assignment}"
    finally:
        for process in processes:
            with contextlib.suppress(AttributeError):
                process.kill()
                process.join()
    return [_read(folder / f"rank{rank}.json") for rank in range(5)]


def _wake_later(processes: list[Any], folder: Path) -> None:
    """Wake whoever stands still, once the others have given him up."""
    start_s = time.monotonic()
    while not (folder / "state").exists() and time.monotonic() < start_s + DEADLINE_S / 2:
        time.sleep(0.1)
    time.sleep(FROZEN_S)
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)


def check(outcomes: list[dict[str, Any] | None], assignment: Assignment) -> dict[str, Any]:
    """Raise unless the survivors went on, alike within a cluster, within 5 s; return what happened."""
    living = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    errors = {rank: outcome["error"] for rank, outcome in living.items() if "error" in outcome}
    frozen = []
    if assignment.fate == "freeze":  # whoever was given up must stop, and say why
        frozen = [rank for rank, error in errors.items() if error.startswith(("PeerLostError", "UpdateError"))][:1]
        living = {rank: outcome for rank, outcome in living.items() if rank not in frozen}
        errors = {rank: error for rank, error in errors.items() if rank not in frozen}
    assert not errors, f"{assignment}: {errors}"
    for ranks in CLUSTERS:
        ends = {living[rank]["digest"] for rank in ranks if rank in living}
        assert len(ends) <= 1, f"{assignment}: cluster {ranks} ended with {ends}"
    assert len({(tuple(outcome["servers"]), outcome["term"]) for outcome in living.values()}) == 1, assignment
    longest_s = max(outcome["longest_gap_s"] for outcome in living.values())
    limit_s = 5 + (DETECTION_S if frozen else 0)
    assert longest_s < limit_s, f"{assignment}: {longest_s:.1f} s without a step"
    dead = [rank for rank, outcome in enumerate(outcomes) if outcome is None or rank in frozen]
    return {**asdict(assignment), "dead": dead, "longest_gap_s": longest_s}


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
