"""A phased job under ``syncline run --restarts`` that loses either rank of a pair, and ends as if it had lost none."""

from __future__ import annotations

import json
from pathlib import Path

from launched_jobs import plain_environment
from struck_phased_rank import NUM_STEPS

from rank_scripts import run_python, run_script
from syncline.updates.phased.storage import Folder
from syncline.updates.phased.versions import read_manifests

SCRIPT = Path(__file__).with_name("struck_phased_rank.py")


def checksums(folder: Path, rank: int) -> dict[str, int]:
    """Return those of all that a rank has stored of the last step."""
    storage = Folder(folder / f"rank-{rank:04d}")
    manifest = read_manifests(storage)[NUM_STEPS]
    assert manifest.is_whole(storage)
    return {name: check for name, (_, check) in manifest.files.items()}


def test_a_job_that_loses_either_rank_of_a_pair_goes_on_from_storage_by_itself(tmp_path: Path) -> None:
    whole, job = tmp_path / "whole", tmp_path / "job"
    for status, output in run_script(SCRIPT, 2, str(whole)):
        assert status == 0, output
    run = ("-m", "syncline", "run", "--ranks", 2, "--restarts", 2)
    ended = run_python(*run, SCRIPT, job, "kills", environment=plain_environment())
    assert ended.returncode == 0, ended.stdout
    assert (
        "the job ended well when it was started for the third time; before: 1. rank 0 was killed by SIGKILL; "
        "2. rank 1 was killed by SIGKILL"
    ) in ended.stdout
    for rank in range(2):
        struck, undisturbed = (json.loads((folder / f"end-{rank}.json").read_text()) for folder in (job, whole))
        assert 0 < struck["begun"] < NUM_STEPS
        assert struck["losses"] == undisturbed["losses"][struck["begun"] :]
        assert checksums(job, rank) == checksums(whole, rank)
