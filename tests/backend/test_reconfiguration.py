"""A default group that is made anew in the same processes: without ranks that died, and with those that come."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reconfigure_process import loss_of, make_model, make_optimizer

import syncline
from rank_scripts import reserved_port, run_python, script_environment
from syncline.errors import ConfigurationError

SCRIPT = Path(__file__).with_name("reconfigure_process.py")


def run_job(folder: Path, world_size: int, victim: int, place: str, **variables: str) -> list[dict[str, Any]]:
    """Run the job; return what those tell that came to its end."""
    launcher = ("-m", "syncline", "run", "--ranks", world_size, "--elastic", "--restarts", "1")
    done = run_python(
        *launcher, SCRIPT, folder, world_size, victim, place, environment=script_environment() | variables
    )
    assert done.returncode == 0, done.stdout
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(told) == world_size, done.stdout
    return told


def replay(counted: dict[int, list[int]]) -> list[torch.Tensor]:
    """Train in one process on the batches that counted."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in sorted(counted):
        optimizer.zero_grad()
        for number in counted[step]:
            (loss_of(model, number, step) / len(counted[step])).backward()
        optimizer.step()
    return list(model.parameters())


def check_replayed(told: list[dict[str, Any]]) -> dict[int, list[int]]:
    """See that all have the same, and that one process comes to it too."""
    counted = {int(step): members for one in told for step, members in one["counted"].items()}
    assert all(one["parameters"] == told[0]["parameters"] for one in told)
    for value, expected in zip(told[0]["parameters"], replay(counted), strict=True):
        torch.testing.assert_close(torch.tensor(value, dtype=torch.float64), expected.detach(), rtol=1e-9, atol=1e-9)
    return counted


@pytest.mark.parametrize(("victim", "place"), [(0, "step"), (1, "commit")])
def test_a_job_goes_on_without_a_rank_that_dies_and_with_the_one_that_comes(
    victim: int, place: str, tmp_path: Path
) -> None:
    told = run_job(tmp_path, 3, victim, place)
    counted = check_replayed(told)
    left = [number for number in range(3) if number != victim]
    assert counted[1] == [0, 1, 2]
    assert counted[2] == left
    assert counted[max(counted)] == [*left, 3]
    survivors = [one["changes"] for one in told if len(one["changes"]) == 3]
    assert len(survivors) == 2
    for changes in survivors:
        assert changes[0] == [0, [0, 1, 2], [], [], 0]
        assert changes[1] == [1, left, [victim], [], 2]
        assert changes[2][:4] == [2, [*left, 3], [], [3]]
    (newcomer,) = [one["changes"] for one in told if len(one["changes"]) == 1]
    assert newcomer == [[2, [*left, 3], [], [3], survivors[0][2][4]]]


def test_a_rank_that_dies_while_the_group_is_made_anew_is_left_out_too(tmp_path: Path) -> None:
    """The new rank 0 dies, with the new store. All share one port, where each new store takes the place of the last."""
    with reserved_port() as port:
        told = run_job(tmp_path, 4, 0, "store", SYNCLINE_PORTS=str(port))
    counted = check_replayed(told)
    assert counted[2] == [1, 3]
    assert set(counted[max(counted)]) > {1, 3}
    assert any([2, [1, 3], [0, 2], [], 2] in one["changes"] for one in told)


FAILS_LATER = """
import os, sys
import syncline
from syncline.backend.reconfiguration import WorldGrowth
is_failing = os.environ["RANK"] == "1"
pipe = os.open(sys.argv[1], os.O_WRONLY if is_failing else os.O_RDONLY)
syncline.reconfigure()
if is_failing:
    def fail(self):
        raise ValueError("no memory is left")
    WorldGrowth._open = fail
syncline.reconfigure()
os.read(pipe, 1)  # until the process at its other end is no more
"""


def test_the_others_hear_why_a_rank_could_not_make_the_group_anew(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILS_LATER)
    os.mkfifo(tmp_path / "pipe")
    launcher = ("-m", "syncline", "run", "--ranks", 2)
    done = run_python(*launcher, tmp_path / "program.py", tmp_path / "pipe", environment=script_environment())
    assert "(rank 1 (host h1) is lost: it ended with ValueError: no memory is left, during" in done.stdout
    assert "gets 5 s to end by itself, and would go on with --keep-going or --elastic" in done.stdout


def test_who_has_seen_fewer_steps_gets_the_state_of_who_has_seen_most() -> None:
    first = syncline.reconfigure()
    assert (first.step, first.source, first.behind, first.joined) == (0, 0, (), ())
    again = syncline.reconfigure(step=7)
    assert (again.epoch, again.step, again.source, again.behind) == (0, 7, 0, ())
    assert not syncline.commit()
    dist.destroy_process_group()
    assert syncline.reconfigure().epoch == 0
    dist.destroy_process_group()


def test_a_group_that_was_made_otherwise_is_not_made_anew() -> None:
    with pytest.raises(ConfigurationError, match=r"commit\(\) wants a default group that syncline.reconfigure\(\)"):
        syncline.commit()
    store: Any = dist.HashStore()
    dist.init_process_group("syncline", store=store, rank=0, world_size=1)
    with pytest.raises(ConfigurationError, match=r"reconfigure\(\) wants a default group"):
        syncline.reconfigure(step=1)
    dist.destroy_process_group()
