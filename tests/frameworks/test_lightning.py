"""The Lightning strategy: the same training as with Lightning's DDP, its checkpoints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_stores import AGENT, WARM, ports_of, serve_stores

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
