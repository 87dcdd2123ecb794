"""What ``torch.profiler`` shows of each call, beside gloo's, on two ranks."""

from __future__ import annotations

from pathlib import Path

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("profiler_comparison.py")


def test_profilers_show_each_call_as_gloos_and_nothing_is_recorded_without() -> None:
    for status, text in run_script(SCRIPT, 2):
        assert status == 0, text
        assert text.splitlines()[-1] == "alike=22", text
