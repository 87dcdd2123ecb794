"""Jobs that ranks join while they run, as a user starts them, to their end: exit code 0, and nothing is left behind."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from joining_rank import NUM_SAMPLES, RULES, make_model, make_optimizer
from launched_jobs import plain_environment

from rank_scripts import Program, reserved_port, run_programs

SCRIPT = Path(__file__).with_name("joining_rank.py")
RUN = ["-m", "syncline", "run"]
TWO_HOSTS = """
topology: two-hosts
switch: core
children:
  - {host: a0, uplink: 1 Gbit/s, ranks: 2}
  - {host: b0, uplink: 1 Gbit/s, ranks: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where ranks write, with the pipe in which a newcomer says that it may wait."""
    folder = tmp_path / "job"
    folder.mkdir()
    os.mkfifo(folder / "asked")
    return folder


def start(commands: list[list[str]], folder: Path, **variables: str) -> list[str]:
    """Run commands to their end; see that all end well, and that no process and no file of theirs is left."""
    scratch, place = folder.parent / "scratch", folder.parent / "place"
    scratch.mkdir()
    place.mkdir()
    environment = plain_environment() | {"TMPDIR": str(scratch)} | variables
    ended = run_programs([Program(tuple(command), environment, place) for command in commands])
    assert not any(one.returncode for one in ended), ended
    assert not [*scratch.glob("syncline*")]  # torch leaves a folder of its own there
    assert str(place) not in [process.info["cwd"] for process in psutil.process_iter(["cwd"])]
    return [one.stdout for one in ended]


def check_ended(folder: Path, numbers: list[int], *, is_replayed: bool = True) -> None:
    """All who are left ended alike, as one process that trains on what they did; the last epoch was whole.

    Not ``is_replayed``: a rank was lost that other steps were made without, until a period ended.
    """
    ended = [json.loads((folder / f"end-{number}.json").read_text()) for number in numbers]
    assert all(one == ended[0] for one in ended)
    assert ended[0]["members"] == numbers
    steps: dict[int, list[float]] = defaultdict(list)
    last: list[float] = []
    for path in sorted(folder.glob("steps-*.jsonl")):
        for step, epoch, samples in map(json.loads, path.read_text().splitlines()):
            steps[step] += samples
            last += samples if epoch == ended[0]["epoch"] else []
    assert sorted(last) == [*range(NUM_SAMPLES)]
    model: Any = make_model()
    optimizer = make_optimizer(model)
    for _, samples in sorted(steps.items()):
        optimizer.zero_grad()
        model(torch.tensor(samples, dtype=torch.float64)[:, None] / NUM_SAMPLES).square().mean().backward()
        optimizer.step()
    assert len(steps) == ended[0]["iteration"]
    if not is_replayed:
        return
    for found, value in zip(ended[0]["weights"], model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), value.detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_machine_joins_a_job_of_two(rule: str, folder: Path) -> None:
    topology, secret = folder.parent / "net.yaml", folder.parent / "secret"
    topology.write_text(TWO_HOSTS)
    secret.touch(0o600)
    secret.write_text("s" * 32)
    with reserved_port() as master, reserved_port() as door:
        of_job = ["--topology", str(topology), "--master", f"127.0.0.1:{master}", "--elastic", "--join-port", str(door)]
        known = ["--secret-file", str(secret), str(SCRIPT), str(folder), rule, "4"]
        commands = [
            [*RUN, "--host", "a0", *of_job, *known],
            [*RUN, "--host", "b0", *of_job, *known],
            [*RUN, "--join", f"127.0.0.1:{door}", "--host", "c0", *known],
        ]
        first, _, newcomer = start(commands, folder)
    assert "syncline: rank 3 came in after step" in first
    assert "4 ranks go on in epoch 1" in first
    assert "failed" not in newcomer
    assert "[0>3] is in the job" in newcomer
    check_ended(folder, [0, 1, 2, 3])


def test_a_machine_joins_a_job_whose_machines_have_one_port_each(folder: Path) -> None:
    """Its store, ranks and newcomers share it; and here all machines are one."""
    runtime, secret = folder.parent / "runtime", folder.parent / "secret"
    runtime.mkdir(0o700)
    secret.touch(0o600)
    secret.write_text("s" * 32)
    with reserved_port() as port:
        of_job = ["--ranks", "3", "--master", f"127.0.0.1:{port}", "--elastic"]
        known = ["--secret-file", str(secret), str(SCRIPT), str(folder), "spares", "4"]
        commands = [[*RUN, *of_job, *known], [*RUN, "--join", f"127.0.0.1:{port}", "--host", "c0", *known]]
        first, newcomer = start(commands, folder, SYNCLINE_PORTS=str(port), XDG_RUNTIME_DIR=str(runtime))
    assert "syncline: rank 3 came in after step" in first
    assert "[0>3] is in the job" in newcomer
    check_ended(folder, [0, 1, 2, 3])
    assert not [*(runtime / "syncline").iterdir()]


@pytest.mark.parametrize("rule", ["spares", "overlapped"])
def test_a_rank_that_is_killed_comes_back(rule: str, folder: Path) -> None:
    command = [*RUN, "--ranks", "3", "--elastic", "--restarts", "1", str(SCRIPT), str(folder), rule, "3", "1"]
    (printed,) = start([command], folder)
    assert "the job lost ranks, which came back: rank 1 (in the job: rank 3)" in printed
    assert "[1] is in the job" in printed
    assert "[1>3] is in the job" in printed
    check_ended(folder, [0, 2, 3], is_replayed=rule == "spares")


def test_the_only_rank_of_the_machine_where_all_met_comes_back_by_the_others(folder: Path) -> None:
    topology, secret = folder.parent / "net.yaml", folder.parent / "secret"
    topology.write_text(
        TWO_HOSTS.replace("ranks: 1", "ranks: more").replace("ranks: 2", "ranks: 1").replace("more", "2")
    )
    secret.touch(0o600)
    secret.write_text("s" * 32)
    with reserved_port() as master:
        of_job = ["--topology", str(topology), "--master", f"127.0.0.1:{master}", "--elastic", "--restarts", "1"]
        known = ["--secret-file", str(secret), str(SCRIPT), str(folder), "spares", "3", "0"]
        ended = start([[*RUN, "--host", host, *of_job, *known] for host in ("a0", "b0")], folder)
    assert "start again in 1 s, and join those that go on elsewhere" in ended[0]
    check_ended(folder, [1, 2, 3])
