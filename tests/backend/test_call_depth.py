"""How many calls of Python, in how many files, lead to compiled code: from a gradient, and from a group's all_reduce.

What every message costs is these calls, whatever its size and number type. Where ranks have memory in common, a call
that is made again needs fewer.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_groups import run_groups

import syncline
from syncline.pytorch.fleet import Fleet
from syncline.runtime.shared_memory.opening import can_share
from syncline.topology import Topology
from thread_fleets import run_fleets, run_over_tcp

pytest.importorskip("syncline.fabric._native", reason="nothing compiled is there to be called")

SOURCE = str(Path(syncline.__file__).parent)
MOST_CALLS, MOST_FILES = 8, 6
MOST_CALLS_AGAIN = 3
HAND_OVER = "call_soon_threadsafe"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
)
SUMS = (*FLOATS, *OTHERS, torch.uint32, torch.int64, torch.uint64)


class Depths:
    """The calls of the package that led to compiled code, by default what runs slices, each time that it was called."""

    def __init__(self, compiled: str = "start") -> None:
        self._compiled = compiled
        self._before = threading.local()
        self.paths: list[tuple[CodeType, ...]] = []

    def from_call(self, name: str) -> list[tuple[CodeType, ...]]:
        """Return the paths that a call of this name began."""
        names = [[code.co_name for code in path] for path in self.paths]
        return [path[each.index(name) :] for path, each in zip(self.paths, names, strict=True) if name in each]

    def _here(self, frame: FrameType | None) -> tuple[CodeType, ...]:
        calls = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(SOURCE):
                calls.append(frame.f_code)
            elif frame.f_code.co_filename != __file__:
                break
            frame = frame.f_back
        return (*getattr(self._before, "path", ()), *reversed(calls))

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        is_over = event in ("c_return", "c_exception")  # of methods, CPython 3.12.1 does not tell that they begin
        is_compiled = is_over and type(getattr(called, "__self__", None)).__name__.startswith("pybind11")
        if is_compiled and called.__name__ == self._compiled:
            self.paths.append(self._here(frame))

    @contextmanager
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Watch all threads that start within this; what is handed over to the loop goes on from who did so."""
        plain = getattr(asyncio.BaseEventLoop, HAND_OVER)

        def hand_over(loop: Any, callback: Callable[..., Any], *values: Any, **options: Any) -> Any:
            path = self._here(sys._getframe(1))

            def run(*given: Any) -> None:
                self._before.path = path
                try:
                    callback(*given)
                finally:
                    self._before.path = ()

            return plain(loop, run, *values, **options)

        monkeypatch.setattr(asyncio.BaseEventLoop, HAND_OVER, hand_over)
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)


def check(paths: list[tuple[CodeType, ...]]) -> None:
    """See that some call came to compiled code, and each by a short way."""
    assert paths
    for path in paths:
        calls = [f"{code.co_filename.removeprefix(SOURCE)}: {code.co_qualname}" for code in path]
        assert len(calls) <= MOST_CALLS, "\n".join(calls)
        assert len({code.co_filename for code in path}) <= MOST_FILES, "\n".join(calls)


def test_a_groups_all_reduce_is_near_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = Depths()

    def body(group: Any) -> None:
        for dtype in SUMS:
            group.allreduce([torch.ones(3).to(dtype)]).wait()
        group.allreduce([torch.ones(3)], dist.ReduceOp.MAX).wait()

    with depths.watched(monkeypatch):
        run_groups(2, body, options=syncline.BackendOptions(shared_memory=False))
    found = depths.from_call("call")  # which takes torch's names for arguments, and calls the method
    assert all(path[1].co_name == "allreduce" for path in found)
    assert len(found) == 2 * (len(SUMS) + 1)
    check(found)


@pytest.mark.skipif(not can_share(2), reason="this platform has no segment")
def test_calls_that_are_made_again_in_shared_memory_are_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = Depths("make")

    def body(group: Any) -> None:
        sums = dist.AllreduceOptions()
        sums.asyncOp = False
        meets = dist.BarrierOptions()
        meets.asyncOp = False
        for _ in range(3):
            group.allreduce([torch.ones(1000)], sums).wait()
            group.barrier(opts=meets).wait()

    def body_of_fleet(fleet: Fleet) -> None:
        assert fleet.communicator.open_segment()
        for _ in range(3):
            fleet.all_reduce(torch.ones(1000))
            fleet.barrier()

    with depths.watched(monkeypatch):
        run_groups(2, body)
        run_fleets(2, body_of_fleet)
    assert len(depths.paths) == 2 * (3 + 3) * 2
    assert {len(path) for path in depths.paths} <= {2, MOST_CALLS_AGAIN}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "rule", [syncline.AllReduce(), syncline.Sharded(overlap_forward=True)], ids=["whole", "sharded"]
)
def test_a_gradient_is_near_compiled_code(rule: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = Depths()

    def body(fleet: Fleet) -> None:
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(8, 8, dtype=dtype)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(model, optimizer, rule, priorities=None, fleet=fleet)
        for _ in range(2):  # the first learns which gradients come
            model(torch.ones(1, 8, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with depths.watched(monkeypatch):
        run_over_tcp(Topology.flat(2), body)
    check([path for path in depths.from_call("_on_gradient") if any(code.co_name == "reduce" for code in path)])
