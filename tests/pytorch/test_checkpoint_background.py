"""Checkpoints that are written while training goes on: what is in them, who waits, and where errors come out."""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn

import syncline
from syncline.errors import CheckpointError, DeadlineError
from syncline.pytorch.checkpoint import folder, storage
from syncline.pytorch.checkpoint.background import writer_of
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, Overlapped, Sharded, UpdateRule

pytestmark = pytest.mark.usefixtures("small_slices")

CASE = CASES["sometimes_unused"]
BATCHES = CASE.batches(6, 12)
WAIT_S = 60.0


class Gate:
    """Holds threads that begin to write a checkpoint until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Semaphore(0)
        write = storage.write_chunks

        def gated(*args: Any, **settings: Any) -> Any:
            self.reached.release()
            assert self.opened.wait(WAIT_S)
            return write(*args, **settings)

        monkeypatch.setattr(storage, "write_chunks", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def step(model: nn.Module, optimizer: Any, number: int, fleet: Fleet | None = None) -> None:
    rank, num_ranks = (0, 1) if fleet is None else (fleet.rank, fleet.world_size)
    inputs, targets = BATCHES[number]
    loss_of(model, inputs.tensor_split(num_ranks)[rank], targets.tensor_split(num_ranks)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: Any = None) -> list[torch.Tensor]:
    if optimizer is not None:
        optimizer.synchronize()
    return [value.detach().clone() for value in model.state_dict().values()]


RULES = {
    "all_reduce": AllReduce(),
    "sharded": Sharded(bucket_bytes=700, overlap_forward=True),
    "sharded_whole": Sharded(align="parameter"),
    "overlapped": Overlapped(period=1),
    "overlapped_some": Overlapped(period=1, quorum=2),
    "clustered": Clustered(period=1),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_it_has_what_was_when_it_was_asked_for(rule: UpdateRule, tmp_path: Path, run_fleets: Any, gate: Gate) -> None:
    models = copies(CASE.make(), 3)

    def body(fleet: Fleet) -> dict[str, Any]:
        inner = torch.optim.AdamW(models[fleet.rank].parameters(), lr=0.02)
        model, optimizer = syncline.distribute(models[fleet.rank], inner, rule, fleet=fleet)
        step(model, optimizer, 0, fleet)
        optimizer.end_period()
        expected = values_of(model, optimizer)
        work = syncline.save_checkpoint(tmp_path / "saved", model, optimizer, extra="first", wait=False)
        step(model, optimizer, 1, fleet)  # parameters and state change in place while nothing is written yet
        optimizer.end_period()
        assert not torch.equal(values_of(model, optimizer)[0], expected[0])
        if fleet.rank == 0:
            for _ in range(3 if optimizer.training.updater.checkpoint_writer is None else 1):
                assert gate.reached.acquire(timeout=WAIT_S)
            assert not (tmp_path / "saved").exists()
            gate.opened.set()
        if work is not None:
            assert work.path == tmp_path / "saved"
            work.wait()
            assert work.done()
        return {"values": expected, "has_work": work is not None}

    found = run_fleets(3, body)
    assert [one["has_work"] for one in found] == [True, *[isinstance(rule, AllReduce | Sharded)] * 2]
    model = CASE.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    assert syncline.load_checkpoint(tmp_path / "saved", model, optimizer) == "first"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(values_of(model), found[0]["values"], strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_memory_is_kept_and_a_second_save_waits(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(100, 100)
    first = syncline.save_checkpoint(tmp_path / "run1", model, iteration=1, keep=2, wait=False)
    assert first is not None
    memory = writer_of(model)._memory
    assert memory is not None
    with pytest.raises(DeadlineError, match=r"run1/iteration-0000000001 is still being written after 0.001 s"):
        first.wait(0.001)
    assert repr(first) == f"<CheckpointWork {tmp_path}/run1/iteration-0000000001: being written>"
    order: list[str] = []

    def save_again() -> None:
        second = syncline.save_checkpoint(tmp_path / "run1", model, iteration=2, keep=2, wait=False)
        assert second is not None
        order.append("second began")
        second.wait()

    thread = threading.Thread(target=save_again)
    thread.start()
    order.append("first is let go")
    gate.opened.set()
    thread.join(WAIT_S)
    assert order == ["first is let go", "second began"]
    assert first.done()
    assert writer_of(model)._memory is memory
    assert sorted(path.name for path in (tmp_path / "run1").iterdir()) == [
        "iteration-0000000001",
        "iteration-0000000002",
    ]


def num_present(memory: torch.Tensor) -> int:
    """Count the pages of ``memory`` that the kernel has found already."""
    first, stop = memory.data_ptr() // PAGESIZE, -(-(memory.data_ptr() + memory.nbytes) // PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = struct.unpack(f"<{stop - first}Q", pages.read(8 * (stop - first)))
    return sum(entry >> 63 for entry in entries)


def adam_after_a_step(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_thread_touches_the_memory_ahead_that_the_first_save_copies_into(tmp_path: Path) -> None:
    model, optimizer = adam_after_a_step(700)
    writer = writer_of(model)
    before = set(threading.enumerate())
    with writer._touching:  # which the thread waits for: whatever is touched now is touched by this one
        syncline.prepare_save(model, optimizer)
        (toucher,) = set(threading.enumerate()) - before
        memory = writer._memory
        assert memory is not None
        assert num_present(memory) == 0
    toucher.join(WAIT_S)
    assert num_present(memory) == -(-memory.nbytes // PAGESIZE)
    syncline.prepare_save(model, optimizer)  # all is there
    work = syncline.save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
    assert work is not None
    assert writer._memory is memory, "it was large enough"
    work.wait()


def test_a_save_that_comes_before_all_is_touched_is_written_over_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    model, optimizer = adam_after_a_step(30)
    late: list[threading.Thread] = []

    def start_late(thread: threading.Thread) -> None:
        late.append(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_late)
        syncline.prepare_save(model, optimizer)
    work = syncline.save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
    assert work is not None
    (toucher,) = late
    toucher.start()
    toucher.join(WAIT_S)
    gate.opened.set()
    work.wait()
    loaded = nn.Linear(30, 30)
    syncline.load_checkpoint(tmp_path / "saved", loaded, torch.optim.Adam(loaded.parameters()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(values_of(loaded), values_of(model), strict=True))


class ImportSpy:
    """Notes which thread imports what."""

    def __init__(self) -> None:
        self.imported: dict[str, threading.Thread] = {}

    def find_spec(self, name: str, *_: Any) -> None:
        self.imported[name] = threading.current_thread()


def test_the_training_thread_imports_nothing_in_its_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = adam_after_a_step(30)
    save_checkpoint, spy, name = syncline.save_checkpoint, ImportSpy(), "syncline.pytorch.checkpoint.storage"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(syncline.pytorch.checkpoint, "storage")
    monkeypatch.setattr(sys, "meta_path", [spy, *sys.meta_path])
    work = save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
    assert work is not None
    work.wait()
    assert name in spy.imported
    assert threading.current_thread() not in spy.imported.values()


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["wait", "next", "close"])
def test_what_goes_wrong_comes_out_once(
    where: str, tmp_path: Path, run_fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = copies(CASE.make(), 2)
    commit = folder.commit
    monkeypatch.setattr(folder, "commit", refuse)
    message = f"Checkpoint {tmp_path / 'saved'}: a rank cannot complete the checkpoint: rank 0: No space left on device"
    met = threading.Barrier(2, timeout=WAIT_S)

    def train(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.02)
        model, optimizer = syncline.distribute(models[fleet.rank], inner, AllReduce(), fleet=fleet)
        work = syncline.save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
        assert work is not None
        step(model, optimizer, 0, fleet)  # training does not end with it
        if where == "wait":
            with pytest.raises(CheckpointError) as told:
                work.wait()
            assert str(told.value) == message
        elif where == "next":
            with pytest.raises(CheckpointError, match=r"cannot begin: ranks 0 and 1: Checkpoint .* No space left"):
                syncline.save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
        else:
            return
        met.wait()
        monkeypatch.setattr(folder, "commit", commit)
        met.wait()
        syncline.save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)

    if where == "close":
        errors = run_fleets(2, train, accept=CheckpointError)
        # rank threads return the error with which their fleet closed
        assert [str(error) for error in errors] == [message] * 2
        assert list(tmp_path.iterdir()) == []
    else:
        run_fleets(2, train)
        assert [path.name for path in tmp_path.iterdir()] == ["saved"], "what was under way is whole after the close"
