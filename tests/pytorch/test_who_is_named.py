"""Whom the errors of the survivors name, for each rule and each fault: the rank at fault, first, with what it did.

All faults of a rule are tried at once, each in a job of its own, as most of their time they wait for a deadline. Jobs
start one after another, and go into the step of the fault together: none is late for want of a processor.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rank_scripts import Program, run_programs, run_script, script_environment
from syncline.errors import PeerLostError, SynclineError
from syncline.pytorch.checkpoint import save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.phased import phase
from syncline.topology import Topology
from syncline.updates import AllReduce, Clustered, Overlapped, Sharded, UpdateRule, messaging

WORLD, GUILTY, STEPS, AT = 4, 1, 4, 2
TIMEOUT_S = 5.0
ELASTIC_TIMEOUT_S = {"stops calling": 6.0, "saves alone": 6.0}
"""By fault that only a deadline shows: as long may survivors lack a processor before they count as lost themselves."""
HOSTS = """
topology: two-hosts
switch: core
children:
  - {host: a1, uplink: 1 Gbit/s, ranks: 2}
  - {host: b1, uplink: 1 Gbit/s, ranks: 2}
"""
RULES: dict[str, UpdateRule] = {
    "all-reduce": AllReduce(),
    "sharded": Sharded(),
    "sharded, overlap": Sharded(overlap_forward=True),
    "sharded, in backward": Sharded(step_in_backward=True),
    "sharded, replicated": Sharded(replicate="host"),
    "sharded, spares": Sharded(spares=1),
}
SURVIVING: dict[str, tuple[UpdateRule, dict[str, Any]]] = {
    "elastic all-reduce": (AllReduce(), {"elastic": True}),
    "elastic sharded": (Sharded(spares=1), {"elastic": True}),
    "overlapped": (Overlapped(period=3), {}),
    "clustered": (Clustered(clusters=2, period=3), {}),
}
"""Rules that go on without the rank at fault, and how they are asked to."""
ELASTIC = ("stops calling", "raises", "is killed", "leaves early", "saves alone")
GOING_ON = {
    "elastic all-reduce": ELASTIC,
    "elastic sharded": ELASTIC,
    "overlapped": ("raises", "is killed", "evaluates more"),
    "clustered": ("raises", "is killed", "evaluates more"),
}
"""By rule, the faults after which the others go on without the rank at fault, and know that it is lost."""
HARMLESS = {
    "overlapped": ("saves alone", "ends a period alone", "does not call step", "leaves early"),
    "clustered": ("saves alone", "ends a period alone"),
}
"""By rule, what one rank may do alone: all others end well."""
ENDING = {
    "overlapped": {"stops calling": "rank 1 (host memory) sent nothing of "},
    "clustered": {
        "stops calling": "rank 1 (host memory) did not deliver",
        "leaves early": "rank 1 (host memory) ended the training before rank ",
    },
}
"""By rule, after which faults the others end, and what their errors say.

