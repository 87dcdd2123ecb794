"""Sharded with spares in an elastic job: whoever is lost and whenever, the others go on, to the bit as in a replay."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of

from syncline.errors import CheckpointError, SynclineError, UpdateError
from syncline.members import Elastic
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import Sharded
from syncline.updates.elastic_sharded import ElasticShardedUpdater
from syncline.updates.peer_state import StateLostError

pytestmark = pytest.mark.usefixtures("small_slices")

FLAT = Topology.flat(4)
CASE = CASES["sometimes_unused"]
RULES = {
    "element": Sharded(bucket_bytes=2000, spares=1),
    "whole_parameters": Sharded(align="parameter", bucket_bytes=3000, spares=1),
}
NUM_STEPS = 5


class KilledError(Exception):
    """Ends a rank where it is."""


def kill(fleet: Fleet) -> None:
    fleet.base.abort()
    raise KilledError


def make_optimizer(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


class Job:
    """Some ranks that train; ``victims`` says at which step and phase a rank ends."""

    def __init__(self, topology: Topology, rule: Sharded, victims: dict[int, tuple[int, str]], *, clips: bool) -> None:
        self.topology, self.rule, self.victims, self.clips = topology, rule, victims, clips
        self.models = copies(CASE.make(), topology.num_ranks)
        self.batches = CASE.batches(NUM_STEPS, 24)
        self.is_committed_first = any(phase == "committed" for _, phase in victims.values())
        self.committed = threading.Barrier(topology.num_ranks)
        self.changes: list[Any] = []

    def run(self, fleet: Fleet) -> list[Any]:
        number = fleet.rank
        model = self.models[number]
        model, optimizer = distribute(model, make_optimizer(model), self.rule, fleet=fleet, elastic=True, check_every=1)
        if number == 0:
            optimizer.on_membership_change(self.changes.append)
        step, phase = self.victims.get(number, (NUM_STEPS, ""))
        for place, (inputs, targets) in enumerate(self.batches):
            is_victim = place == step
            if is_victim:
                self.prepare(fleet, optimizer, phase)
            loss = loss_of(model, inputs[number :: self.topology.num_ranks], targets[number :: self.topology.num_ranks])
            loss.backward()
            if self.is_committed_first and place == min(step for step, _ in self.victims.values()):
                self.committed.wait(60)
                if is_victim:
                    kill(fleet)
            if self.clips:
                optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        return [[parameter.detach().clone() for parameter in model.parameters()], state, fleet.epoch]

    def prepare(self, fleet: Fleet, optimizer: Any, phase: str) -> None:
        updater = optimizer.training.updater
        if phase == "forward":
            kill(fleet)
        elif phase == "backward":
            number = len(updater.buckets)

            def reduce(bucket: Any, original: Callable[[Any], None] = updater.reduce) -> None:
                nonlocal number
                number -= 1
                original(bucket)
                if number == 1:
                    kill(fleet)

            updater.reduce = reduce
        elif phase == "agreed":
            updater._apply = lambda *_, **__: kill(fleet)
        elif phase == "gather":
            original = updater._gather

            def gather(bucket: Any) -> None:
                original(bucket)
                if bucket.index == 1:
                    kill(fleet)

            updater._gather = gather


def expect_total(optimizer: Any, total: float) -> None:
    """Let the first pass be weighted as after one of this weight."""
    reports = optimizer.training.collector._reports
    original, totals = reports.expected_total, [total]
    reports.expected_total = lambda weight: totals.pop() if totals else original(weight)


def replay(
    rule: Sharded,
    steps: list[tuple[tuple[int, ...], int]],
    run_fleets: Any,
    folder: Any,
    *,
    clips: bool,
    weight: float | None = None,
) -> Any:
    """Train with the ranks that there are in each part of the steps, from checkpoint to checkpoint."""
    batches, start, results = CASE.batches(NUM_STEPS, 24), 0, None
    for part, (members, stop) in enumerate(steps):
        models = copies(CASE.make(), len(members))

        def body(
            fleet: Fleet, part: int = part, members: Any = members, models: Any = models, span: Any = (start, stop)
        ) -> Any:
            model = models[fleet.rank]
            model, optimizer = distribute(model, make_optimizer(model), rule, fleet=fleet)
            if part:
                load_checkpoint(folder / str(part - 1), model, optimizer)
                # the survivors weight their next pass by the last one's, too
                expect_total(optimizer, weight or float(len(steps[part - 1][0])))
            number = members[fleet.rank]
            for inputs, targets in batches[slice(*span)]:
                loss_of(model, inputs[number::4], targets[number::4]).backward()
                if clips:
                    optimizer.clip_grad_norm_(0.05)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            save_checkpoint(folder / str(part), model, optimizer)
            return [[parameter.detach().clone() for parameter in model.parameters()], optimizer.state_dict()["state"]]

        results = run_fleets(FLAT.restricted(members), body)
        start = stop
    assert results is not None
    return results[0]


def check_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(ours, theirs), float((ours - theirs).abs().max())
    assert found[1].keys() == expected[1].keys()
    for number, state in expected[1].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found[1][number][key]), torch.as_tensor(value)), (number, key)


@pytest.mark.parametrize(
    ("rule", "victim", "phase", "last_whole"),
    [
        ("element", 3, "forward", 2),
        ("element", 0, "backward", 2),
        ("whole_parameters", 2, "backward", 2),
        ("element", 1, "committed", 3),
        ("whole_parameters", 0, "agreed", 3),
        ("element", 2, "agreed", 3),
        ("element", 3, "gather", 3),
    ],
)
def test_a_loss_in_any_phase_ends_as_the_replay(
    rule: str, victim: int, phase: str, last_whole: int, run_fleets: Any, tmp_path: Any
) -> None:
    job = Job(FLAT, RULES[rule], {victim: (2, phase)}, clips=phase == "agreed")
    results = run_fleets(FLAT, job.run, accept=KilledError)
    left = tuple(rank for rank in range(4) if rank != victim)
    expected = replay(
        RULES[rule], [((0, 1, 2, 3), last_whole), (left, NUM_STEPS)], run_fleets, tmp_path, clips=job.clips
    )
    for rank in left:
        assert results[rank][2].members == left
        check_same(results[rank], expected)


def test_spares_are_made_anew_after_each_loss(run_fleets: Any, tmp_path: Any) -> None:
    """Down to one rank, which has no spare.

    Between two deaths lies a step that needs all who are left: none dies before they have got over the one before.
    """
    rule = RULES["element"]
    job = Job(FLAT, rule, {3: (0, "gather"), 1: (2, "forward"), 2: (3, "agreed")}, clips=False)
    results = run_fleets(FLAT, job.run, accept=KilledError)
    assert results[0][2].members == (0,)
    assert [change.lost for change in job.changes] == [(3,), (1,), (2,)]
    parts = [((0, 1, 2, 3), 1), ((0, 1, 2), 2), ((0, 2), 4), ((0,), NUM_STEPS)]
    check_same(results[0], replay(rule, parts, run_fleets, tmp_path, clips=False))


@pytest.mark.parametrize("rule", RULES)
def test_owner_and_spare_lost_at_once_are_named(rule: str, run_fleets: Any) -> None:
    job = Job(FLAT, RULES[rule], {1: (2, "committed"), 3: (2, "committed")}, clips=False)
    results = run_fleets(FLAT, job.run, accept=(KilledError, SynclineError))
    for rank in (0, 2):
        assert isinstance(results[rank], StateLostError)
        assert "No rank that is left has the optimizer state of elements" in str(results[rank])
        assert results[rank].parts == results[0].parts


class JobWithCheckpoints(Job):
    """Writes a checkpoint after each second step, and goes back with its batches too."""

    def __init__(self, *arguments: Any, folder: Any, elastic: Any, late: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.folder, self.elastic = folder, elastic
        self.last_step = min(step for step, _ in self.victims.values())
        """Before which all ranks but the ``late`` ones are together: so all have ended the step before it."""
        self.together = threading.Barrier(self.topology.num_ranks - len(late))
        self.waiting = {*range(self.topology.num_ranks)} - {*late}
        self.made: list[int] = []

    def run(self, fleet: Fleet) -> list[Any]:
        number = fleet.rank
        model = self.models[number]
        model, optimizer = distribute(model, make_optimizer(model), self.rule, fleet=fleet, elastic=self.elastic)
        if number == 0:
            optimizer.on_membership_change(self.changes.append)
        step, phase = self.victims.get(number, (NUM_STEPS, ""))
        while (place := optimizer.iteration) < NUM_STEPS:
            if number == 0:
                self.made.append(place)
            if place == self.last_step and number in self.waiting:
                self.waiting.remove(number)
                self.together.wait(60)
            if place == step:
                self.prepare(fleet, optimizer, phase)
            inputs, targets = self.batches[place]
            loss_of(model, inputs[number::4], targets[number::4]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.iteration == 2 and place == 1:
                save_checkpoint(self.folder, model, optimizer, extra={"iteration": 2})
        return [[parameter.detach().clone() for parameter in model.parameters()], optimizer.state_dict()["state"]]


@pytest.mark.parametrize(
    ("rule", "victims", "weight"),
    [
        (Sharded(bucket_bytes=2000), {3: (3, "backward")}, 3.0),
        (Sharded(bucket_bytes=2000), {2: (3, "gather")}, 4.0),
        (RULES["element"], {1: (3, "backward"), 3: (3, "backward")}, 2.0),
    ],
    ids=["backward", "gather", "owner_and_spare"],
)
def test_lost_state_comes_back_from_the_last_checkpoint(
    rule: Sharded, victims: Any, weight: float, run_fleets: Any, tmp_path: Any, capsys: Any
) -> None:
    folder = tmp_path / "saved"
    elastic = Elastic(checkpoint=folder)
    job = JobWithCheckpoints(FLAT, rule, victims, clips=False, folder=folder, elastic=elastic)
    results = run_fleets(FLAT, job.run, accept=KilledError)
    left = tuple(rank for rank in range(4) if rank not in victims)
    assert job.made == [0, 1, 2, 3, 2, 3, 4]
    assert [change.iteration for change in job.changes] == [2] * len(job.changes) != []
    assert re.search("goes back from step [45] to the checkpoint of 2", capsys.readouterr().err)
    parts = [((0, 1, 2, 3), 2), (left, NUM_STEPS)]
    expected = replay(rule, parts, run_fleets, tmp_path, clips=False, weight=weight)
    for rank in left:
        check_same(results[rank], expected)


def test_a_missing_checkpoint_is_told(run_fleets: Any, tmp_path: Any) -> None:
    elastic = Elastic(checkpoint=tmp_path / "nothing")
    job = JobWithCheckpoints(
        FLAT, Sharded(), {3: (1, "forward")}, clips=False, folder=tmp_path / "saved", elastic=elastic
    )
    results = run_fleets(FLAT, job.run, accept=(KilledError, SynclineError))
    for rank in range(3):
        assert isinstance(results[rank], CheckpointError)


def test_ranks_that_have_ended_a_step_and_ranks_that_have_not_go_back_together(
    run_fleets: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 meets the loss at the end of its first step, when the others are in their second one."""
    take, late = ElasticShardedUpdater._take_gathered, ["rank 0"]

    def take_late(updater: ElasticShardedUpdater, index: int) -> None:
        if updater.collectives.rank == 0 and late:
            late.clear()
            updater.collectives.communicator.barrier().wait()  # which the loss of rank 3 ends
        take(updater, index)

    monkeypatch.setattr(ElasticShardedUpdater, "_take_gathered", take_late)
    elastic = Elastic(checkpoint=tmp_path / "nothing")
    victims = {3: (1, "forward")}
    job = JobWithCheckpoints(
        FLAT, Sharded(), victims, clips=False, folder=tmp_path / "saved", elastic=elastic, late=(0,)
    )
    results = run_fleets(FLAT, job.run, accept=(KilledError, SynclineError))
    assert [type(result) for result in results] == [CheckpointError] * 3 + [KilledError]


