"""A rank that is told to end: it leaves an elastic job in which no step is lost, or all ranks save and end."""

import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import syncline
from syncline.errors import ConfigurationError, UpdateError
from syncline.pytorch.distribute import TOLD_TO_END
from syncline.pytorch.environment import read_environment
from syncline.pytorch.notices import Notice, Preemption
from thread_fleets import run_fleets

NUM_RANKS, NUM_STEPS = 4, 8
_drawing = threading.Lock()


def make():
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().mean()


def replay(members_of_steps):
    """Train in one process on the batches of those who made each step."""
    model, optimizer = make()
    for step, members in enumerate(members_of_steps):
        optimizer.zero_grad()
        sum(loss_of(model, rank, step) for rank in members).div(len(members)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(fleet, rule, told, wish, *, folder=None, elastic=True):
    """Train; ``told``: at which step each rank gets the signal. Returns who made each step, and the parameters."""
    rank, made = fleet.members[fleet.rank], []
    fleet.preemption = Preemption(wish)
    model, optimizer = make()
    model, optimizer = syncline.distribute(model, optimizer, rule, elastic=elastic, fleet=fleet)
    if folder is not None:
        syncline.resume(folder, model, optimizer)
    for step in range(NUM_STEPS):
        if told.get(rank) == step:
            fleet.preemption.receive(signal.SIGTERM)
        loss_of(model, rank, step).backward()
        # whose batches counted: who is a member when step() returns may have changed since
        made.append(optimizer.training.collector.report.ranks or fleet.members)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return made, [parameter.detach().clone() for parameter in model.parameters()]


RULES = {
    "all-reduce": syncline.AllReduce,
    "spares": lambda: syncline.Sharded(spares=1),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RULES)
def test_who_is_told_to_end_leaves_and_no_step_is_lost(name, seed):
    choose = random.Random(seed)
    leaving = choose.sample(range(NUM_RANKS), choose.randint(1, NUM_RANKS - 1))
    told = {rank: choose.randrange(NUM_STEPS - 5, NUM_STEPS - 3) for rank in leaving}
    results = run_fleets(NUM_RANKS, lambda fleet: train(fleet, RULES[name](), told, Notice.LEAVE), accept=SystemExit)
    staying = [rank for rank in range(NUM_RANKS) if rank not in told]
    assert {rank: results[rank].code for rank in told} == dict.fromkeys(told, 0)
    made, parameters = results[staying[0]]
    assert all(results[rank][0] == made for rank in staying)
    assert made[-1] == tuple(staying)
    assert len(made) == NUM_STEPS
    for rank in leaving:  # one at the end of each step, from the one at which it was told on
        assert rank in made[told[rank]]
    for rank in staying:
        assert all(map(torch.equal, results[rank][1], parameters))
    for own, whole in zip(parameters, replay(made), strict=True):
        torch.testing.assert_close(own, whole, rtol=1e-9, atol=1e-12)


def test_of_two_the_lower_may_leave_too():
    results = run_fleets(
        2, lambda fleet: train(fleet, syncline.Sharded(spares=1), {0: 2}, Notice.LEAVE), accept=SystemExit
    )
    assert results[1][0] == [(0, 1)] * 3 + [(1,)] * 5


@pytest.mark.parametrize("elastic", [None, True])
def test_all_save_and_end_where_one_is_told_to(elastic, tmp_path):
    rule = syncline.AllReduce() if elastic else syncline.Sharded(overlap_forward=True)
    results = run_fleets(
        3,
        lambda fleet: train(fleet, rule, {1: 4}, Notice.CHECKPOINT, folder=tmp_path / "run", elastic=elastic),
        accept=SystemExit,
    )
    assert [result.code for result in results] == [TOLD_TO_END] * 3
    model, optimizer = make()
    done = syncline.resume(tmp_path / "run", model, optimizer).iteration
    assert done in {5, 6}
    for own, whole in zip(model.parameters(), replay([(0, 1, 2)] * done), strict=True):
        torch.testing.assert_close(own.detach(), whole, rtol=1e-9, atol=1e-12)


def test_all_save_where_all_are_told_to_leave(tmp_path):
    told = dict.fromkeys(range(3), 3)
    results = run_fleets(
        3,
        lambda fleet: train(fleet, syncline.AllReduce(), told, Notice.LEAVE, folder=tmp_path / "run"),
        accept=SystemExit,
    )
    assert [result.code for result in results] == [TOLD_TO_END] * 3
    assert syncline.resume(tmp_path / "run", *make()).iteration == 4


def test_state_that_no_other_keeps_is_saved_before_its_owner_leaves(tmp_path):
    folder = tmp_path / "run"
    results = run_fleets(
        3,
        lambda fleet: train(
            fleet, syncline.Sharded(), {2: 3}, Notice.LEAVE, elastic=syncline.Elastic(checkpoint=folder), folder=folder
        ),
        accept=SystemExit,
    )
    assert results[2].code == 0
    assert syncline.resume(folder, *make()).iteration == 4


def test_what_cannot_be_done_is_refused_where_training_begins():
    def body(fleet):
        fleet.preemption = Preemption(Notice.LEAVE)
        with pytest.raises(UpdateError, match="elastic=True"):
            syncline.distribute(*make(), syncline.Sharded(), fleet=fleet)
        with pytest.raises(UpdateError, match="a handler of your own"):
            syncline.distribute(*make(), syncline.Overlapped(), fleet=fleet)

    run_fleets(2, body)
    with pytest.raises(ConfigurationError, match="must be 'leave' or 'checkpoint', not 'flee'"):
        read_environment({"SYNCLINE_ON_PREEMPTION": "flee"})
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigurationError, match="main thread"):
        pool.submit(Preemption(Notice.LEAVE).begin).result()


