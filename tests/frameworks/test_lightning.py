"""The Lightning strategy: the same training as with Lightning's DDP, its checkpoints, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from served_stores import AGENT, WARM, ports_of, serve_stores

import syncline
from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("lightning_process.py")


def run(what: str, folder: Path) -> list[str]:
    """Return the last line of each rank."""
    stores = serve_stores(2)
    ends = run_script(SCRIPT, 2, what, str(folder), ports_of(stores), extra=AGENT, warm=WARM)
    assert [status for status, _ in ends] == [0, 0], "\n".join(text for _, text in ends)
    return [text.splitlines()[-1] for _, text in ends]


@pytest.mark.parametrize("what", ["trains", "resumes"])
def test_lightning_training(what: str, tmp_path: Path) -> None:
    assert run(what, tmp_path) == ["ended", "ended"]


def test_an_error_on_one_rank_ends_the_others(tmp_path: Path) -> None:
    assert run("breaks", tmp_path) == ["told", "told"]


def test_the_callback_logs_what_metrics_has_as_often_as_lightning_logs() -> None:
    lightning = pytest.importorskip("syncline.lightning")
    logged: list[tuple[int, dict[str, float]]] = []
    logger = SimpleNamespace(log_metrics=lambda told, step: logged.append((step, told)))
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=2, loggers=[logger])
    with syncline.init():
        for step in range(1, 5):
            trainer.global_step = step
            lightning.MetricsCallback().on_train_batch_end(
                trainer, None, {"loss": torch.tensor(0.5 * step)}, None, step
            )
        lightning.MetricsCallback().on_train_batch_end(trainer, None, None, None, 5)
    assert [step for step, _ in logged] == [2, 4, 4]
    assert [told["syncline/loss"] for _, told in logged] == [1.0, 2.0, 2.0]
    assert logged[0][1].keys() >= {"syncline/goodput", "syncline/steps"}
