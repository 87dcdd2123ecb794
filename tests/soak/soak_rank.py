"""One rank of a soak: it trains, says after each step what its parameters are, and does to itself what the plan wants.

How it ends it tells as well: with which error, and what it had open before it joined the job and after it left.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import re
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from soak_memory import rss_kib
from soak_pairs import train_in_pairs
from soak_plan import SAMPLE_EVERY
from soak_proxy import tell_proxy
from soak_saving import MOST_TEXT, Saver
from soak_training import Gauge, batch_of, loss_of, make_model, make_optimizer

import syncline
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.runtime import communicator

BUCKET_BYTES = 64 << 10
FEW_FILES = 24
WRAPPED = re.compile(r"(PeerLost|Deadline|Mismatch|FabricClosed)Error: ")
"""As DDP tells what a process group raises: torch makes a RuntimeError of it, with its text."""


class Teller:
    """Writes events for whoever judges the job, each whole, with the machine's clock."""

    def __init__(self, path: str, rank: int) -> None:
        self._pipe = os.open(path, os.O_WRONLY)
        self._rank = rank

    def tell(self, **event: Any) -> None:
        line = json.dumps({"rank": self._rank, "at_s": time.monotonic(), **event}) + "\n"
        os.write(self._pipe, line.encode())


class UserLoopError(Exception):
    """What a user's own loop may raise."""


class Rank:
    """This process in its job."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank, self.plan = config["rank"], config["plan"]
        self.teller = Teller(config["events"], self.rank)
        self._number = self.rank
        """By which the fleet knows it: that of who comes later is told when it is in."""
        self._own = [fault for fault in self.plan["faults"] if fault["victim"] == config["place"]]
        self._saver = Saver(config, self._own, self.teller.tell)

    def fault(self, kind: str, step: int) -> dict[str, Any] | None:
        """Return the fault of this rank that is due after ``step`` steps."""
        return next((fault for fault in self._own if (fault["kind"], fault["at_step"]) == (kind, step)), None)

    def train(self) -> None:
        """Train to the end of the plan."""
        if self.plan["rule"] == "phase":
            train_in_pairs(self)
            return
        with self._joined() as (fleet, model, optimizer):
            gauge = Gauge(model)
            self._number = self.rank if fleet is None else fleet.members[fleet.rank]
            step = number = 0 if fleet is None else optimizer.iteration
            self.teller.tell(event="ready", number=self._number, join=None if fleet is None else fleet.join_address)
            while number < self.plan["num_steps"]:
                self.strike(step)
                self._mix_calls(fleet, step)
                numbers = {} if fleet is None else dict(zip(fleet.epoch.members, fleet.members, strict=True))
                loss_of(model, self._batch(step)).backward()
                members = [numbers[one] for one in counted_in(optimizer)]
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                number = step if fleet is None else optimizer.iteration
                digest, value = gauge.read()
                self.tell_step(number, digest=digest, value=value, members=members)
                self._saver.after_step(model, optimizer, step)
            if self.plan["has_periods"]:
                optimizer.end_period()
            self._saver.finish()
            digest, value = gauge.read()
            self.teller.tell(event="done", step=number, digest=digest, value=value)

    def tell_step(self, number: int, **what: Any) -> None:
        """Tell that a step was made, and now and then how much memory there is."""
        size = {"rss_kib": rss_kib()} if number % SAMPLE_EVERY == 0 else {}
        self.teller.tell(event="step", step=number, **what, **size)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[tuple[Any, Any, Any]]:
        """Join the job; yield the fleet (None with a process group), the model and the optimizer."""
        model = make_model()
        if self.plan["rule"] == "group":
            dist.init_process_group("syncline", timeout=timedelta(seconds=float(os.environ["SYNCLINE_TIMEOUT"])))
            try:
                wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_BYTES / 2**20)
                yield None, wrapped, make_optimizer(wrapped)
            finally:
                dist.destroy_process_group()
            return
        with syncline.init() as fleet:
            rule = rule_of(self.plan)
            elastic = self.plan["rule"].endswith(("-elastic", "-growing"))
            yield (fleet, *syncline.distribute(model, make_optimizer(model), rule, samples="batch", elastic=elastic))

    def _batch(self, step: int) -> torch.Tensor:
        batch = batch_of(self._number, step)
        return batch * float("nan") if self.fault("not-a-number", step) else batch

    def _mix_calls(self, fleet: Any, step: int) -> None:
        """Make a call of the user's own, where the plan lets one rank make another."""
        for fault in self.plan["faults"]:
            if (fault["kind"], fault["at_step"]) == ("another-call", step):
                self.teller.tell(event="struck", kind="another-call")
                fleet.all_reduce(torch.ones(8 if fault["victim"] == self.rank else 9))

    def strike(self, step: int) -> None:
        """Do to this rank what is due."""
        for kind, strike in STRIKES.items():
            fault = self.fault(kind, step)
            if fault is not None:
                self.teller.tell(event="struck", kind=kind)
                strike(fault["lasts_s"])


