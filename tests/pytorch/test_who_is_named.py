"""Whom the errors of the survivors name, for each rule and each fault: the rank at fault, first, with what it did."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import SynclineError
from syncline.pytorch.checkpoint import save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.phased import phase
from syncline.topology import Topology
from syncline.updates import AllReduce, Clustered, Overlapped, Sharded, UpdateRule

WORLD, GUILTY, STEPS, AT = 4, 1, 4, 2
TIMEOUT_S = 1.5
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
    "clustered": (Clustered(clusters=2, period=3, measures=False), {}),
}
"""Rules that go on without the rank at fault, and how they are asked to."""


class GuiltyError(Exception):
    """What the rank at fault raises, or ends with once the others have failed."""


class Loop:
    """One rank's training; the rank at fault does something in its third step."""

    def __init__(
        self, fleet: Fleet, rule: UpdateRule, folder: Path, others_failed: threading.Event, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.fleet = fleet
        self.folder = folder
        self.others_failed = others_failed
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        self.model, self.optimizer = distribute(module, optimizer, rule, fleet=fleet, **options)

    def run(self, faults: dict[str, Callable[[Loop], None]]) -> None:
        """Train; ``faults`` has what happens in the step ``AT``, by where."""
        for number in range(STEPS):
            now = faults if number == AT else {}
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
        assert self.others_failed.wait(60)
        raise GuiltyError


class PhasedLoop:
    """The same of a pair's rank: of the ranks 0 to 3, ranks 0 and 1 are a pair, and 0 and 2 have the same stages."""

    sleep = Loop.sleep

    def __init__(self, fleet: Fleet, others_failed: threading.Event) -> None:
        torch.manual_seed(0)
        self.fleet = fleet
        self.others_failed = others_failed
        self._do: Callable[[Any], Any] = act_normally
        stages = [nn.Linear(4, 4) for _ in range(4)]
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: self._do(self))
        self.trainer = phase(stages, lambda some: torch.optim.SGD(some, 0.1), loss=nn.MSELoss(), fleet=fleet)

    def run(self, faults: dict[str, Callable[[Any], Any]]) -> None:
        """Train; ``faults`` has what happens in the step ``AT``, by where."""
        for number in range(STEPS):
            now = faults if number == AT else {}
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
    """Be killed."""
    communicator = loop.fleet.communicator
    communicator._loop.call_soon(communicator._fabric.kill, loop.fleet.rank)
    loop.sleep()


def save(loop: Loop) -> Any:
    """Save alone."""
    save_checkpoint(loop.folder / "run", loop.model, loop.optimizer)


def evaluate(loop: Loop) -> Any:
    """Sum a loss that the others do not."""
    loop.fleet.all_reduce(torch.zeros(1))


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
}
FOUND_BY_ITSELF = {("sharded, in backward", "does not call step"): "is lost: it ended with UpdateError"}
"""Where the rank at fault has an error of its own before the others miss it."""
ROWS = [
    pytest.param(rule, fault, id=f"{rule}: {fault}")
    for rule in RULES
    for fault in FAULTS
    if (rule, fault) != ("all-reduce", "does not call step")  # a step there is each rank's own affair
]


@pytest.mark.parametrize(("rule", "fault"), ROWS)
def test_the_errors_of_all_survivors_name_the_rank_at_fault_first(
    rule: str, fault: str, run_fleets: Any, tmp_path: Path
) -> None:
    place, act, words = FAULTS[fault]
    errors: dict[int, SynclineError] = {}
    others_failed = threading.Event()

    def body(fleet: Fleet) -> None:
        loop = Loop(fleet, RULES[rule], tmp_path, others_failed)
        if fleet.rank == GUILTY:
            loop.run({place: act})
            return
        try:
            loop.run({})
            loop.optimizer.synchronize()
        except SynclineError as error:
            errors[fleet.rank] = error
            if len(errors) == WORLD - 1:
                others_failed.set()
            raise

    topology = Topology.parse(HOSTS, source="two-hosts")
    run_fleets(topology, body, timeout_s=TIMEOUT_S, accept=(SynclineError, GuiltyError))
    assert set(errors) == set(range(WORLD)) - {GUILTY}
    for error in errors.values():
        text = str(error)
        assert error.ranks_at_fault[0] == GUILTY, text
        assert re.findall(r"rank (\d) \(host", text)[0] == str(GUILTY), text
        assert FOUND_BY_ITSELF.get((rule, fault), words) in text


