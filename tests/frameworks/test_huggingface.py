"""``syncline.huggingface()``: under launchers that Accelerate knows too little of, too late, and alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

import syncline
from rank_scripts import Program, reserved_port, run_programs, script_environment

SCRIPT = Path(__file__).with_name("huggingface_process.py")


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is one of two, and what it makes is gone afterwards."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def of_open_mpi(rank: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    told = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
    return script_environment() | told | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_accelerate_trains_on_all_ranks_of_a_launcher_that_sets_no_rank() -> None:
    with reserved_port() as port:
        programs = [Program((str(SCRIPT),), of_open_mpi(rank, port), forks=False) for rank in range(2)]
        ended = run_programs(programs)
    assert [one.returncode for one in ended] == [0, 0], [one.stdout for one in ended]
    for rank, one in enumerate(ended):
        said = re.search(rf"\({rank}, {rank}, 2\) on syncline, DistributedDataParallel: (\S+)", one.stdout)
        assert said, one.stdout
        assert float(said[1]) < 1e-6


@pytest.mark.usefixtures("of_two")
def test_after_a_group_of_another_backend_it_is_too_late() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(syncline.ConfigurationError, match=r"on rank 1 a process group of gloo exists .* first call"):
        syncline.huggingface()


@pytest.mark.usefixtures("of_two")
def test_after_accelerate_has_begun_alone_it_is_too_late() -> None:
    assert PartialState().num_processes == 1  # of two: what it does without a word
    with pytest.raises(syncline.ConfigurationError, match=r"on rank 1 Accelerate has chosen already .* first call"):
        syncline.huggingface()
    assert not dist.is_initialized()


def test_who_is_alone_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    before = dict(os.environ)
    syncline.huggingface()
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_a_wrong_option_is_told_even_to_who_is_alone() -> None:
    with pytest.raises(syncline.ConfigurationError, match="options must be"):
        syncline.huggingface(7)  # type: ignore[arg-type]
