"""What `make test-gpu` makes of ranks' results; and all that can run without a GPU, on its stand-in."""

from __future__ import annotations

from typing import Any

import gpu_checks
import pytest
import torch
from gpu_checks import Outcome, main, merged, run_ranks, summary, table_of
from rich.console import Console

NEED_A_GPU = {
    "a CUDA graph's capture is refused",
    "memory beside DDP",
    "figures: sizes of pieces, gloo",
    '"cpu:syncline,cuda:nccl"',
    "NCCL within the host, and its figures",
}


def result(check: str, state: str = "passed", note: str = "", seconds: float = 1.0) -> dict[str, Any]:
    return {"check": check, "device": "stand-in", "state": state, "note": note, "seconds": seconds}


@pytest.mark.skipif(torch.cuda.is_available(), reason="make test-gpu runs them on the GPU")
def test_on_a_stand_in_every_check_passes_that_needs_no_gpu() -> None:
    outcomes, said = run_ranks(2)
    assert {one.state for one in outcomes if one.check not in NEED_A_GPU} == {"passed"}, said
    assert {one.check for one in outcomes if one.state == "not run"} == NEED_A_GPU
    assert all("needs" in one.note for one in outcomes if one.state == "not run")
    assert len(outcomes) >= 20


def test_a_check_has_passed_where_it_passed_on_all_ranks() -> None:
    first = [result("a"), result("b", "failed", "it broke"), result("c", "not run", "needs 1 GPU", 0.0)]
    second = [result("a", seconds=3.0), result("b")]
    found = merged([first, second])
    assert [(one.state, one.note) for one in found] == [
        ("passed", ""),
        ("failed", "rank 0: it broke"),
        ("failed", "1 ranks ended before"),
    ]
    assert [one.seconds for one in found][:2] == [3.0, 1.0]
    assert merged([[], []]) == []


def outcome(state: str, device: str = "stand-in", num_ranks: int = 2) -> Outcome:
    return Outcome(check="sums [all]", num_ranks=num_ranks, device=device, state=state, note="[x]", seconds=1.0)


def test_the_table_has_a_row_for_each_number_of_ranks_and_the_sentence_says_where_it_ran() -> None:
    outcomes = [outcome("passed"), outcome("not run", num_ranks=4)]
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table_of(outcomes))
    assert captured.get().count("sums [all]") == captured.get().count("[x]") == 2
    assert summary(outcomes).startswith("1 passed, 0 failed, 1 not run here; there is no GPU")
    assert summary([outcome("passed", "H100")]) == "1 passed, 0 failed, 0 not run here"


def test_the_status_says_whether_a_check_failed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpu_checks, "run_ranks", lambda num: ([outcome("failed" if num == 4 else "passed")], "why"))
    assert main(["--ranks", "2"]) == 0
    assert main(["--ranks", "2", "4"]) == 1
    assert "why" in capsys.readouterr().err


def test_without_the_gpu_that_was_asked_for_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--need-gpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "finds no GPU here, so nothing was run" in said
