"""One job of a soak on real processes: begin its ranks, do to them what the plan says, and note all that happens."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_network import SoakNetwork, host_of, small_disk, topology_text
from soak_plan import CHECKPOINT_EVERY, KINDS, SILENCE_S, STALL_S, TOLERANT, By, Fault, JobPlan
from soak_proxy import tell_proxy
from soak_training import Gauge, make_model, make_optimizer

import syncline
from rank_scripts import script_environment

HERE = Path(__file__).parent
DISK_BYTES = 4 << 20
START_S = 120.0
PATIENT_SILENCE_S = 30.0
TIMEOUT_S = 20.0
START_TIMEOUT_S = 8.0
MASTER_PORT = 29500


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """All that is known of a job that is over."""

    plan: JobPlan
    events: list[dict[str, Any]] = field(default_factory=list)
    injected: list[dict[str, Any]] = field(default_factory=list)
    """The faults that took place, with when, in the machine's clock."""
    statuses: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0
    hanging: tuple[int, ...] = ()
    """Ranks that had not ended at the deadline, and were killed."""
    left_behind: list[str] = field(default_factory=list)

    def of(self, rank: int, *kinds: str) -> list[dict[str, Any]]:
        """Return a rank's events of some kinds, in order."""
        return [event for event in self.events if event["rank"] == rank and event["event"] in kinds]