def test_the_handlers_from_before_are_put_back_and_get_a_second_signal():
    received = []
    before = signal.signal(signal.SIGUSR2, lambda *_: received.append("own"))
    try:
        preemption = Preemption(Notice.LEAVE)
        preemption.begin()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (preemption.notice, preemption.received, received) == (Notice.LEAVE, signal.SIGUSR2, [])
        os.kill(os.getpid(), signal.SIGUSR2)
        assert received == ["own"]
        preemption.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert received == ["own", "own"]
    finally:
        signal.signal(signal.SIGUSR2, before)


SCRIPT = """
import os, signal, sys, torch, syncline
torch.set_num_threads(1)
with syncline.init() as fleet:
    model = torch.nn.Linear(2, 2)
    model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), syncline.AllReduce())
    syncline.resume(sys.argv[1], model, optimizer)
    for step in range(100_000):
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and fleet.rank == 0:
            os.kill(os.getppid() if sys.argv[2] == "launcher" else os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize(("whom", "number"), [("launcher", signal.SIGTERM), ("launcher", signal.SIGUSR2)])
def test_the_launcher_gives_ranks_the_time_to_save(whom, number, tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["run", "--ranks", "2", "--on-preemption", "checkpoint", "train.py", "run1", whom, str(int(number))]
    command = [Path(sys.executable).with_name("syncline"), *options]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert job.returncode == TOLD_TO_END, job.stderr
    assert "all ranks have saved" in job.stderr
    model = nn.Linear(2, 2)
    assert syncline.resume(tmp_path / "run1", model, torch.optim.SGD(model.parameters(), lr=0.1)).iteration >= 4


KEEPING = """
import os, signal, sys, torch, syncline
torch.set_num_threads(1)
with syncline.init(on_preemption="checkpoint") as fleet:
    model = torch.nn.Linear(2, 2)
    model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    begin = syncline.resume("run1", model, optimizer)
    for step in range(begin.iteration, 8):
        model(torch.randn(1, 2)).sum().backward()
        if step == int(sys.argv[1]) and fleet.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 4:
            syncline.save_checkpoint("run1", model, optimizer, keep=int(sys.argv[2]))
"""


def test_a_job_that_keeps_checkpoints_goes_on_after_a_notice_before_its_first(tmp_path: Path):
    (tmp_path / "train.py").write_text(KEEPING)

    def run(notice_at, keep):
        command = [Path(sys.executable).with_name("syncline"), "run", "--ranks", "2", "train.py", notice_at, keep]
        job = subprocess.run(map(str, command), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        return job.returncode, [path.name[-2:] for path in sorted((tmp_path / "run1").glob("iteration-*"))]

    assert run(1, 3) == (TOLD_TO_END, [])
    assert syncline.resume(tmp_path / "run1", nn.Linear(2, 2)).iteration in {2, 3}
    assert run(-1, 3) == (0, ["06", "07", "08"])
    assert [path.name for path in tmp_path.glob("run1*")] == ["run1"]


def test_a_notice_before_the_first_save_after_a_restart_removes_no_checkpoint_that_is_kept(tmp_path):
    model, optimizer = make()
    for iteration in (1, 2, 3):
        syncline.save_checkpoint(tmp_path / "run", model, optimizer, iteration=iteration, keep=3)
    results = run_fleets(
        2,
        lambda fleet: train(fleet, syncline.AllReduce(), {1: 0}, Notice.CHECKPOINT, folder=tmp_path / "run"),
        accept=SystemExit,
    )
    assert [result.code for result in results] == [TOLD_TO_END] * 2
    assert len(list((tmp_path / "run").glob("iteration-*"))) == 4
