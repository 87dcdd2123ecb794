"""The small parts under the update rules: memory, the update thread, readiness."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from syncline.errors import ConfigurationError, PeerLostError, UpdateError
from syncline.runtime import CommunicationLoop, Work, communicators_in_memory
from syncline.runtime.worker_thread import WorkerThread
from syncline.tensors.memory import bytes_of, reduction_for
from syncline.updates import AllReduce, Sharded
from syncline.updates.control import ControlStream
from syncline.updates.report import StepReports
from syncline.updates.sharded_updater import Readiness


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64, torch.int8])
def test_reductions_add_in_place(dtype: torch.dtype) -> None:
    into, other = torch.tensor([1, 2, 3]).to(dtype), torch.tensor([10, 20, 30]).to(dtype)
    reduction = reduction_for(dtype)
    reduction.add(bytes_of(into)[: 2 * dtype.itemsize], bytes_of(other)[: 2 * dtype.itemsize])
    reduction.add(bytes_of(into)[:0], bytes_of(other)[:0])
    assert torch.equal(into, torch.tensor([11, 22, 3]).to(dtype))
    assert reduction.itemsize == dtype.itemsize


def test_bytes_keep_memory_that_a_tensor_leaves() -> None:
    tensor = torch.arange(4, dtype=torch.int16)
    storage = weakref.ref(tensor.untyped_storage())
    memory = bytes_of(tensor[1:])
    tensor.data = torch.zeros(2, dtype=torch.int16)
    assert memory.tobytes() == b"\1\0\2\0\3\0"
    assert storage() is not None
    memory.release()
    assert storage() is None
    assert bytes_of(torch.empty(0, 3)).nbytes == 0


def test_bool_has_no_sum() -> None:
    with pytest.raises(ConfigurationError, match="cannot be summed"):
        reduction_for(torch.bool)


def test_a_report_that_a_loss_ends_names_its_step() -> None:
    first, second = communicators_in_memory(2)
    reports = StepReports(ControlStream(first, stream=1))
    report = reports.start(1.0, 2.0, [True], [0.0], step=7)
    second.abort()
    with pytest.raises(PeerLostError, match=r"rank 1 .* during report of a backward pass, step 7"):
        report.present  # noqa: B018
    first.abort()


@pytest.fixture(name="loop")
def _loop() -> Iterator[CommunicationLoop]:
    loop = CommunicationLoop("test")
    loop.start()
    yield loop
    loop.stop()


def test_jobs_run_front_first_as_they_become_ready(loop: CommunicationLoop) -> None:
    failures: list[BaseException] = []
    thread = WorkerThread("test", on_failure=failures.append)
    order: list[int] = []
    gate, begun, done = threading.Event(), threading.Event(), threading.Event()
    works = [Work("test", timeout_s=5.0, loop=loop) for _ in range(4)]

    def hold() -> None:
        begun.set()
        gate.wait(60)

    thread.submit(0, (), hold)
    assert begun.wait(60)
    for urgency in (3, 1, 2):
        thread.submit(urgency, (works[urgency], works[0]), lambda urgency=urgency: order.append(urgency))
    for number in (2, 0, 3):
        loop.call_soon(works[number].finish, None)
    for _ in range(3):  # a work's callbacks take a turn of the loop each
        turned = threading.Event()
        loop.call_soon(turned.set)
        assert turned.wait(60)
    thread.submit(9, (), done.set)
    gate.set()
    assert done.wait(60)
    assert order == [2, 3], "the job whose work is not done does not hold up the others"
    thread.close()
    thread.close()
    assert not failures


def test_readiness_tells_of_the_first_failure() -> None:
    ready = Readiness(3)
    assert ready.is_final(range(3))
    ready.begin()
    ready.finish(1)
    ready.wait((1,), 0.0)
    ready.fail(KeyError("first"))
    ready.fail(ValueError("second"))
    for _ in range(2):
        with pytest.raises(KeyError, match="first"):
            ready.wait((0,), 0.0)
    with pytest.raises(KeyError, match="first"):
        ready.raise_failure()


@pytest.mark.parametrize("rule", [Sharded, AllReduce])
def test_rules_are_checked_when_they_are_written(rule: type) -> None:
    for options in ({"bucket_bytes": 0}, {"bucket_bytes": -1}):
        with pytest.raises(ConfigurationError, match="a whole number from 1 up"):
            rule(**options)
    assert rule() == rule()


def test_alignment_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="align"):
        Sharded(align="bucket")  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UpdateError, match="Adafactor"):
        Sharded().check(torch.optim.Adafactor(model.parameters()))
    Sharded(align="parameter").check(torch.optim.Adafactor(model.parameters()))
