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
    done = run_python("-m", "syncline", "run", *command)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("update", ["sharded", "allreduce"])
def test_digits_are_learnt_alike_on_all_ranks(update):
    shown = run_example("--ranks", 2, EXAMPLES / "digits.py", "--update", update)
    shares = re.findall(r"rank \d: ([\d.]+)% of the test images read; optimizer state (\d+) KiB", shown)
    assert len(shares) == 2
    assert len({share for share, _ in shares}) == 1
    assert float(shares[0][0]) > 85
    assert re.search(r"[\d,]+ samples/s on 2 ranks", shown)
    whole_kib = 2 * 4 * (64 * 256 + 256 * 256 + 256 * 10 + 256 + 256 + 10) / 1024
    expected_kib = whole_kib / 2 if update == "sharded" else whole_kib
    assert all(abs(int(state) - expected_kib) < 2 for _, state in shares)


@pytest.mark.parametrize(
    ("srun_status", "restarts", "asked", "status"),
    [(0, 0, [], 0), (143, 0, ["scontrol requeue 7"], 0), (1, 9, ["scontrol requeue 7"], 0), (1, 10, [], 1)],
)
def test_the_batch_script_is_requeued_until_its_ranks_end_well(tmp_path, srun_status, restarts, asked, status):
    """What it asks of Slurm, whose programs stand aside; ``launchers/test_under_slurm.py`` has the real ones."""
    for name, last_word in {"srun": f'"${{SYNCLINE_SECRET:+secret}}"; exit {srun_status}', "scontrol": ""}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" {last_word}\n')
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    script = ["bash", EXAMPLES / "slurm" / "nanogpt.sh", "run1"]
    done = subprocess.run(script, env=variables, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.stdout.splitlines() == ["srun python examples/nanogpt.py run1 secret", *asked]
    assert done.returncode == status


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_digits_are_learnt_in_phases(num_ranks):
    shown = run_example("--ranks", num_ranks, EXAMPLES / "phased_digits.py")
    shares = re.findall(r"rank \d: ([\d.]+)% of the test images read; [\d,]+ samples/s on all pairs", shown)
    assert len(shares) == num_ranks // 2
    assert len(set(shares)) == 1
    assert float(shares[0]) > 75
    peaks = [int(peak) for peak in re.findall(r"at most (\d+) KiB of 7 stages' parameters", shown)]
    assert len(peaks) == num_ranks
    assert max(peaks) <= 2 * 4 * (256 * 256 + 256) / 1024 + 1


def test_nanogpt_goes_on_from_its_checkpoint_on_other_ranks(tmp_path):
    def trained(folder, num_ranks, num_steps, dtype):
        options = ("--steps", num_steps, "--dtype", dtype)
        shown = run_example("--ranks", num_ranks, EXAMPLES / "nanogpt.py", tmp_path / folder, *options)
        found = re.findall(r"begins after step (\d+) of|step (\d+): loss ([\d.]+), ([\d,]+) tokens/s", shown)
        (begin, *_), (_, step, loss, speed) = found
        assert (int(step), int(speed.replace(",", "")) > 0) == (num_steps, True)
        return int(begin), float(loss)

    at_once = trained("whole", 1, 4, "float32")
    begun = trained("parts", 2, 3, "bfloat16")
    gone_on = trained("parts", 3, 4, "bfloat16")
    assert (at_once[0], begun[0], gone_on[0]) == (0, 0, 3)
    assert abs(gone_on[1] - at_once[1]) < 0.01
    assert gone_on[1] < 5.5  # who knows nothing has 5.545


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
