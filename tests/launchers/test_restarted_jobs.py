"""Jobs that lose a rank and go on without a hand: started again from their checkpoints, or elastic."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_jobs import plain_environment, run_together
from restarted_rank import BATCH_SIZE, NUM_SAMPLES, SEED, STRUCK_AT, make_model, make_optimizer

from rank_scripts import Program, forked_python, reserved_port, run_programs

SCRIPT = Path(__file__).with_name("restarted_rank.py")
TWO_HOSTS = """
topology: two-hosts
switch: core
children:
  - {host: a1, uplink: 1 Gbit/s, ranks: 1}
  - {host: b1, uplink: 1 Gbit/s, ranks: 1}
"""


def ends(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks that came to the end say; their weights are the same."""
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))]
    assert all(rank["weights"] == said[0]["weights"] for rank in said)
    return said


def check_samples(folder: Path, num_steps: int) -> None:
    """Check that the steps that count have taken each sample once; one that was made again counts as it was last."""
    taken = []
    for step in range(1, num_steps + 1):
        made = [json.loads(path.read_text()) for path in sorted(folder.glob(f"step-{step}-*.json"))]
        taken += [sample for rank in made[: made[0]["world_size"]] for sample in rank["samples"]]
    assert sorted(taken) == [*range(NUM_SAMPLES)]


def arguments(folder: Path, way: str, victim: int) -> list[str]:
    return [str(SCRIPT), str(folder), way, str(victim)]


def run_launchers(*options: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run `syncline run` with each of these options, side by side."""
    command = ("-m", "syncline", "run")
    return run_programs([Program((*command, *one), plain_environment()) for one in options])


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """Return the weights that one process comes to with the batches of two ranks together."""
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(SEED)).double()
    model = make_model()
    optimizer = make_optimizer(model)
    for batch in order.split(2 * BATCH_SIZE):
        model(batch[:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.item() for one in model.parameters()]


def test_torchrun_starts_all_again_and_they_meet_in_the_same_store(tmp_path: Path, undisturbed: list[float]) -> None:
    """Its agent serves one store in all attempts, in which a rank finds the keys of those before."""
    torchrun = [forked_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    with reserved_port() as port:
        at = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
        run_together([[*torchrun, *at, *arguments(tmp_path, "checkpoint", 1)]], [{"PYTHON_EXEC": forked_python()}])
    assert [(rank["begun"], rank["iteration"]) for rank in ends(tmp_path)] == [(STRUCK_AT - 1, 6)] * 2
    assert ends(tmp_path)[0]["weights"] == pytest.approx(undisturbed, rel=1e-12)
    check_samples(tmp_path, 6)


def test_launchers_of_two_hosts_start_their_ranks_again(tmp_path: Path, undisturbed: list[float]) -> None:
    topology, folder = tmp_path / "two-hosts.yaml", tmp_path / "job"
    topology.write_text(TWO_HOSTS)
    folder.mkdir()
    with reserved_port() as port:
        common = ["--topology", str(topology), "--restarts", "1", "--master", f"127.0.0.1:{port}"]
        ended = run_launchers(
            *([*common, "--host", host, *arguments(folder, "checkpoint", 1)] for host in ("a1", "b1"))
        )
    assert [one.returncode for one in ended] == [0, 0], ended
    assert "the ranks of this machine start again in 1 s" in ended[0].stdout
    words = "the job ended well when it was started for the second time; before: 1. rank 1 (host b1) was killed"
    assert words in ended[1].stdout
    assert [(rank["begun"], rank["iteration"]) for rank in ends(folder)] == [(STRUCK_AT - 1, 6)] * 2
    assert ends(folder)[0]["weights"] == pytest.approx(undisturbed, rel=1e-12)


def test_what_two_ranks_began_one_finishes(tmp_path: Path) -> None:
    """As after a requeue on fewer nodes: what two ranks have not used is divided anew."""
    (first,) = run_launchers(["--ranks", "2", *arguments(tmp_path, "checkpoint", 1)])
    assert first.returncode != 0
    assert "killed by SIGKILL" in first.stdout
    (second,) = run_launchers(["--ranks", "1", *arguments(tmp_path, "checkpoint", 1)])
    assert second.returncode == 0, second.stdout
    assert [(rank["begun"], rank["iteration"]) for rank in ends(tmp_path)] == [(2, 10)]
    check_samples(tmp_path, 10)


def test_an_elastic_job_takes_each_sample_once_though_a_rank_is_lost(tmp_path: Path) -> None:
    (ended,) = run_launchers(["--ranks", "2", "--elastic", *arguments(tmp_path, "elastic", 1)])
    assert ended.returncode == 0, ended.stdout
    assert "the job went on without 1 of 2 ranks: rank 1, killed by SIGKILL" in ended.stdout
    assert [rank["iteration"] for rank in ends(tmp_path)] == [10]
    check_samples(tmp_path, 10)


LOSES_A_RANK = """
import os, signal
import torch
import syncline
with syncline.init() as fleet:
    model = torch.nn.Linear(2, 1)
    elastic = {"elastic": True} if os.environ["ELASTIC"] else {}
    model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters()), syncline.AllReduce(), **elastic)
    for step in range(3):
        if step == fleet.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("elastic", ["", "yes"])
def test_a_user_whose_ranks_would_go_on_is_told_how_they_may(elastic: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSES_A_RANK)
    command = ("-m", "syncline", "run", "--ranks", "2", str(tmp_path / "train.py"))
    (ended,) = run_programs([Program(command, plain_environment() | {"ELASTIC": elastic})])
    hint = ", and would go on with --keep-going or --elastic" if elastic else ""
    assert f"rank 1 was killed by SIGKILL; the other rank gets 5 s to end by itself{hint}\n" in ended.stdout
    assert ended.returncode == 137
