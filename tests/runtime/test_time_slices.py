"""The wish for short time slices: which thread has it afterwards, and which is left alone."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncline.runtime.loop import SLICE_NS, CommunicationLoop, ask_for_short_slices, stand_back

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275, "riscv64": 275}
pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in SCHED_GETATTR, reason="only Linux has the wish"
)


def read_attributes():
    """Return policy, nice and slice of the calling thread; kernels without the wish tell a slice of 0."""
    buffer = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], 0, buffer, 48, 0) == 0
    _, policy, _, nice, _, slice_ns, _, _ = struct.unpack("=IIQiIQQQ", buffer.raw)
    return policy, nice, slice_ns


def in_thread(*functions):
    """Return what the functions return, one after another, on one new thread."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return [threads.submit(function).result() for function in functions]


def test_a_thread_gets_shorter_slices_and_keeps_its_weight():
    (policy, nice, slice_ns), is_taken, after = in_thread(read_attributes, ask_for_short_slices, read_attributes)
    assert is_taken
    assert after == (policy, nice, SLICE_NS if slice_ns else 0)


def test_a_thread_of_another_policy_is_left_alone():
    batch = os.SCHED_BATCH
    before, is_taken, after = in_thread(
        lambda: os.sched_setscheduler(0, batch, os.sched_param(0)) or read_attributes(),
        ask_for_short_slices,
        read_attributes,
    )
    assert not is_taken
    assert after == before


def test_the_communication_loop_asks_for_itself_alone():
    before = read_attributes()
    loop = CommunicationLoop()
    loop.start()
    try:

        async def read_on_loop():
            return read_attributes()

        _, _, slice_ns = loop.run(read_on_loop(), 10.0)
    finally:
        loop.stop()
    assert slice_ns == (SLICE_NS if before[2] else 0)
    assert read_attributes() == before


def test_a_thread_that_stands_back_keeps_its_weight():
    (_, nice, _), is_taken, (policy, nice_after, _) = in_thread(read_attributes, stand_back, read_attributes)
    assert is_taken
    assert (policy, nice_after) == (os.SCHED_BATCH, nice)
    _, is_taken_again = in_thread(stand_back, stand_back)
    assert not is_taken_again, "it is of another policy by now"


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
def test_a_sandbox_that_refuses_stops_nothing(monkeypatch, call):
    """gVisor knows one policy; a filter of system calls may refuse to name it, and the loop starts all the same."""

    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, call, refuse)
    with ThreadPoolExecutor(max_workers=1) as threads:
        assert not threads.submit(stand_back).result()
        threads.submit(ask_for_short_slices).result()


def test_the_communication_loop_stands_back_for_itself_alone():
    before = read_attributes()
    loop = CommunicationLoop()
    loop.start()
    try:

        async def stand_back_on_loop():
            stand_back()
            return read_attributes()

        policy, _, _ = loop.run(stand_back_on_loop(), 10.0)
    finally:
        loop.stop()
    assert policy == os.SCHED_BATCH
    assert read_attributes() == before
