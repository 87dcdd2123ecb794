"""Every call of ``torch.distributed`` with every operation and number type, on three ranks, beside gloo's results."""

from __future__ import annotations

import re
from pathlib import Path

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("gloo_comparison.py")


def test_every_call_gives_what_gloos_gives() -> None:
    for status, text in run_script(SCRIPT, 3):
        assert status == 0, text
        counts = dict(re.findall(r"(\w[\w ]*)=(\d+)", text.splitlines()[-1]))
        assert counts.keys() <= {"alike", "ours alone", "refused by both"}, text
        assert int(counts["alike"]) > 250
