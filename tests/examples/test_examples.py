"""Each example runs as it stands, under the launcher."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rank_scripts import run_python, script_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 120.0


def run_example(*command):
    done = run_python("-m", "syncline.cli.main", "run", *command)
    assert done.returncode == 0, done.stdout
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


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_digits_are_learnt_in_phases(num_ranks):
    shown = run_example("--ranks", num_ranks, EXAMPLES / "phased_digits.py")
    shares = re.findall(r"rank \d: ([\d.]+)% of the test images read", shown)
    assert len(shares) == num_ranks // 2
    assert len(set(shares)) == 1
    assert float(shares[0]) > 75
    peaks = [int(peak) for peak in re.findall(r"at most (\d+) KiB of 7 stages' parameters", shown)]
    assert len(peaks) == num_ranks
    assert max(peaks) <= 2 * 4 * (256 * 256 + 256) / 1024 + 1


def test_a_script_of_torch_distributed_alone_starts_too():
    shown = run_example("--ranks", 2, EXAMPLES / "plain_torch_ddp.py")
    losses = re.findall(r"rank \d of 2: loss ([\d.e+-]+)", shown)
    assert len(losses) == 2
    assert all(float(loss) < 1e-2 for loss in losses)


def test_the_plain_script_leaves_no_thread_of_gloos_to_the_end_of_the_interpreter():
    code = "import os, plain_torch_ddp; plain_torch_ddp.main(); print(len(os.listdir('/proc/self/task')), 'threads')"
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=script_environment() | one_rank,
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.stdout.splitlines()[-1:] == ["1 threads"], done.stdout + done.stderr


def test_the_demos_script_is_among_the_examples_and_there_is_one_copy():
    from syncline.demo import train_gpt

    assert (EXAMPLES / "train_gpt.py").resolve() == Path(train_gpt.__file__).resolve()