def test_what_would_lose_state_is_refused(run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> list[str]:
        messages = []
        for rule in (Sharded(), Sharded(step_in_backward=True)):
            with pytest.raises(UpdateError) as caught:
                distribute(models[fleet.rank], make_optimizer(models[fleet.rank]), rule, fleet=fleet, elastic=True)
            messages.append(str(caught.value))
        return messages

    plain, in_backward = run_fleets(2, body)[0]
    assert "or go back to checkpoints: elastic=Elastic(checkpoint=folder)" in plain
    assert "does not go with Sharded(), if step_in_backward=True" in in_backward


@pytest.mark.parametrize("rule", RULES)
def test_a_rank_that_is_new_gets_its_state_from_the_others(rule: str, run_fleets: Any) -> None:
    models, batches = copies(CASE.make(), 8), CASE.batches(3, 24)

    def train(fleet: Fleet, newcomers: tuple[int, ...], first: int) -> Any:
        model = models[first + fleet.rank]
        model, optimizer = distribute(model, make_optimizer(model), RULES[rule], fleet=fleet, elastic=True)
        for place, (inputs, targets) in enumerate(batches):
            loss_of(model, inputs[fleet.rank :: 4], targets[fleet.rank :: 4]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if place == 1 and newcomers:
                updater = optimizer.training.updater
                held = updater.held_state()
                if fleet.rank in newcomers:
                    held = []
                    for shard in updater.shards:
                        for state in shard.state.values():
                            for value in state.values():
                                value.fill_(1e9)  # nothing of it may count
                updater.admit(held)
                assert optimizer.iteration == 2
        return [[parameter.detach().clone() for parameter in model.parameters()], optimizer.state_dict()["state"]]

    expected = run_fleets(FLAT, lambda fleet: train(fleet, (), 0))[0]
    for found in run_fleets(FLAT, lambda fleet: train(fleet, (1, 2), 4)):
        check_same(found, expected)