PHASED = {
    "sleeps in forward": "rank 1 (host memory) sent nothing ",
    "stops calling": "rank 1 (host memory) sent nothing ",
    "raises": "is lost: it ended with GuiltyError: no such file",
    "is killed": "is lost: its process died or was killed",
    "leaves early": "give all ",
    "evaluates more": "rank 1 (host memory) ",
}
"""What errors say of a rank of a pair; the partner hears of some first, and ranks of its side of others."""


@pytest.mark.parametrize("fault", PHASED)
def test_the_errors_of_all_pairs_name_the_rank_at_fault_first(fault: str, run_fleets: Any) -> None:
    place, act, _ = FAULTS[fault]
    errors: dict[int, SynclineError] = {}
    others_failed = threading.Event()

    def body(fleet: Fleet) -> None:
        loop = PhasedLoop(fleet, others_failed)
        if fleet.rank == GUILTY:
            loop.run({place: act})
            return
        try:
            loop.run({})
            loop.trainer.synchronize()
        except SynclineError as error:
            errors[fleet.rank] = error
            if len(errors) == WORLD - 1:
                others_failed.set()
            raise

    run_fleets(WORLD, body, timeout_s=TIMEOUT_S, accept=(SynclineError, GuiltyError))
    assert set(errors) == set(range(WORLD)) - {GUILTY}
    for error in errors.values():
        assert error.ranks_at_fault[0] == GUILTY, error
        assert re.findall(r"rank (\d) \(host", str(error))[0] == str(GUILTY), error
        assert PHASED[fault] in str(error)


ELASTIC = ("stops calling", "raises", "is killed", "leaves early", "saves alone")
GOING_ON = [
    pytest.param(rule, fault, id=f"{rule}: {fault}")
    for rule in SURVIVING
    for fault in (ELASTIC if rule.startswith("elastic") else ("raises", "is killed"))
]


@pytest.mark.parametrize(("rule", "fault"), GOING_ON)
def test_survivors_that_go_on_know_who_is_lost(
    rule: str, fault: str, run_fleets: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody else is; and if the rank at fault is told, its error names itself."""
    place, act, words = FAULTS[fault]
    update, options = SURVIVING[rule]
    lost: dict[int, tuple[int, ...]] = {}
    others_are_done = threading.Event()

    def body(fleet: Fleet) -> None:
        rank = fleet.rank  # at the start
        loop = Loop(fleet, update, tmp_path, others_are_done, **options)
        if options:
            loop.optimizer.on_membership_change(lambda change: told.extend(change.lost))
        told: list[int] = []
        if rank == GUILTY:
            loop.run({place: act})
            return
        loop.run({})
        loop.optimizer.synchronize()
        counted: Any = loop.optimizer.statistics()
        lost[rank] = tuple(told) if options else counted.lost if rule == "overlapped" else counted.dead
        if len(lost) == WORLD - 1:
            others_are_done.set()

    topology = Topology.parse(HOSTS, source="two-hosts")
    results = run_fleets(topology, body, timeout_s=TIMEOUT_S, accept=(SynclineError, GuiltyError))
    assert lost == {rank: (GUILTY,) for rank in range(WORLD) if rank != GUILTY}, results
    if options and fault in {"raises", "is killed"}:
        assert words in capsys.readouterr().err
    if isinstance(results[GUILTY], SynclineError):
        assert results[GUILTY].ranks_at_fault[0] == GUILTY, results[GUILTY]
