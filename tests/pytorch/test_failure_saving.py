"""After a loss one of those who are left saves what it has: which, once, of which step, and how all get to know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from rank_scripts import run_script
from syncline.errors import CheckpointError, PeerLostError, UpdateError
from syncline.pytorch.checkpoint import folder, saving
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Sharded

SAID = re.compile(r"rank (\d) has written a checkpoint of what it had, after step (\d+), to (\S+)")


def make() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def train_alone(num_ranks: int, num_steps: int) -> list[torch.Tensor]:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(num_steps):
        inputs = [torch.full((4, 6), 0.1 * (step + rank)) for rank in range(num_ranks)]
        (sum(model(one).square().mean() for one in inputs) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("victims", "moment"), [((0,), "backward"), ((0, 2), "saving")], ids=["backward", "saving"])
def test_killed_ranks_leave_a_checkpoint(victims: tuple[int, ...], moment: str, tmp_path: Path) -> None:
    """It lies among those that were kept on the way, so the next start goes on from it."""
    arguments = [str(tmp_path), ",".join(map(str, victims)), "3", moment]
    results = run_script(Path(__file__).with_name("losing_process.py"), 4, *arguments)
    left = [rank for rank in range(4) if rank not in victims]
    for rank in left:
        status, output = results[rank]
        assert status == 1, output
        assert "PeerLostError" in output
        found = SAID.findall(output)
        assert set(found) == {(str(left[0]), "3", f"{tmp_path}/run1/iteration-0000000003")}, output
        if moment == "saving":
            assert re.search(r"told: The checkpoint \S+ was not written in the background: rank \d .* is lost", output)
    model = make()
    begin = syncline.resume(tmp_path / "run1", model, torch.optim.Adam(model.parameters(), lr=0.01))
    assert begin.iteration == 3
    for ours, theirs in zip(model.parameters(), train_alone(4, 3), strict=True):
        torch.testing.assert_close(ours.detach(), theirs)
    assert not (tmp_path / "other").exists(), "what was broken off is no checkpoint"


class DeathError(Exception):
    """This rank dies here."""


def lose(fleet: Fleet, path: Path, *, catches: bool = False) -> None:
    model = make()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = syncline.distribute(model, optimizer, AllReduce(), save_on_failure=path, fleet=fleet)
    try:
        for step in range(3):
            if fleet.rank == 2 and step == 2:
                raise DeathError
            model(torch.full((4, 6), 0.1 * (step + fleet.rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except PeerLostError:
        if not catches:
            raise


def test_the_next_one_writes_where_the_lowest_cannot(
    tmp_path: Path, run_fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, refused = folder.commit, []

    def refuse_once(*arguments: Any) -> None:
        if not refused:
            refused.append(1)
            raise OSError(28, "No space left on device")
        commit(*arguments)

    monkeypatch.setattr(folder, "commit", refuse_once)
    accept = (DeathError, PeerLostError)
    errors = run_fleets(3, lambda fleet: lose(fleet, tmp_path / "saved"), accept=accept)
    assert [type(error) for error in errors] == [PeerLostError, PeerLostError, DeathError]
    assert all(SAID.findall(str(error.__notes__)) == [("1", "2", f"{tmp_path}/saved']")] for error in errors[:2])
    assert syncline.load_checkpoint(tmp_path / "saved", make()) == {"iteration": 2}


def test_where_nobody_can_write_the_error_says_why(
    tmp_path: Path, run_fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(saving, "_write", refuse)
    accept = (DeathError, PeerLostError)
    errors = run_fleets(3, lambda fleet: lose(fleet, tmp_path / "saved"), accept=accept)
    for error in errors[:2]:
        assert "no checkpoint was written: rank 0: the disk is gone; rank 1: the disk is gone" in str(error.__notes__)


def test_who_catches_the_loss_has_a_checkpoint_after_the_close(
    tmp_path: Path, run_fleets: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    accept = (DeathError, PeerLostError)
    run_fleets(3, lambda fleet: lose(fleet, tmp_path / "saved", catches=True), accept=accept)
    assert syncline.load_checkpoint(tmp_path / "saved", make()) == {"iteration": 2}
    assert len(SAID.findall(capfd.readouterr().err)) == 2


def test_a_job_that_ends_well_writes_nothing(tmp_path: Path, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.distribute(model, optimizer, AllReduce(), save_on_failure=tmp_path / "saved", fleet=fleet)

    run_fleets(2, body)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_was_broken_off_is_not_saved(tmp_path: Path, run_fleets: Any) -> None:
    """LBFGS evaluates the model within its step, and so meets the loss there."""

    def body(fleet: Fleet) -> None:
        model = make()
        inner = torch.optim.LBFGS(model.parameters(), max_iter=4, tolerance_grad=0, tolerance_change=0)
        model, optimizer = syncline.distribute(
            model, inner, AllReduce(), save_on_failure=tmp_path / "saved", fleet=fleet
        )
        calls: list[int] = []

        def closure() -> torch.Tensor:
            calls.append(1)
            if fleet.rank == 1 and len(calls) == 3:
                raise DeathError
            optimizer.zero_grad()
            loss = model(torch.full((4, 6), 0.1 + fleet.rank)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    errors = run_fleets(2, body, accept=(DeathError, PeerLostError))
    assert [type(error) for error in errors] == [PeerLostError, DeathError]
    assert "nobody who is left has the whole state" in str(errors[0].__notes__)
    assert list(tmp_path.iterdir()) == []


def test_a_divided_state_is_refused(tmp_path: Path, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UpdateError, match="of whose state each rank has a part"):
            syncline.distribute(model, optimizer, Sharded(), save_on_failure=tmp_path / "saved", fleet=fleet)

    run_fleets(2, body)
