"""Ranks as processes whose temporary server is killed in a chosen state of the protocol, and what came of it.

The ranks play (see `clustered_play`) and report; this process kills, and waits for reports alone. Processes are forked
from one that has imported torch already, so that a run takes a second and not ten.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch
from clustered_play import SECOND_STATES, Actor, Playwright

import syncline
from rank_nursery import warm_up
from rank_scripts import reserved_port
from syncline.updates.clustered import rule as clustered_rule
from syncline.updates.clustered.messages import Enter, Instruction
from syncline.updates.clustered.node import Node
from syncline.updates.clustered.server import ServerState

FOLDERS = (str(Path(__file__).parent), str(Path(__file__).parents[2]))
DEADLINE_S = 120.0
DETECTION_S = 10.0
"""How long a fabric waits for a peer that is silent."""
NEVER_S = 600.0
"""Longer than a run may take: who is killed is known by the kernel, and nobody waits for a deadline."""
CLUSTERS = ((0, 1, 2), (3, 4))
NUM_STEPS = 14


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What is to happen in a run."""

    state: str
    seed: int
    is_literal: bool = False
    fate: str = "kill"
    """Or "freeze": stopped until all others have given it up, then woken."""

    @property
    def num_deaths(self) -> int:
        """How many are killed."""
        return 2 if ServerState(self.state) in SECOND_STATES else 1


@dataclass(frozen=True, kw_only=True)
class Entered:
    """A rank holds a record."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Buried:
    """A rank goes on without others."""

    dead: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A rank does nothing any more: it is to die, once ``witness`` holds record ``index``."""

    state: str
    index: int
    witness: int | None


class Stage:
    """Attends to one rank's driver: lets its actor act, and reports. On the loop's thread, the outcome apart."""

    def __init__(self, rank: int, assignment: Assignment, reports: connection.Connection) -> None:
        self._rank = rank
        self._assignment = assignment
        self._reports = reports
        self._lock = threading.Lock()
        self._actor: Actor | None = None
        self._dead: frozenset[int] = frozenset()

    def report(self, report: object) -> None:
        """Tell the one who kills."""
        with self._lock:
            self._reports.send(report)

    def intercept(self, node: Node, instructions: Sequence[Instruction]) -> list[Instruction]:
        """Return what is to be carried out."""
        if self._actor is None:
            self._actor = Actor(self._write(node), self._rank)
        was_struck = self._actor.struck
        done = self._actor.act(node, instructions)
        for one in done:
            if isinstance(one, Enter):
                self.report(Entered(index=one.record.index))
        if self._dead != node.view.dead:
            self._dead = frozenset(node.view.dead)
            self.report(Buried(dead=self._dead))
        struck = self._actor.struck
        if struck is not None and was_struck is None:
            state = "handing out" if struck.state is None else struck.state.value
            self.report(Struck(state=state, index=struck.index, witness=struck.witness))
        return done

    def _write(self, node: Node) -> Any:
        view = node.view
        playwright = Playwright(
            self._assignment.seed,
            job=view.job,
            clusters=view.clusters(0),
            record_schedule=node.record_schedule,
        )
        return playwright.write(ServerState(self._assignment.state))


warm_up()  # in the process that all ranks are forked from, which imports this module


def run_rank(rank: int, port: int, assignment: Assignment, reports: connection.Connection) -> None:
    """Train on this rank, and report what came of it."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="5", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    stage = Stage(rank, assignment, reports)
    try:
        outcome = train(rank, assignment, stage)
    except BaseException as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    stage.report(outcome)


def train(rank: int, assignment: Assignment, stage: Stage) -> dict[str, Any]:
    clustered_rule.SEED = assignment.seed
    kind = syncline.Clustered.literal if assignment.is_literal else syncline.Clustered
    rule = kind(period=2, reelect_every=2, clusters=CLUSTERS)
    silence_s = DETECTION_S if assignment.fate == "freeze" else NEVER_S
    with syncline.init(timeout_s=NEVER_S, silence_s=silence_s) as fleet:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
        model, optimizer = syncline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.05), rule, samples="batch"
        )
        fleet.barrier()
        driver = optimizer.training.updater._driver
        perform = driver._perform
        driver._perform = lambda instructions: perform(stage.intercept(driver._node, instructions))
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
    """Start the process that ranks are forked from; it finds this module, and what it imports, by PYTHONPATH alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["clustered_process"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*FOLDERS, before]))
    try:
        forkserver.ensure_running()
    finally:
        os.environ["PYTHONPATH"] = before or ""
    return context