def rule_of(plan: dict[str, Any]) -> Any:
    """Return the plan's update rule."""
    half = (plan["world_size"] + 1) // 2
    clusters = [list(range(half)), list(range(half, plan["world_size"]))]
    rule = plan["rule"]
    if rule.startswith("allreduce"):
        return syncline.AllReduce(bucket_bytes=BUCKET_BYTES)
    return {
        "sharded": lambda: syncline.Sharded(bucket_bytes=BUCKET_BYTES),
        "overlapped": lambda: syncline.Overlapped(period=8, bucket_bytes=BUCKET_BYTES),
        "clustered": lambda: syncline.Clustered(period=4, clusters=clusters),
        "sharded-elastic": lambda: syncline.Sharded(bucket_bytes=BUCKET_BYTES, spares=1),
    }[rule]()


def counted_in(optimizer: Any) -> tuple[int, ...]:
    """Return whose batches count in a step, by their places on the fabric; () where all do, always.

    A rank that dies in ``step()`` is among them; who comes in at its end is not.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        return ()
    return optimizer.training.collector.report.ranks or ()


def hold_interpreter(seconds: float) -> None:
    """Sleep in a foreign call that keeps the interpreter's lock."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def raise_own(_: float) -> None:
    raise UserLoopError("the user's loop went wrong")


STRIKES = {
    "exit": lambda _: os._exit(3),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exception": raise_own,
    "hung": threading.Event().wait,
    "interpreter-held": hold_interpreter,
    "not-a-number": lambda _: None,
}


def open_things() -> dict[str, Any]:
    """Return what this process holds: open files by what they are, and threads."""
    gc.collect()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()).partition(":")[0])
    threads = sorted(thread.name for thread in threading.enumerate())
    return {"files": sorted(link for link in links if link != f"/proc/{os.getpid()}/fd"), "threads": threads}


class ProxiedStore:
    """A store that sends whoever looks for this rank to the proxy before it."""

    def __init__(self, store: Any, proxy: dict[str, Any]) -> None:
        self._store, self._proxy = store, proxy

    def set(self, key: str, value: bytes) -> None:
        if key.endswith(f"hello/{self._proxy['rank']}"):
            hello = json.loads(value)
            tell_proxy(self._proxy["control"], target=[hello["address"], hello["port"]])
            value = json.dumps(hello | {"port": self._proxy["port"]}).encode()
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._store.get(key)
        return found


def stand_behind(proxy: dict[str, Any]) -> None:
    """Let the other ranks connect to the proxy in place of this process."""
    meet = communicator.Rendezvous
    communicator.Rendezvous = lambda store, **named: meet(ProxiedStore(store, proxy), **named)


def main(config: dict[str, Any]) -> None:
    """Be one rank; ends with status 0 also where an error was told, so that only what was not told is a bad end."""
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    warnings.simplefilter("always")
    rank = Rank(config)
    if config.get("proxy"):
        stand_behind(config["proxy"])
    warnings.showwarning = lambda message, *_: rank.teller.tell(event="warning", text=str(message)[:MOST_TEXT])
    before = open_things()
    if config.get("few_files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    try:
        rank.train()
    except BaseException as error:  # all of them are to be judged
        text, *_ = str(error).partition("\n\nAt:")  # where torch's wrapping was raised, line by line
        told = {"kind": type(error).__name__, "text": text[:MOST_TEXT]}
        is_own = isinstance(error, syncline.SynclineError | UserLoopError) or bool(WRAPPED.search(str(error)))
        rank.teller.tell(event="error", is_own=is_own, lost=getattr(error, "rank", None), **told)
        if not is_own:
            raise
        del error
    rank.teller.tell(event="closed", before=before, after=open_things())
