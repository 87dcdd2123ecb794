"""Overlapped on a device: what is pushed and pulled is copied beside the training, which waits for no push."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from overlapped_recording import record
from overlapped_replay import replay
from overlapped_training import one_step, start
from test_overlapped_oracles import make_replica

from small_regression import make_adam, parameters_of
from syncline.tensors.device_copies import CopyKind
from syncline.updates import Overlapped
from thread_device import ThreadDevice, hold_buckets
from thread_fleets import run_fleets


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDevice]:
    """Messages are full of ones in all bits, which are NaN, until something is copied there."""
    yield from hold_buckets(monkeypatch)


@pytest.mark.parametrize("make_rule", [Overlapped, partial(Overlapped, rule="swap", quorum=2)], ids=["default", "swap"])
def test_a_recorded_run_gives_the_same_bits_in_one_process(make_rule, device: ThreadDevice) -> None:
    rule = make_rule(period=7, max_staleness=3, bucket_bytes=128)

    def body(fleet):
        model, optimizer = start(fleet, rule, make_adam, torch.float32)
        recorder = record(optimizer.training.updater)
        fleet.barrier()  # before anybody's push may be part of a sum
        step = 0
        while optimizer.iteration < 15:
            one_step(model, optimizer, fleet.rank, step, torch.float32)
            step += 1
        optimizer.end_period()
        return model, recorder

    results = run_fleets(3, body, seed=5)
    replicas = [make_replica(rank, 128, torch.float32) for rank in range(3)]
    replay([recorder for _, recorder in results], replicas, rule)
    assert min(device.num_copied.values()) > 15
    for (model, _), replica in zip(results, replicas, strict=True):
        assert torch.equal(parameters_of(model), torch.cat([bucket.parameters for bucket in replica.buckets]))


def test_a_step_waits_for_no_copy_of_its_gradients_and_nothing_is_pushed_before(device: ThreadDevice) -> None:
    rule = Overlapped(period=99, max_staleness=None)

    def body(fleet):
        model, optimizer = start(fleet, rule, make_adam)
        fleet.barrier()
        device.hold(CopyKind.TO_HOST)
        num_copied = device.num_copied[CopyKind.TO_HOST]
        fleet.barrier()
        for step in range(3):
            one_step(model, optimizer, fleet.rank, step)
        assert device.num_copied[CopyKind.TO_HOST] == num_copied
        assert optimizer.statistics().share_with_global == 0.0
        fleet.barrier()
        device.let_go(CopyKind.TO_HOST)
        optimizer.end_period()
        return parameters_of(model)

    first, second = run_fleets(2, body)
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_a_copy_that_fails_ends_the_step(device: ThreadDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    class LostDeviceError(RuntimeError):
        """As a driver says it."""

    wait = device.wait

    def fail(mark: threading.Event) -> None:
        if threading.current_thread().name == "syncline-pushes":
            raise LostDeviceError("the device is gone")
        wait(mark)

    monkeypatch.setattr(device, "wait", fail)

    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=99, max_staleness=2), make_adam)
        for step in range(6):
            one_step(model, optimizer, fleet.rank, step)

    (failure,) = run_fleets(1, body, accept=LostDeviceError)  # of two, one could hear first that the other has failed
    assert str(failure) == "the device is gone"