@dataclass(kw_only=True)
class Theatre:
    """All processes of a run, and what they reported; kills, or freezes and wakes, whoever was struck."""

    assignment: Assignment
    processes: list[Any]
    reports: dict[connection.Connection, int]
    """Which rank's each is; those that are still open."""
    outcomes: dict[int, dict[str, Any]] = field(default_factory=dict)
    struck: dict[int, Struck] = field(default_factory=dict)
    victims: list[int] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    _entered: dict[int, int] = field(default_factory=dict)
    _dead: dict[int, frozenset[int]] = field(default_factory=dict)

    def watch(self) -> None:
        """Hear reports until all processes have ended."""
        deadline = time.monotonic() + DEADLINE_S
        while self.reports:
            ready = connection.wait(list(self.reports), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(self.reports.values())} hang: {self.assignment}, {self.struck}"
            for pipe in ready:
                self._read(pipe)
            self._strike()
            self._wake()

    def _read(self, pipe: connection.Connection) -> None:
        rank = self.reports[pipe]
        try:
            report = pipe.recv()
        except (EOFError, ConnectionResetError):
            del self.reports[pipe]
            return
        if isinstance(report, Entered):
            self._entered[rank] = report.index
        elif isinstance(report, Buried):
            self._dead[rank] = report.dead
        elif isinstance(report, Struck):
            self.struck[rank] = report
        else:
            self.outcomes[rank] = report

    def _strike(self) -> None:
        for rank, struck in self.struck.items():
            is_due = struck.witness is None or self._entered.get(struck.witness, -1) >= struck.index
            if is_due and rank not in self.victims:
                self.victims.append(rank)
                if self.assignment.fate == "freeze":
                    self.frozen.add(rank)
                    os.kill(self.processes[rank].pid, signal.SIGSTOP)
                else:
                    self.processes[rank].kill()

    def _wake(self) -> None:
        for rank in tuple(self.frozen):
            others = set(self.reports.values()) - self.frozen
            if all(rank in self._dead.get(other, ()) for other in others):
                self.frozen.remove(rank)
                os.kill(self.processes[rank].pid, signal.SIGCONT)


def run_all(assignment: Assignment) -> Theatre:
    """Run the ranks as processes, and return what they reported."""
    context = start_forkserver()
    theatre = Theatre(assignment=assignment, processes=[], reports={})
    with reserved_port() as port, ending(theatre):
        for rank in range(5):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(rank, port, assignment, theirs))
            process.start()
            theirs.close()
            theatre.processes.append(process)
            theatre.reports[ours] = rank
        theatre.watch()
    return theatre


@contextmanager
def ending(theatre: Theatre) -> Iterator[None]:
    """End all processes of a run, whatever happens."""
    try:
        yield
    finally:
        for process in theatre.processes:
            process.kill()
            process.join()
        for pipe in theatre.reports:
            pipe.close()


def check(theatre: Theatre) -> dict[str, Any]:
    """Raise unless all died who should, and the survivors went on, alike within a cluster; say how it was.

    Whoever was frozen, and given up meanwhile, must stop and say why.
    """
    assignment = theatre.assignment
    victims, outcomes = theatre.victims, theatre.outcomes
    is_frozen = assignment.fate == "freeze"
    for rank in victims:
        error = outcomes.pop(rank, {"error": ""})["error"]
        assert not is_frozen or error.startswith(("PeerLostError", "QuorumLostError", "UpdateError")), (
            f"{assignment}: {error}"
        )
    errors = {rank: outcome["error"] for rank, outcome in outcomes.items() if "error" in outcome}
    assert not errors, f"{assignment}: {errors}"
    states = [theatre.struck[rank].state for rank in victims]
    assert len(states) == assignment.num_deaths, f"{assignment}: died {states}"
    assert states[-1] == assignment.state, f"{assignment}: died {states}"
    assert sorted([*victims, *outcomes]) == list(range(5)), f"{assignment}: {victims} died, {sorted(outcomes)} ended"
    for ranks in CLUSTERS:
        ends = {outcomes[rank]["digest"] for rank in ranks if rank in outcomes}
        assert len(ends) <= 1, f"{assignment}: cluster {ranks} ended with {ends}"
    assert len({(tuple(outcome["servers"]), outcome["term"]) for outcome in outcomes.values()}) == 1, assignment
    longest_s = max(outcome["longest_gap_s"] for outcome in outcomes.values())
    return {**asdict(assignment), "dead": victims, "longest_gap_s": longest_s}
