"""Each example runs as it stands, under the launcher."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 120.0


def run_example(*command, is_plain_torch=False):
    done = subprocess.run(
        [sys.executable, "-m", "syncline.cli.main", "run", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    # torch 2.13 sometimes aborts in its own teardown after gloo, when the script itself is over and has printed all.
    is_torchs_teardown = done.returncode == 134 and "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or (is_plain_torch and is_torchs_teardown), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("update", ["sharded", "allreduce"])
def test_digits_are_learnt_alike_on_all_ranks(update):
    shown = run_example("--ranks", 2, EXAMPLES / "digits.py", "--update", update)
    shares = re.findall(r"rank \d: ([\d.]+)% of the test images read; optimizer state (\d+) KiB", shown)
    assert len(shares) == 2
    assert len({share for share, _ in shares}) == 1
    assert float(shares[0][0]) > 85
    whole_kib = 2 * 4 * (64 * 256 + 256 * 256 + 256 * 10 + 256 + 256 + 10) / 1024
    expected_kib = whole_kib / 2 if update == "sharded" else whole_kib
    assert all(abs(int(state) - expected_kib) < 2 for _, state in shares)


def test_a_script_of_torch_distributed_alone_starts_too():
    shown = run_example("--ranks", 2, EXAMPLES / "plain_torch_ddp.py", is_plain_torch=True)
    losses = re.findall(r"rank \d of 2: loss ([\d.e+-]+)", shown)
    assert len(losses) == 2
    assert all(float(loss) < 1e-2 for loss in losses)


def test_the_demos_script_is_among_the_examples_and_there_is_one_copy():
    from syncline.demo import train_gpt

    assert (EXAMPLES / "train_gpt.py").resolve() == Path(train_gpt.__file__).resolve()
