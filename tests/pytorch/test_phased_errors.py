"""What cannot be phased, and what goes wrong in a step, is told with rule, value, remedy and who."""

from __future__ import annotations

import copy
import errno
import gc
import os
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from phased_models import make_batches, make_stages, squared, train_alone
from torch import nn

from syncline.errors import (
    ConfigurationError,
    DeadlineError,
    FabricError,
    PeerLostError,
    StorageError,
    SynclineError,
    UpdateError,
)
from syncline.pytorch.phased import phase
from syncline.updates.phased import storage as storage_module
from syncline.updates.phased.storage import Folder, TemporaryFiles


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def outcomes(run_fleets: Any, body: Any, *, world: int = 2, **options: Any) -> list[str]:
    """Run ``body`` on every rank; return what each was told."""
    results = run_fleets(world, body, accept=(SynclineError, RuntimeError), **options)
    return [f"{type(one).__name__}: {one}" for one in results]


SHARED = nn.Linear(6, 6)
UNFIT = {
    "one stage": (lambda: [nn.Linear(6, 3)], "at least 2 stages, not 1"),
    "no stage": (lambda: [nn.Linear(6, 3), "linear"], "Stage 1 is a str"),
    "shared": (lambda: [SHARED, nn.Linear(6, 6), SHARED], "'weight' of stage 2 belongs to stage 0 as well"),
    "nothing to train": (lambda: [nn.Linear(6, 3), nn.Tanh()], "Stages 1, which rank 1 computes, have no parameter"),
    "no module": (lambda: [lambda: 3, lambda: 4], "The function for stage 0 returned a int"),
    "synchronised": (
        lambda: [nn.Linear(6, 3), nn.Sequential(nn.SyncBatchNorm(3))],
        "'0' of stage 1 is a SyncBatchNorm",
    ),
    "no shape": (lambda: [nn.Linear(6, 6), nn.LazyLinear(3)], "'weight' of stage 1 has no shape yet"),
    "elsewhere": (lambda: [nn.Linear(6, 6, device="meta"), nn.Linear(6, 3)], "of stage 0 is torch.strided on meta"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_stages_that_cannot_take_turns(kind: str, run_fleets: Any) -> None:
    make, message = UNFIT[kind]
    told = outcomes(run_fleets, lambda fleet: phase(make(), adam, loss=squared, fleet=fleet))
    assert any(message in one for one in told), told
    assert all(one.startswith(("UpdateError", "PeerLostError", "FabricClosedError")) for one in told), told


def test_a_sparse_gradient_is_refused_by_name(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        stages = [nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Flatten()), nn.Linear(6, 3)]
        trainer = phase(stages, adam, loss=squared, fleet=fleet)
        trainer.step(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 3))

    told = outcomes(run_fleets, body)
    assert any("is torch.sparse_coo; make the layer with sparse=False" in one for one in told), told


def test_an_odd_number_of_ranks(run_fleets: Any) -> None:
    told = outcomes(run_fleets, lambda fleet: phase(make_stages(4), adam, loss=squared, fleet=fleet), world=3)
    assert all("even, not 3; start one more, or one less" in one for one in told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages_in_memory": 0}, "stages_in_memory must be a whole number from 1 up, not 0"),
        ({"align": "row"}, "align must be"),
    ],
)
def test_options(options: dict[str, Any], message: str, run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        with pytest.raises(ConfigurationError, match=message):
            phase(make_stages(4), adam, loss=squared, fleet=fleet, **options)

    run_fleets(2, body)


def test_ranks_that_differ_are_told_what_and_who(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        phase(make_stages(5 if fleet.rank == 3 else 4), adam, loss=squared, fleet=fleet)

    told = outcomes(run_fleets, body, world=4)
    assert all("rank 3: it has '5 stages', rank 0 has '4 stages'" in one for one in told), told


def test_a_stage_that_differs_between_pairs(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        stages = make_stages(4)
        if fleet.rank == 3:
            stages[1] = nn.Linear(2, 2)
        phase(stages, adam, loss=squared, fleet=fleet)

    told = outcomes(run_fleets, body, world=4)
    assert "rank 3: it has 'weight: (2, 2) of torch.float32', rank 1 has" in told[1]
    assert told[3] == told[1]


def test_optimizers_that_want_more_than_a_piece(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        phase(make_stages(4), torch.optim.LBFGS, loss=squared, fleet=fleet)

    assert all("LBFGS" in one for one in outcomes(run_fleets, body))


def one_step(fleet: Any, stages: Any, **options: Any) -> float:
    trainer = phase(stages, adam, loss=options.pop("loss", squared), fleet=fleet, **options)
    inputs, targets = make_batches(1, 1)[0][0]
    return trainer.step(inputs, targets)


def test_a_stage_that_returns_neither_tensor_nor_tuple(run_fleets: Any) -> None:
    class Dictionary(nn.Linear):
        def forward(self, values: torch.Tensor) -> Any:
            return {"values": super().forward(values)}

    stages = [Dictionary(6, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)]
    told = outcomes(run_fleets, lambda fleet: one_step(fleet, copy.deepcopy(stages)))
    assert "UpdateError: Stage 0 returned a dict" in told[0]
    assert "rank 0" in told[1]


def test_a_loss_that_is_no_number(run_fleets: Any) -> None:
    told = outcomes(run_fleets, lambda fleet: one_step(fleet, make_stages(4), loss=lambda output, _: output))
    assert "returns one number" in told[1]
    assert "rank 1" in told[0]


def test_batches_that_are_missing(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet)
        inputs, targets = make_batches(1, 1)[0][0]
        if fleet.rank == 0:
            with pytest.raises(UpdateError, match="computes stage 0, so it needs inputs"):
                trainer.step(None, targets)
            with pytest.raises(UpdateError, match="batch of no samples"):
                trainer.step(inputs[:0], targets[:0])
        else:
            with pytest.raises(UpdateError, match=r"computes the loss, so its step\(\) needs targets"):
                trainer.step(inputs)
        trainer.step(inputs, targets)  # nothing was begun, so nothing is lost

    run_fleets(2, body)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "when all else is there"])
def test_partners_that_make_different_calls(run_fleets: Any, is_late: bool) -> None:
    drivers: queue.Queue[Any] = queue.Queue()
    computed: list[Any] = []

    def wait_for_evaluation() -> None:
        driver = drivers.get(timeout=60)
        with driver._changed:
            assert driver._changed.wait_for(lambda: driver._phases.awaited() == ["input"], 60)

    def body(fleet: Any) -> None:
        stages = make_stages(4)
        trainer = phase(stages, adam, loss=squared, fleet=fleet)
        inputs, targets = make_batches(1, 1)[0][0]
        if fleet.rank:
            stages[1].register_forward_hook(lambda *_: computed.append(stages[1]))
            drivers.put(trainer._driver)
            trainer.evaluate(inputs)
        else:
            if is_late:
                wait_for_evaluation()
            trainer.step(inputs, targets)

    told = outcomes(run_fleets, body)
    assert "rank 0 (host memory) called step() as call 1 and this rank evaluate() as call 1" in told[1]
    assert not computed, "what belongs to another call is no input"


def test_a_partner_that_makes_fewer_steps_is_named(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet)
        for step in make_batches(3 if fleet.rank else 2, 1):
            trainer.step(*step[0])

    told = outcomes(run_fleets, body)
    assert told[0] == "NoneType: None"
    assert "rank 0 (host memory) closed its fleet, but the forward of stage 1 needs its part" in told[1]


def test_what_a_partner_sent_before_it_left_is_used(run_fleets: Any) -> None:
    """Both micro-batches, and what it says of its batch: the first receive of either comes after it has left."""

    def body(fleet: Any) -> torch.Tensor | None:
        trainer = phase(make_stages(2), adam, loss=squared, fleet=fleet, micro_batches=2)
        if fleet.rank:
            driver = trainer._driver
            with driver._changed:
                assert driver._changed.wait_for(lambda: driver._left is not None, 60)
        return trainer.evaluate(make_batches(1, 1)[0][0][0])

    seen = run_fleets(2, body)
    assert torch.equal(seen[1], nn.Sequential(*make_stages(2))(make_batches(1, 1)[0][0][0]))


def test_a_rank_that_fails_is_named_by_its_partner_and_the_other_pairs(run_fleets: Any) -> None:
    class Failing(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("the machine is on fire")
            return super().forward(values)

    def body(fleet: Any) -> None:
        stages = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)]
        if fleet.rank == 2:
            stages[2] = Failing(6, 6, dtype=torch.float64)
        stages.append(nn.Linear(6, 3, dtype=torch.float64))
        trainer = phase(stages, adam, loss=squared, fleet=fleet)
        inputs, targets = make_batches(1, 1)[0][0]
        for _ in range(3):
            trainer.step(inputs, targets)

    told = outcomes(run_fleets, body, world=6)
    assert told[2] == "RuntimeError: the machine is on fire"
    for rank in (0, 1, 3, 4, 5):
        assert "rank 2 (" in told[rank], told
        assert "it ended with RuntimeError: the machine is on fire" in told[rank], told


class Stuck(TemporaryFiles):
    """A disk that does not answer any more, once the first stages are read."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__()
        self._release = release
        self._num_reads = 0

    def read_into(self, name: str, tensors: Any) -> int:
        self._num_reads += 1
        if self._num_reads > 2:
            assert self._release.wait(60)
        return super().read_into(name, tensors)


@pytest.mark.parametrize("first", [0, 1])
def test_a_disk_that_hangs_is_told_at_the_deadline(first: int, run_fleets: Any) -> None:
    """Of the two ranks that wait then, one for its disk and one for the other, either may be the first to say so."""
    release = threading.Event()

    def body(fleet: Any) -> None:
        storage = Stuck(release) if fleet.rank == 1 else None
        trainer = phase(make_stages(8), adam, loss=squared, fleet=fleet, storage=storage)
        # now that the job stands, which may take as long
        trainer._driver._timeout_s = 1.5 if fleet.rank == first else 30.0
        try:
            trainer.step(*make_batches(1, 1)[0][0])
        finally:
            release.set()

    told = outcomes(run_fleets, body)
    if first:
        assert told[1].startswith("DeadlineError: Stage 5 was not read within 1.5 s (/"), told
        assert "rank 1" in told[0], told
    else:
        waits = "rank 1 (host memory) sent nothing for the forward of stage 6 within 1.5 s"
        assert all(waits in each for each in told), told


def test_a_full_disk_is_told_with_what_it_takes_and_who(
    run_fleets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: set[Path] = set()
    really_write_all = storage_module._write_all

    def write_all(file: Any, memory: memoryview) -> None:
        if Path(file.name).parent in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really_write_all(file, memory)

    def body(fleet: Any) -> None:
        folder = tmp_path / str(fleet.rank)
        trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet, storage=Folder(folder))
        batches = make_batches(3, 1)
        trainer.step(*batches[0][0])
        trainer.synchronize()
        if fleet.rank == 0:
            full.add(folder)
        for step in batches[1:]:
            trainer.step(*step[0])
        trainer.synchronize()

    monkeypatch.setattr(storage_module, "_write_all", write_all)
    told = outcomes(run_fleets, body)
    assert told[0].startswith("StorageError: The storage is full: "), told
    assert "make room, or name another folder" in told[0]
    assert "rank 0" in told[1]


def test_files_that_others_remove(run_fleets: Any, tmp_path: Path) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(6), adam, loss=squared, fleet=fleet, storage=tmp_path)
        batches = make_batches(2, 1)
        trainer.step(*batches[0][0])
        trainer.synchronize()
        if fleet.rank:
            (tmp_path / "rank-0001" / "stage-0005.parameters.safetensors").unlink()
        trainer.step(*batches[1][0])

    told = outcomes(run_fleets, body)
    assert "stage-0005.parameters.safetensors cannot be read" in told[1]
    assert "rank 1" in told[0]


def test_after_a_failure_every_call_fails_with_it(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet)
        inputs, targets = make_batches(1, 1)[0][0]
        if fleet.rank:
            with pytest.raises(RuntimeError, match="must match"):
                trainer.step(inputs, targets[:, :2])
            with pytest.raises(RuntimeError, match="must match"):
                trainer.step(inputs, targets)
            raise RuntimeError("given up")
        trainer.step(inputs)

    told = outcomes(run_fleets, body)
    assert told[1] == "RuntimeError: given up"
    assert "rank 1" in told[0]


def test_who_waits_for_its_partner_is_not_taken_for_stalled(run_fleets: Any) -> None:
    """Heartbeats say that rank 0 waits, for as long as rank 1 computes the loss, in each step and not in between."""
    progress: dict[int, Any] = {}
    seen = []

    def slow_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        deadline_s = time.monotonic() + 60
        while not progress[0].is_waiting:
            assert time.monotonic() < deadline_s, "rank 0 does not say that it waits"
            os.sched_yield()
        seen.append(progress[0].value % 2)
        return squared(output, targets)

    def body(fleet: Any) -> bool:
        progress[fleet.rank] = fleet.communicator.progress
        trainer = phase(make_stages(2), adam, loss=slow_loss, fleet=fleet)
        for step in make_batches(2, 1):
            trainer.step(*step[0])
            assert not progress[fleet.rank].is_waiting
        return True

    assert run_fleets(2, body) == [True, True]
    assert seen == [1, 1]


def test_nothing_is_left_behind(run_fleets: Any) -> None:
    def body(fleet: Any) -> Any:
        trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet)
        trainer.step(*make_batches(1, 1)[0][0])
        assert trainer._setting.storage.place == tempfile.gettempdir()
        return trainer

    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    results = run_fleets(2, body)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before, "fewer, where other tests' files are closed meanwhile"
    for trainer in results:
        with pytest.raises(UpdateError, match="was closed"):
            trainer.step()
    assert not [thread.name for thread in threading.enumerate() if "phased" in thread.name]


def test_a_folder_that_the_user_named_stays_and_exports_are_plain_files(run_fleets: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stages = make_stages(5)
    batches = make_batches(3, 2)

    def body(fleet: Any) -> None:
        copies = copy.deepcopy(stages)
        trainer = phase(copies, adam, loss=squared, fleet=fleet, storage=tmp_path / "storage")
        for step in batches:
            trainer.step(*step[fleet.rank // 2])
        trainer.export(tmp_path / "exported")

    run_fleets(4, body)
    train_alone(stages, adam, batches)
    assert sorted(path.name for path in (tmp_path / "storage").iterdir()) == [f"rank-000{rank}" for rank in range(4)]
    assert len(list((tmp_path / "storage" / "rank-0002").iterdir())) == 6
    for number, stage in enumerate(stages):
        exported = load_file(tmp_path / "exported" / f"stage-{number:04d}.safetensors")
        fresh = copy.deepcopy(stage)
        fresh.load_state_dict(exported)
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(exported[name], value, rtol=1e-12, atol=1e-12)


def test_errors_are_of_one_family() -> None:
    for kind in (StorageError, UpdateError, DeadlineError, PeerLostError, FabricError):
        assert issubclass(kind, SynclineError)