class Forker:
    """The process that forks ranks."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(HERE), script_environment()["PYTHONPATH"]])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "soak_nursery.py")],
            env=script_environment() | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._rest = b""
        self.ended: dict[int, int] = {}
        self.pid = self._process.pid
        self._hear_begun(START_S)

    @property
    def handle(self) -> int:
        """What can be read when a process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self, orders: list[dict[str, Any]]) -> dict[str, int]:
        """Fork the processes; return their ids by name."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()
        return self._hear_begun(START_S)

    def read(self) -> list[dict[str, Any]]:
        """Read what it says; ends of processes are noted in ``ended``."""
        data = os.read(self.handle, 1 << 16)
        assert data, "the nursery has ended"
        *lines, self._rest = (self._rest + data).split(b"\n")
        said = [json.loads(line) for line in lines]
        self.ended |= {one["ended"]: one["status"] for one in said if "ended" in one}
        return said

    def end(self) -> None:
        """End it, and with it whatever it forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _hear_begun(self, timeout_s: float) -> dict[str, int]:
        deadline_s = time.monotonic() + timeout_s
        while select.select([self.handle], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            for one in self.read():
                if "begun" in one:
                    begun: dict[str, int] = one["begun"]
                    return begun
        raise AssertionError(f"the nursery began nothing within {timeout_s:g} s")


class Agenda:
    """What is to be done when, in the order of time."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def add(self, at_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` at a time of the machine's clock."""
        heapq.heappush(self._entries, (at_s, next(self._numbers), what))

    def run_due(self) -> float:
        """Do what is due; return for how many seconds nothing else is."""
        while self._entries and self._entries[0][0] <= time.monotonic():
            heapq.heappop(self._entries)[2]()
        return max(0.0, self._entries[0][0] - time.monotonic()) if self._entries else 3600.0

    def run_all(self) -> None:
        """Do all that is left now: what was broken is mended."""
        while self._entries:
            heapq.heappop(self._entries)[2]()


class Job:
    """One job from its beginning to its end."""

    def __init__(self, plan: JobPlan, network: SoakNetwork, forker: Forker, folder: Path) -> None:
        self._plan, self._network, self._forker, self._folder = plan, network, forker, folder
        self.record = JobRecord(plan=plan)
        self._agenda = Agenda()
        self._waiting = [fault for fault in plan.faults if KINDS[fault.kind].by not in (By.RANK, By.LIMIT)]
        self._pids: dict[int, int] = {}
        self._others: list[int] = []
        self._proxies: dict[int, dict[str, Any]] = {}
        self._rest = b""
        self._names = [host_of(rank, plan.world_size) for rank in range(plan.world_size)]

    def run(self, *, limit_s: float) -> JobRecord:
        """Run it; ranks that have not ended after ``limit_s`` seconds without any event are noted and killed."""
        (self._folder / "tmp").mkdir(parents=True)
        (self._folder / "checkpoints").mkdir()
        with ExitStack() as stack:
            self._pipe = stack.enter_context(_open_pipe(self._folder / "events"))
            if self._plan.saves:
                stack.enter_context(small_disk(self._folder / "checkpoints", DISK_BYTES))
            stack.callback(self._clear)
            self._start()
            self._watch(limit_s)
            self._clear()
            self._load_checkpoint()
            self._look_what_is_left()
        return self.record

    def _start(self) -> None:
        (self._folder / "net.yaml").write_text(topology_text(self._plan.world_size))
        self._secret = secrets.token_hex(32)
        self.record.began_s = time.monotonic()
        for rank in self._plan.proxied:
            self._start_proxy(rank)
        orders = [self._order(rank) for rank in range(self._plan.world_size)]
        begun = self._forker.start(orders)
        self._pids = {rank: begun[str(rank)] for rank in range(self._plan.world_size)}
        limits = [fault for fault in self._plan.faults if KINDS[fault.kind].by is By.LIMIT]
        self.record.injected += [{"at_s": time.monotonic(), "rank": one.victim, "kind": one.kind} for one in limits]
        for fault in list(self._waiting):
            if KINDS[fault.kind].at_start:
                self._waiting.remove(fault)
                self._agenda.add(time.monotonic() + fault.after_s, lambda fault=fault: self._inject(fault))

    def _order(self, rank: int) -> dict[str, Any]:
        plan, name = self._plan, self._names[rank]
        limits = {fault.kind for fault in plan.faults if fault.victim == rank}
        environment = script_environment() | {
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.world_size),
            "MASTER_ADDR": self._network.address(self._names[0]),
            "MASTER_PORT": str(MASTER_PORT),
            "SYNCLINE_TOPOLOGY": str(self._folder / "net.yaml"),
            "SYNCLINE_HOST": name,
            "SYNCLINE_INTERFACE": self._network.address(name),
            "SYNCLINE_SECRET": self._secret if "wrong-secret" not in limits else secrets.token_hex(32),
            "SYNCLINE_SILENCE": str(SILENCE_S if plan.has_silence else PATIENT_SILENCE_S),
            "SYNCLINE_STALL": str(STALL_S if self._has("hung") else TIMEOUT_S),
            "SYNCLINE_TIMEOUT": str(TIMEOUT_S),
            "SYNCLINE_CONNECT_TIMEOUT": str(START_TIMEOUT_S if plan.begins_badly else TIMEOUT_S),
            "TMPDIR": str(self._folder / "tmp"),
        }
        config = {
            "rank": rank,
            "plan": plan.as_record() | {"has_periods": plan.rule in TOLERANT, "saves": plan.saves},
            "folder": str(self._folder),
            "events": str(self._folder / "events"),
            "checkpoint_every": CHECKPOINT_EVERY,
            "proxy": self._proxies.get(rank),
            "few_files": "few-files" in limits,
        }
        return self._order_of(str(rank), "soak_rank", name, config, environment)

    def _order_of(
        self, name: str, program: str, host: str, config: dict[str, Any], environment: dict[str, str]
    ) -> dict[str, Any]:
        return {
            "name": name,
            "program": program,
            "namespace": self._network.namespace(host),
            "environment": environment,
            "output": str(self._folder / f"output-{name}"),
            "config": config,
        }

    def _start_other(self, name: str, program: str, host: str, config: dict[str, Any]) -> None:
        shared = {"events": str(self._folder / "events"), "seed": self._plan.seed}
        order = self._order_of(name, program, host, shared | config, script_environment())
        self._others.append(self._forker.start([order])[name])

    def _start_proxy(self, rank: int) -> None:
        host = self._names[rank]
        control = str(self._folder / f"proxy-{rank}")
        config = {"rank": rank, "address": self._network.address(host), "control": control}
        self._start_other(f"proxy-{rank}", "soak_proxy", host, config)
        deadline_s = time.monotonic() + START_S
        while not (heard := self.record.of(rank, "proxy")):
            assert time.monotonic() < deadline_s, "the proxy does not begin"
            self._hear(1.0)
        self._proxies[rank] = {"rank": rank, "control": control, "port": heard[0]["port"]}

    def _watch(self, limit_s: float) -> None:
        """Hear what happens, and do what is due, until all ranks have ended."""
        last_s = time.monotonic()
        while any(pid not in self._forker.ended for pid in self._pids.values()):
            if self._hear(min(self._agenda.run_due(), 1.0)):
                last_s = time.monotonic()
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
        if event["event"] == "struck":
            dialler = event.get("dialler")
            others = [rank for rank, name in enumerate(self._names) if self._network.address(name) == dialler]
            self.record.injected.append(
                {**event, "at_s": event["at_s"] or time.monotonic(), "other": [*others, None][0]}
            )
        if event["event"] not in ("step", "saving"):
            return
        for fault in list(self._waiting):
            is_saving = KINDS[fault.kind].needs_checkpoints
            if (
                event["rank"] == fault.victim
                and event["step"] >= fault.at_step
                and is_saving == (event["event"] == "saving")
            ):
                self._waiting.remove(fault)
                self._agenda.add(time.monotonic() + fault.after_s, lambda fault=fault: self._inject(fault))

    def _inject(self, fault: Fault) -> None:
        """Let it happen now, and undo it later."""
        if self._pids[fault.victim] in self._forker.ended:
            return  # the job was over first
        undo = self._strike(fault)
        if KINDS[fault.kind].by is not By.PROXY:  # which tells itself when it has struck
            self.record.injected.append({"at_s": time.monotonic(), "rank": fault.victim, "kind": fault.kind})
        if undo is not None:
            self._agenda.add(time.monotonic() + fault.lasts_s, undo)

    def _strike(self, fault: Fault) -> Callable[[], None] | None:
        """Strike; return what undoes it."""
        network, host, other = self._network, self._names[fault.victim], self._names[fault.other]
        match fault.kind:
            case "killed" | "killed-at-start" | "killed-in-checkpoint":
                self._signal(fault.victim, signal.SIGKILL)
            case "stopped" | "stopped-briefly":
                self._signal(fault.victim, signal.SIGSTOP)
                return lambda: self._signal(fault.victim, signal.SIGCONT)
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
                tell_proxy(self._proxies[fault.victim]["control"], strike=fault.kind)
            case "strangers":
                self._send_stranger(host, other)
        return None

    def _send_stranger(self, host: str, other: str) -> None:
        places = self._network.listeners(host)
        self._start_other(f"stranger-{len(self._others)}", "soak_stranger", other, {"places": places})

    def _signal(self, rank: int, number: signal.Signals) -> None:
        if self._pids[rank] not in self._forker.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def _end_hanging(self) -> None:
        """Ask those who hang where they are, and kill them."""
        self.record.ended_s = time.monotonic()
        hanging = [rank for rank, pid in self._pids.items() if pid not in self._forker.ended]
        self.record.hanging = tuple(hanging)
        for number in (signal.SIGCONT, signal.SIGUSR2):
            for rank in hanging:
                self._signal(rank, number)
        self._hear(2.0)
        for rank in hanging:
            self._signal(rank, signal.SIGKILL)

    def _clear(self) -> None:
        """Mend what is broken, end all that began, and take note of how it ended."""
        self._agenda.run_all()
        for rank in self._pids:
            self._signal(rank, signal.SIGKILL)
        for pid in self._others:
            if pid not in self._forker.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + START_S
        while any(pid not in self._forker.ended for pid in (*self._pids.values(), *self._others)):
            assert time.monotonic() < deadline_s, "processes do not end when they are killed"
            self._hear(1.0)
        while self._hear(0.0):
            pass
        self.record.statuses = {rank: self._forker.ended[pid] for rank, pid in self._pids.items()}
        for rank in self._pids:
            text = (self._folder / f"output-{rank}").read_text(errors="replace")
            self.record.outputs[rank] = text[-4000:]

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
        left += [f"/dev/shm/{name}" for name in names if any(str(pid) in name for pid in self._pids.values())]

    def _has(self, kind: str) -> bool:
        return any(fault.kind == kind for fault in self._plan.faults)


@contextmanager
def _open_pipe(path: Path) -> Iterator[int]:
    """Make a named pipe, and open it so that it never ends."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield pipe
    finally:
        os.close(pipe)
