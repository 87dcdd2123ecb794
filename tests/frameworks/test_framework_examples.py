"""Each framework's example ends with the parameters of one process; those of as many ranks share their processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from served_stores import AGENT, WARM, ports_of, serve_stores

from rank_scripts import Program, forked_python, run_programs, run_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
SCRIPT = Path(__file__).with_name("examples_process.py")
OF_TWO = (
    "ddp",
    "comm_hook",
    "existing_group",
    "zero",
    "fsdp2",
    "dcp:{folder}/dcp",
    "dtensor",
    "compiled_ddp:aot_eager",
    "lightning_strategy",
    "accelerate_train",
    "transformers_train:{folder}/transformers",
)
OF_FOUR = ("hsdp:gloo", "hsdp:syncline")
NAMES = {"lightning_strategy": "lightning", "accelerate_train": "accelerate", "transformers_train": "transformers"}
NAMES |= {"hsdp:gloo": "hsdp over gloo", "hsdp:syncline": "hsdp over syncline"}
TOLERANCE = 2e-6


def run_examples(num_ranks: int, folder: Path, examples: tuple[str, ...]) -> str:
    """Return what all ranks print; they meet in a store that is not theirs, as under torchrun."""
    stores = serve_stores(len(examples))
    outputs = run_script(SCRIPT, num_ranks, str(folder), ports_of(stores), *examples, extra=AGENT, warm=WARM)
    assert [status for status, _ in outputs] == [0] * num_ranks, "\n".join(text for _, text in outputs)
    return "\n".join(text for _, text in outputs)


@pytest.fixture(scope="module")
def printed_by_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_examples(2, tmp_path_factory.mktemp("two"), OF_TWO)


@pytest.fixture(scope="module")
def printed_by_four(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_examples(4, tmp_path_factory.mktemp("four"), OF_FOUR)


def check_differences(printed: str, name: str, num_ranks: int) -> None:
    line = rf"(?<![a-z_]){name}: rank (\d) differs from one process by (\d\.\de[+-]\d\d)"  # ranks may share a line
    found = dict(re.findall(line, printed))
    assert set(found) == {str(rank) for rank in range(num_ranks)}, printed
    assert all(float(difference) < TOLERANCE for difference in found.values()), found


@pytest.mark.parametrize("example", OF_TWO, ids=lambda name: name.partition(":")[0])
def test_two_ranks_end_as_one_process_does(example: str, printed_by_two: str) -> None:
    script = example.partition(":")[0]
    check_differences(printed_by_two, NAMES.get(script, script), 2)


@pytest.mark.parametrize("example", OF_FOUR)
def test_two_sites_of_two_ranks_end_as_one_process_does(example: str, printed_by_four: str) -> None:
    check_differences(printed_by_four, NAMES[example], 4)


def test_zero_gathers_the_whole_state(printed_by_two: str) -> None:
    assert "zero: state of 6 parameters" in printed_by_two


def test_the_examples_say_how_fast_they_train(printed_by_two: str, printed_by_four: str) -> None:
    by_two = set(OF_TWO) - {"dtensor", "transformers_train:{folder}/transformers"}
    assert len(re.findall(r"[\d,]+ samples/s", printed_by_two)) == 2 * (len(by_two) + 1)  # one stops, and goes on
    assert len(re.findall(r"[\d,]+ samples/s", printed_by_four)) == 4 * len(OF_FOUR)
    assert "train_samples_per_second" in printed_by_two


def test_the_trainers_loggers_are_told_of_each_step(printed_by_two: str) -> None:
    told = re.findall(r"'syncline/steps': '(\d+)', 'syncline/goodput': '([\d.]+)'", printed_by_two)
    assert [int(steps) for steps, _ in told] == [1, 2, 3, 4] * 2  # nobody said which rank is the first of the machine
    assert all(0 < float(goodput) <= 1 for _, goodput in told)


def check_command(name: str, *words: str, forks: bool = True) -> None:
    (done,) = run_programs([Program(words, splits=True, forks=forks)], warm=WARM)
    assert done.returncode == 0, done.stdout + done.stderr
    check_differences(done.stdout, name, 2)


@pytest.mark.parametrize("launcher", ["syncline run --ranks 2", "torch.distributed.run --nproc-per-node 2"])
def test_an_example_runs_under_each_launcher(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's agent has threads and cannot fork, so it starts what does."""
    monkeypatch.setenv("PYTHON_EXEC", forked_python())
    check_command("ddp", "-m", *launcher.split(), str(EXAMPLES / "ddp.py"), forks=launcher.startswith("syncline"))


def test_lightning_starts_the_ranks_where_no_launcher_did() -> None:
    check_command("lightning", str(EXAMPLES / "lightning_strategy.py"), "2")


def test_every_example_is_tried() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {
        "regression",
        "ray_train",
    }  # what they share; and one that has a test of its own
    assert {name.partition(":")[0] for name in OF_TWO + OF_FOUR} == scripts
