"""How long a message's paths in Python are: from a gradient's hook to compiled code, and from arrival to the end.

Two ranks of this process train a small model over TCP on loopback. Whenever compiled code is entered that runs slices,
or a work ends, the calls of this package that led there are taken from the stack; where something is handed over to the
event loop, they go on from those that handed it over. Of each kind the longest path is counted: calls, files, classes,
and lines of the functions; and how large the rooms are that it passes through.

    python benchmarks/calls.py            the counts
    python benchmarks/calls.py --paths    every call, too
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import syncline
from syncline.fabric import FabricOptions
from syncline.pytorch.fleet import Fleet
from syncline.runtime import Communicator
from syncline.runtime.work import Work
from syncline.topology import Topology

SOURCE = Path(syncline.__file__).parent
HANDED_OVER = {"call_soon": 0, "call_soon_threadsafe": 0, "call_later": 1, "call_at": 1}
"""Methods of the event loop that take a callback, and at which place."""
NUM_STEPS = 4
"""The first learns which gradients come; in it, buckets leave at the end of the backward pass."""
NUM_FEATURES = 16
"""Of a layer: its bucket is so small that it is sent unasked."""
ROOMS = ("fabric", "runtime", "updates", "pytorch")

Path_ = tuple[CodeType, ...]


@dataclass
class Tracks:
    """The paths that were seen; every thread has the path that led to the callback that it runs."""

    before: threading.local = field(default_factory=threading.local)
    sent: list[Path_] = field(default_factory=list)
    ended: list[Path_] = field(default_factory=list)

    def here(self, frame: FrameType | None) -> Path_:
        """Return the calls of the package from ``frame`` outwards, oldest first, and those that handed over to them."""
        calls: list[CodeType] = []
        while frame is not None:
            code = frame.f_code
            if Path(code.co_filename).is_relative_to(SOURCE):
                calls.append(code)
            elif code.co_filename != __file__:
                break
            frame = frame.f_back
        return (*getattr(self.before, "path", ()), *reversed(calls))

    def carried(self, callback: Callable[..., Any], path: Path_) -> Callable[..., Any]:
        """Return ``callback`` so that what it calls goes on from ``path``."""

        def run(*arguments: Any) -> Any:
            outer = getattr(self.before, "path", ())
            self.before.path = path
            try:
                return callback(*arguments)
            finally:
                self.before.path = outer

        return run


def install(tracks: Tracks) -> None:
    """Let the event loop and works tell of every path."""
    for name, place in HANDED_OVER.items():
        carry(tracks, name, place)
    finish = Work.finish

    def finished(self: Work, error: BaseException | None) -> None:
        tracks.ended.append((*tracks.here(sys._getframe(1)), finish.__code__))
        finish(self, error)

    Work.finish = finished  # type: ignore[method-assign]


def carry(tracks: Tracks, name: str, place: int) -> None:
    """Let the callback that is argument ``place`` of a method of the loop go on from who handed it over."""
    plain = getattr(asyncio.BaseEventLoop, name)

    def handed_over(self: Any, *arguments: Any, **options: Any) -> Any:
        given = list(arguments)
        given[place] = tracks.carried(given[place], tracks.here(sys._getframe(1)))
        return plain(self, *given, **options)

    setattr(asyncio.BaseEventLoop, name, handed_over)


def watch_compiled(tracks: Tracks) -> Callable[[FrameType, str, Any], None]:
    """Return a profiler that takes a path when compiled code is entered that runs slices."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        is_over = event in ("c_return", "c_exception")  # of methods, CPython 3.12.1 does not tell that they begin
        is_compiled = is_over and type(getattr(argument, "__self__", None)).__name__.startswith("pybind11")
        if is_compiled and argument.__name__ == "start":
            tracks.sent.append(tracks.here(frame))

    return profile


class Store:
    """Where the two ranks meet: a store of this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Return the value if it is there."""
        return self._values.get(key)


def train(communicator: Communicator) -> None:
    """Make the steps of one rank."""
    with Fleet(communicator) as fleet:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, sharded = syncline.distribute(
            model, optimizer, syncline.Sharded(overlap_forward=True), priorities=None, fleet=fleet
        )
        for _ in range(NUM_STEPS):
            model(torch.ones(1, NUM_FEATURES)).sum().backward()
            sharded.step()
            sharded.zero_grad()


def run(tracks: Tracks) -> None:
    """Train on two ranks; each is a thread of this process."""
    store, topology = Store(), Topology.flat(2)
    options = FabricOptions(shares_memory=False)

    def rank(number: int) -> None:
        train(Communicator.connect(rank=number, world_size=2, topology=topology, store=store, options=options))

    threading.setprofile(watch_compiled(tracks))
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(rank, range(2)))
    finally:
        threading.setprofile(None)


def longest(paths: list[Path_], *, first: str) -> Path_:
    """Return the longest path from a function named ``first`` on."""
    found = [path[[code.co_name for code in path].index(first) :] for path in paths if passes(path, first)]
    return max(found, key=len)


def passes(path: Path_, name: str) -> bool:
    """Whether a path passes through a function named ``name``."""
    return any(code.co_name == name for code in path)


def describe(name: str, path: Path_) -> str:
    """Say how long a path is."""
    files = {code.co_filename for code in path}
    classes = {owner for code in path if (owner := code.co_qualname.rpartition(".")[0])}
    lines = sum(1 + max(line or 0 for *_, line in code.co_lines()) - code.co_firstlineno for code in set(path))
    return f"{name:<28} {len(path):>7} {len(files):>7} {len(classes):>9} {lines:>6}"


def describe_room(name: str) -> str:
    """Say how large a room is."""
    files = sorted((SOURCE / name).rglob("*.py"))
    trees = [ast.walk(ast.parse(file.read_text())) for file in files]
    kinds = [type(node) for tree in trees for node in tree]
    num_functions = kinds.count(ast.FunctionDef) + kinds.count(ast.AsyncFunctionDef)
    lines = sum(file.read_text().count("\n") for file in files)
    return f"{name:<28} {len(files):>7} {kinds.count(ast.ClassDef):>7} {num_functions:>9} {lines:>6}"


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description="Count the calls of the two paths of a message.")
    parser.add_argument("--paths", action="store_true", help="print every call, too")
    shows_paths = parser.parse_args().paths
    tracks = Tracks()
    install(tracks)
    print(f"{'path':<28} {'calls':>7} {'files':>7} {'classes':>9} {'lines':>6}")
    run(tracks)
    from_hook = [path for path in tracks.sent if passes(path, "_on_gradient") and passes(path, "reduce")]
    arrived = [path for path in tracks.ended if passes(path, "_done")]
    paths = {
        "hook to compiled code": longest(from_hook, first="_on_gradient"),
        "arrival to end": longest(arrived, first="_on_ready"),
    }
    for name, path in paths.items():
        print(describe(name, path))
        for code in path if shows_paths else ():
            print(f"    {Path(code.co_filename).relative_to(SOURCE)}: {code.co_qualname}")
    print(f"\n{'room':<28} {'modules':>7} {'classes':>7} {'functions':>9} {'lines':>6}")
    for room in ROOMS:
        print(describe_room(room))


if __name__ == "__main__":
    main()