Who hangs is named at the deadline, if that comes before the time after which a rank counts as stalled, as here: then
it would be left behind (``tests/updates/*/test_*_stalls.py``).
"""


class GuiltyError(Exception):
    """What the rank at fault raises, or ends with once the others have failed."""


@dataclass(slots=True, kw_only=True)
class Job:
    """What the ranks of one job share."""

    fault: str
    folder: Path
    may_go_on: threading.Event
    """Whether all jobs have come to the step of the fault."""
    has_come: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORLD + 1))
    others_are_done: threading.Event = field(default_factory=threading.Event)
    ends: dict[int, Any] = field(default_factory=dict)
    """By rank that is not at fault, its error, or whom it knows to be lost."""

    def end(self, rank: int, how: Any) -> None:
        """Take note of how a rank that is not at fault has ended."""
        self.ends[rank] = how
        if len(self.ends) == WORLD - 1:
            self.others_are_done.set()

    def pause(self) -> None:
        """Wait for the other jobs."""
        self.has_come.wait(60)
        assert self.may_go_on.wait(60)


def run_at_once(faults: Collection[str], folder: Path, run: Callable[[Job], list[Any]]) -> list[tuple[Job, list[Any]]]:
    """Run a job for each fault; return these, with what their ranks returned or ended with."""
    may_go_on, running = threading.Event(), []
    with ThreadPoolExecutor(len(faults)) as pool:
        try:
            for number, fault in enumerate(faults):
                job = Job(fault=fault, folder=folder / str(number), may_go_on=may_go_on)
                running.append((job, pool.submit(run, job)))
                job.has_come.wait(60)
        except threading.BrokenBarrierError as error:
            may_go_on.set()
            raise AssertionError(f"{job.fault}: before it {running[-1][1].result()}") from error
        finally:
            may_go_on.set()
        return [(job, future.result()) for job, future in running]


class Loop:
    """One rank's training; the rank at fault does something in its third step."""

    def __init__(self, fleet: Fleet, rule: UpdateRule, job: Job, **options: Any) -> None:
        torch.manual_seed(0)
        self.fleet = fleet
        self.job = job
        if options and fleet.rank == GUILTY:  # it is told by those who go on, before its own deadline
            fleet.communicator.timeout_s *= 3
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        self.model, self.optimizer = distribute(module, optimizer, rule, fleet=fleet, **options)
        self.synchronize = self.optimizer.synchronize

    def run(self, faults: dict[str, Callable[[Loop], None]]) -> None:
        """Train; ``faults`` has what happens in the step ``AT``, by where."""
        for number in range(STEPS):
            now = faults if number == AT else {}
            if number == AT:
                self.job.pause()
            if now.get("start", act_normally)(self) is StopIteration:
                return
            loss = self.model(torch.ones(2, 4)).sum()
            now.get("forward", act_normally)(self)
            if "backward" in now:
                self.model[0].weight.register_hook(lambda _: self.sleep())
            loss.backward()
            if now.get("step", act_normally)(self) is StopIteration:
                continue
            self.optimizer.step()
            self.optimizer.zero_grad()

    def sleep(self) -> None:
        """Do nothing until the others have given up."""
        assert self.job.others_are_done.wait(60)
        raise GuiltyError


class PhasedLoop:
    """The same of a pair's rank: of the ranks 0 to 3, ranks 0 and 1 are a pair, and 0 and 2 have the same stages."""

    sleep = Loop.sleep

    def __init__(self, fleet: Fleet, job: Job) -> None:
        torch.manual_seed(0)
        self.fleet = fleet
        self.job = job
        self._do: Callable[[Any], Any] = act_normally
        stages = [nn.Linear(4, 4) for _ in range(4)]
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: self._do(self))
        self.trainer = phase(stages, lambda some: torch.optim.SGD(some, 0.1), loss=nn.MSELoss(), fleet=fleet)
        self.synchronize = self.trainer.synchronize

    def run(self, faults: dict[str, Callable[[Any], Any]]) -> None:
        """Train; ``faults`` has what happens in the step ``AT``, by where."""
        for number in range(STEPS):
            now = faults if number == AT else {}
            if number == AT:
                self.job.pause()
            if now.get("start", act_normally)(self) is StopIteration:
                return
            self._do = now.get("forward", act_normally)
            self.trainer.step(torch.ones(2, 4), torch.ones(2, 4))


def act_normally(_: Any) -> Any:
    """Do nothing else."""


def stop(_: Loop) -> Any:
    """Leave the loop, or leave a call out."""
    return StopIteration


def fail(_: Loop) -> Any:
    """End with an exception."""
    raise GuiltyError("no such file")


def die(loop: Loop) -> Any:
    """Be killed: it tells nothing more, though its timers go on here, and all others lose it."""
    communicator = loop.fleet.communicator
    fabric = communicator._fabric

    def end() -> None:
        fabric.send_control = lambda *_: None
        fabric._leave(PeerLostError, "is lost: its process died or was killed")

    communicator._loop.call_soon(end)
    loop.sleep()


def save(loop: Loop) -> Any:
    """Save alone."""
    save_checkpoint(loop.job.folder, loop.model, loop.optimizer)


def evaluate(loop: Loop) -> Any:
    """Sum a loss that the others do not."""
    loop.fleet.all_reduce(torch.zeros(1))


def end_period(loop: Loop) -> Any:
    """End a period alone."""
    loop.optimizer.end_period()


FAULTS: dict[str, tuple[str, Callable[[Loop], Any], str]] = {
    "sleeps in forward": ("forward", Loop.sleep, "rank 1 (host "),
    "sleeps in backward": ("backward", Loop.sleep, "rank 1 (host "),
    "sleeps before step": ("step", Loop.sleep, "rank 1 (host "),
    "does not call step": ("step", stop, "step() must be called on every rank"),
    "stops calling": ("start", Loop.sleep, "rank 1 (host "),
    "raises": ("start", fail, "is lost: it ended with GuiltyError: no such file"),
    "is killed": ("start", die, "is lost: its process died or was killed"),
    "leaves early": ("start", stop, "left after 2 steps, and rank"),
    "saves alone": ("start", save, "save_checkpoint() must be called on every rank; rank 1 (host "),
    "evaluates more": ("start", evaluate, "all_reduce"),
    "ends a period alone": ("start", end_period, ""),
}
SYNCHRONOUS = tuple(fault for fault in FAULTS if fault != "ends a period alone")
FOUND_BY_ITSELF = {("sharded, in backward", "does not call step"): "is lost: it ended with UpdateError"}
"""Where the rank at fault has an error of its own before the others miss it."""


def check_names(job: Job, words: str) -> None:
    """See that all others have an error that names the rank at fault, first, and says what it did."""
    assert set(job.ends) == set(range(WORLD)) - {GUILTY}, f"{job.fault}: {job.ends}"
    for error in job.ends.values():
        assert isinstance(error, SynclineError), f"{job.fault}: {error!r}"
        about = f"{job.fault}: {error}"
        assert tuple(error.ranks_at_fault)[:1] == (GUILTY,), about
        assert re.findall(r"rank (\d) \(host", str(error))[0] == str(GUILTY), about
        assert words in str(error), about


def run_loops(run_fleets: Any, ranks: Any, job: Job, make: Callable[[Fleet], Any]) -> list[Any]:
    place, act, _ = FAULTS[job.fault]

    def body(fleet: Fleet) -> None:
        loop = make(fleet)
        if fleet.rank == GUILTY:
            loop.run({place: act})
            return
        try:
            loop.run({})
            loop.synchronize()
        except SynclineError as error:
            job.end(fleet.rank, error)
            raise

    return run_fleets(ranks, body, timeout_s=TIMEOUT_S, accept=(SynclineError, GuiltyError))


@pytest.mark.parametrize("rule", RULES)
def test_the_errors_of_all_survivors_name_the_rank_at_fault_first(rule: str, run_fleets: Any, tmp_path: Path) -> None:
    topology = Topology.parse(HOSTS, source="two-hosts")

    def run(job: Job) -> list[Any]:
        return run_loops(run_fleets, topology, job, lambda fleet: Loop(fleet, RULES[rule], job))

    # with whole gradients a step is each rank's own affair
    faults = [fault for fault in SYNCHRONOUS if (rule, fault) != ("all-reduce", "does not call step")]
    for job, _ in run_at_once(faults, tmp_path, run):
        check_names(job, FOUND_BY_ITSELF.get((rule, job.fault), FAULTS[job.fault][2]))


PHASED = {
    "sleeps in forward": "rank 1 (host memory) sent nothing ",
    "stops calling": "rank 1 (host memory) sent nothing ",
    "raises": "is lost: it ended with GuiltyError: no such file",
    "is killed": "is lost: its process died or was killed",
    "leaves early": "give all ",
    "evaluates more": "rank 1 (host memory) ",
}
"""What errors say of a rank of a pair; the partner hears of some first, and ranks of its side of others."""


def test_the_errors_of_all_pairs_name_the_rank_at_fault_first(run_fleets: Any, tmp_path: Path) -> None:
    def run(job: Job) -> list[Any]:
        return run_loops(run_fleets, WORLD, job, lambda fleet: PhasedLoop(fleet, job))

    for job, _ in run_at_once(PHASED, tmp_path, run):
        check_names(job, PHASED[job.fault])


def test_a_pair_names_who_holds_up_the_other_pair_on_which_it_depends(run_fleets: Any, tmp_path: Path) -> None:
    """Rank 3 waits for rank 2, that for an update with rank 0, and that for rank 1; rank 3 gives up first."""

    def run(job: Job) -> list[Any]:
        def make(fleet: Fleet) -> PhasedLoop:
            loop = PhasedLoop(fleet, job)
            if fleet.rank == 3:
                loop.trainer._driver._timeout_s *= 0.75  # from half of the others' on it knows for whom they wait
            return loop

        return run_loops(run_fleets, WORLD, job, make)

    ((job, _),) = run_at_once(["sleeps in forward"], tmp_path, run)
    check_names(job, "rank 1 (host memory) sent nothing ")


@pytest.mark.parametrize("rule", SURVIVING)
def test_survivors_that_go_on_know_who_is_lost(
    rule: str,
    run_fleets: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else is; and if the rank at fault is told, its error names itself."""
    monkeypatch.setattr(messaging, "STALL_GRACE_S", 1.5)
    update, options = SURVIVING[rule]
    topology = Topology.parse(HOSTS, source="two-hosts")

    def run(job: Job) -> list[Any]:
        place, act, _ = FAULTS[job.fault]

        def body(fleet: Fleet) -> None:
            rank = fleet.rank  # at the start
            loop = Loop(fleet, update, job, **options)
            if options:
                loop.optimizer.on_membership_change(lambda change: told.extend(change.lost))
            told: list[int] = []
            if rank == GUILTY:
                loop.run({place: act})
                return
            try:
                loop.run({})
                loop.optimizer.synchronize()
                counted: Any = loop.optimizer.statistics()
                loop.fleet.close()
            except SynclineError as error:
                job.end(rank, error)
                raise
            job.end(rank, tuple(told) if options else counted.lost if rule == "overlapped" else counted.dead)

        timeout_s = ELASTIC_TIMEOUT_S.get(job.fault, 60.0) if options else TIMEOUT_S
        return run_fleets(topology, body, timeout_s=timeout_s, accept=(SynclineError, GuiltyError))

    lost, harmless, ending = GOING_ON[rule], HARMLESS.get(rule, ()), ENDING.get(rule, {})
    for job, results in run_at_once((*lost, *harmless, *ending), tmp_path, run):
        if job.fault in ending:
            check_names(job, ending[job.fault])
            continue
        known = {(GUILTY,)} if job.fault in lost else {(), (GUILTY,)}  # who has left in good order may count as lost
        assert set(job.ends.values()) <= known, f"{job.fault}: {job.ends}, {results}"
        assert len(job.ends) == WORLD - 1, f"{job.fault}: {results}"
        if isinstance(results[GUILTY], SynclineError):
            assert results[GUILTY].ranks_at_fault[:1] == (GUILTY,), f"{job.fault}: {results[GUILTY]}"
    if options:
        said = capsys.readouterr().err
        assert all(FAULTS[fault][2] in said for fault in ("raises", "is killed"))


GROUPS = {
    "data_parallel | hang": "rank 1 (host h1) sent nothing of all_reduce for ",
    "data_parallel | evaluate": "rank 1 (host h1) called all_reduce of 3 x float32",
    "data_parallel | leave": "rank 1 (host h1) left after ",
    "data_parallel | stop": "rank 1 (host h1) sent nothing for 2.",
    "sharded | hang": "rank 1 (host h1) sent nothing of all_gather for ",
    "sharded | evaluate": "rank 1 (host h1) called all_reduce of 3 x float32",
    "sharded | leave": "rank 1 (host h1) sent nothing of all_gather for ",
}
"""What errors say with DDP and FSDP2 on process groups; of two calls that differ, the lower rank's stands first."""


LAUNCHED = {
    "hangs": "ended by the launcher",
    "raises": "exit code 1",
    "evaluates more": "exit code 1",
    "is killed": "killed by SIGKILL",
    "is stopped": "ended by the launcher",
    "leaves early": "which ended with exit code 0",
}
"""What the launcher's report says of the rank at fault, whom it names first."""


def run_launched() -> list[Any]:
    script = str(Path(__file__).with_name("named_launched_rank.py"))
    environment = script_environment() | {"SYNCLINE_TIMEOUT": "2", "SYNCLINE_SILENCE": "2"}
    return run_programs(
        [Program(("-m", "syncline", "run", "--ranks", "3", script, fault), environment) for fault in LAUNCHED]
    )


def test_process_groups_and_the_closing_report_of_the_launcher_name_the_rank_at_fault(tmp_path: Path) -> None:
    """The report names it first. Both are tried at once: they wait most of the time."""
    script = Path(__file__).with_name("named_group_process.py")
    with ThreadPoolExecutor(2) as pool:
        launched = pool.submit(run_launched)
        ends = run_script(script, 3, str(tmp_path), extra={"SYNCLINE_SILENCE": "2"})
    assert ends[GUILTY][0] == -signal.SIGKILL
    for rank in (0, 2):
        said = dict(re.findall(r"^(\w+ \| \w+) \| (.*)$", ends[rank][1], re.MULTILINE))
        assert said.keys() == GROUPS.keys(), ends[rank][1]
        for fault, words in GROUPS.items():
            assert words in said[fault], f"rank {rank}, {fault}: {said[fault]}"
            assert said[fault].startswith("rank 1 | ") or fault.endswith("evaluate")
    for (fault, fate), job in zip(LAUNCHED.items(), launched.result(), strict=True):
        report = job.stdout[job.stdout.index("the job failed") :]
        assert re.match(rf"the job failed: rank {GUILTY}, {fate}", report), f"{fault}: {job.stdout}"
