"""PyTorch's operators on sharded tensors: what they move over our process groups gives what it gives over gloo."""

from __future__ import annotations

from pathlib import Path

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("operator_counterparts.py")
WARM = ("torch.testing._internal.common_methods_invocations",)
LEAST_OPERATORS = 80
"""PyTorch 2.13 has 90 that move something on two ranks, of 677."""


def test_every_operator_that_moves_something_gives_what_it_gives_on_gloo() -> None:
    for status, text in run_script(SCRIPT, 2, warm=WARM):
        assert status == 0, text
        num_operators, num_cases, num_errors = (int(word) for word in text.splitlines()[-1].split())
        assert num_operators >= LEAST_OPERATORS, text
        assert num_errors < num_cases / 10, text
