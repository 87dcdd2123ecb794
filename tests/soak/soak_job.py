"""One job of a soak on real processes: begin its ranks, do to them what the plan says, and note all that happens."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from soak_agenda import Agenda
from soak_forker import Forker
from soak_kinds import KINDS, By, Outcome
from soak_network import SoakNetwork, small_disk
from soak_plan import Fault, JobPlan
from soak_processes import Processes
from soak_proxy import tell_proxy
from soak_record import JobRecord
from soak_training import Gauge, make_model, make_optimizer

import syncline

DISK_BYTES = 4 << 20


class Job:
    """One job from its beginning to its end."""

    def __init__(self, plan: JobPlan, network: SoakNetwork, forker: Forker, folder: Path) -> None:
        self._plan, self._network, self._forker, self._folder = plan, network, forker, folder
        self.record = JobRecord(plan=plan)
        self._agenda = Agenda()
        outside = [fault for fault in plan.faults if KINDS[fault.kind].by not in (By.RANK, By.LIMIT)]
        self._waiting = sorted(outside, key=lambda fault: fault.at_step)
        self._rest = b""

    def run(self, *, limit_s: float) -> JobRecord:
        """Run it; ranks that have not ended after ``limit_s`` seconds without any event are noted and killed."""
        (self._folder / "tmp").mkdir(parents=True)
        (self._folder / "checkpoints").mkdir()
        with ExitStack() as stack:
            self._pipe = stack.enter_context(_open_pipe(self._folder / "events"))
            if self._plan.saves:
                stack.enter_context(small_disk(self._folder / "checkpoints", DISK_BYTES))
            self._processes = Processes(self.record, self._network, self._forker, self._folder)
            self._growth = self._processes.growth
            stack.callback(self._clear)
            self._start()
            self._watch(limit_s)
            self._clear()
            self._load_checkpoint()
            self._look_what_is_left()
        return self.record

    def _start(self) -> None:
        self.record.began_s = time.monotonic()
        for rank in self._plan.proxied:
            self._processes.start_proxy(rank, self._hear)
        self._processes.start_ranks()
        for fault in self._plan.faults:
            if KINDS[fault.kind].by is By.LIMIT:
                self._note_fault(fault, fault.victim, time.monotonic())
        for fault in list(self._waiting):
            if KINDS[fault.kind].at_start:
                self._plan_strike(fault)

    def _watch(self, limit_s: float) -> None:
        """Hear what happens, and do what is due, until all ranks have ended."""
        last_s = time.monotonic()
        while self._processes.living:
            if self._hear(min(self._agenda.run_due(), 1.0)):
                last_s = time.monotonic()
            if self._plan.grows:
                self._processes.start_newcomers()
            if time.monotonic() - last_s > limit_s:
                self._end_hanging()
                return
        self.record.ended_s = time.monotonic()

    def _hear(self, timeout_s: float) -> bool:
        """Wait for events and ends; True if there were any."""
        ready, _, _ = select.select([self._pipe, self._forker.handle], [], [], timeout_s)
        if self._forker.handle in ready:
            self._forker.read()
        if self._pipe in ready:
            *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 18)).split(b"\n")
            for line in lines:
                self._note(json.loads(line))
        return bool(ready)

    def _note(self, event: dict[str, Any]) -> None:
        self.record.events.append(event)
        if self._plan.grows:
            self._growth.hear(event)
        if event["event"] == "struck":
            places = [place for place, rank in enumerate(self._growth.on) if rank == event["rank"]]
            for fault in [one for one in self._plan.faults if (one.kind, [one.victim]) == (event["kind"], places)][:1]:
                self._note_fault(fault, event["rank"], event["at_s"] or time.monotonic())
        if event["event"] not in ("step", "saving"):
            return
        for fault in list(self._waiting):
            if fault.at_step > event["step"]:
                break
            is_saving = KINDS[fault.kind].needs_checkpoints
            is_victim = event["rank"] == self._growth.on[fault.victim]
            if is_victim and is_saving == (event["event"] == "saving") and self._may_strike(fault):
                self._plan_strike(fault)

    def _may_strike(self, fault: Fault) -> bool:
        """Whether enough ranks are left; in a job that grows one after the other is lost, and comes back."""
        return not self._plan.grows or fault.outcome is Outcome.HARMLESS or self._growth.is_whole()

    def _plan_strike(self, fault: Fault) -> None:
        self._waiting.remove(fault)
        self._agenda.add(time.monotonic() + fault.after_s, lambda: self._inject(fault))

    def _note_fault(self, fault: Fault, rank: int, at_s: float) -> None:
        blamed = sorted({self._growth.on[place] for place in self._plan.struck(fault)})
        self.record.injected.append(
            {"at_s": at_s, "rank": rank, "kind": fault.kind, "lasts_s": fault.lasts_s, "blamed": blamed}
        )

    def _inject(self, fault: Fault) -> None:
        """Let it happen now, and undo it later."""
        victim = self._growth.on[fault.victim]
        if victim not in self._processes.living or fault.victim in self._growth.broken or not self._may_strike(fault):
            return  # the job was over first, or another fault came between, whose end would be this one's
        struck_s = time.monotonic()
        undo = self._strike(fault, victim)
        if KINDS[fault.kind].by is not By.PROXY:  # which tells itself when it has struck
            self._note_fault(fault, victim, struck_s)
        for place in self._plan.struck(fault):
            self._growth.strike(place)
        if undo is not None:
            self._growth.broken.add(fault.victim)
            self._agenda.add(time.monotonic() + fault.lasts_s, lambda: self._undo(fault, undo))

    def _undo(self, fault: Fault, undo: Callable[[], None]) -> None:
        undo()
        self._growth.broken.discard(fault.victim)

    def _strike(self, fault: Fault, victim: int) -> Callable[[], None] | None:
        """Strike; return what undoes it."""
        network, names, processes = self._network, self._processes.names, self._processes
        host, other = names[fault.victim], names[fault.other]
        match fault.kind:
            case "killed" | "killed-at-start" | "killed-in-checkpoint":
                processes.signal(victim, signal.SIGKILL)
            case "stopped" | "stopped-briefly":
                processes.signal(victim, signal.SIGSTOP)
                return lambda: processes.signal(victim, signal.SIGCONT)
            case "link-cut" | "link-cut-briefly":
                network.cut(host)
                return lambda: network.mend(host)
            case "rack-cut":
                network.cut("rack-b")
                return lambda: network.mend("rack-b")
            case "black-hole" | "black-hole-briefly":
                network.hide(host, other)
                return lambda: network.show(host, other)
            case "slow-link":
                network.slow_down(host)
                return lambda: network.speed_up(host)
            case "reset":
                network.reset(host, other)
            case "bit-flip" | "closed-in-a-frame":
                tell_proxy(processes.control_of(fault.victim), strike=fault.kind)
            case "strangers":
                processes.send_stranger(host, other)
        return None

    def _end_hanging(self) -> None:
        """Ask those who hang where they are, and kill them."""
        self.record.ended_s = time.monotonic()
        hanging = self._processes.living
        self.record.hanging = tuple(hanging)
        for number in (signal.SIGCONT, signal.SIGUSR2):
            for rank in hanging:
                self._processes.signal(rank, number)
        self._hear(2.0)
        for rank in hanging:
            self._processes.signal(rank, signal.SIGKILL)

    def _clear(self) -> None:
        """Mend what is broken, end all that began, and take note of how it ended."""
        self._agenda.run_all()
        self._processes.end(self._hear)

    def _load_checkpoint(self) -> None:
        """Load what was saved last, in this process; a sentence if that cannot be."""
        if not any(event["event"] == "saved" for event in self.record.events):
            return
        model = make_model()
        try:
            found = syncline.load_checkpoint(self._folder / "checkpoints" / "last", model, make_optimizer(model))
        except syncline.SynclineError as error:
            self.record.left_behind.append(f"a checkpoint that cannot be loaded: {error}")
            return
        value = Gauge(model).read()[1]
        self.record.events.append({"rank": -1, "at_s": 0.0, "event": "loaded", "step": found["step"], "value": value})

    def _look_what_is_left(self) -> None:
        left = self.record.left_behind
        left += [f"temporary file {path.name}" for path in (self._folder / "tmp").rglob("*")]
        left += [f"connection {line}" for line in self._network.connections()]
        names = [path.name for path in Path("/dev/shm").iterdir()]
        left += [f"/dev/shm/{name}" for name in names if any(str(pid) in name for pid in self._processes.pids.values())]


@contextmanager
def _open_pipe(path: Path) -> Iterator[int]:
    """Make a named pipe, and open it so that it never ends."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield pipe
    finally:
        os.close(pipe)
