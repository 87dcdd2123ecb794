"""How far training threads are: where this rank's own is, and what the heartbeats of the others tell of theirs.

Heartbeats come from the communication thread, so they prove that a process lives, not that it trains. Each therefore
carries the number of calls that the rank's training thread has begun, and whether it waits in one at the moment. A rank
that computes, or hangs, is *still* as long as that number does not change; one that waits for others never is. A rank
that has been still for longer than the user's limit is *stalled*. What follows from it is for those who wait to say:
a collective ends with an error, a tolerant update rule goes on without the rank.

A wait is named by the phase in which it began, or by the reason that it was given; it is interrupted while an update
thread of this rank computes, as meanwhile nobody else is waited for.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

MAX_VALUE = (1 << 64) - 1
ELSEWHERE, FORWARD, BACKWARD, STEP = PHASES = ("elsewhere", "forward", "backward", "step")
"""Where a training thread is; elsewhere it reads data, computes the loss, validates, saves, and so on."""


_TASKS = Path("/proc/self/task")


class ProcessorShortage:
    """Sums, from one look to the next, what the thread lacked that lacked most; 0 where the kernel does not count it.

    >>> ProcessorShortage().seconds() >= 0
    True
    """

    def __init__(self) -> None:
        self._seen_ns: dict[str, int] | None = None
        self._total_ns = 0

    def seconds(self) -> float:
        """Return the sum from the first look until now; at most the time that has passed."""
        now_ns = self._read_ns()
        if self._seen_ns is not None:
            lacked_ns = (ns - self._seen_ns.get(thread, 0) for thread, ns in now_ns.items())
            self._total_ns += max(lacked_ns, default=0)
        self._seen_ns = now_ns
        return self._total_ns / 1e9

    @staticmethod
    def _read_ns() -> dict[str, int]:
        found = {}
        with contextlib.suppress(OSError):
            for task in _TASKS.iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended; another system
                    found[task.name] = int((task / "schedstat").read_text().split()[1])
        return found


class Progress:
    """Where this rank's training threads are, and for how long; any thread but the communication loop's may say so.

    >>> progress = Progress()
    >>> progress.touch()
    >>> with progress.waiting():
    ...     progress.value
    5
    """

    def __init__(self) -> None:
        self.num_calls = 0
        """Calls that were begun."""
        self._waiting: dict[int, int] = {}
        self._wait = _Wait(self, "")
        self._lock = threading.Lock()
        self._num_held = self._num_working = 0
        self._is_blocked = False
        self._wait_name, self._wait_phase, self._wait_ns = "", ELSEWHERE, 0
        self.phase = self._phase_around = ELSEWHERE
        self._began_ns = self._phase_ns = time.monotonic_ns()
        self._step_ns = self._first_step_ns = 0
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        """Seconds in each phase, with the waits in it, until the last change."""
        self.waited_s: dict[str, float] = {}
        """Seconds waited for others, by phase or reason, until the end of the last wait."""
        self.num_steps = 0
        """Steps that are finished."""
        self.steps_s = 0.0
        """Seconds in them."""
        self.thread = threading.main_thread().ident
        """The thread that made the last step."""
        self.stored_s = 0.0
        """Seconds in which the training thread wrote checkpoints to a disk, until the end of the last write."""
        self._store_ns = 0
        self.num_samples = 0
        """Samples of finished steps, as far as the user said so."""
        self.loss = math.nan
        """The last one that the user said."""
        self.shortage = ProcessorShortage()
        self._waited_in_s = dict.fromkeys(PHASES, 0.0)
        self.on_span: Callable[[str, str, int, int], None] | None = None
        """Told of phases, waits and steps that are over: name, category, start and end in ns of the monotonic clock."""
        self.watcher: object = None
        """Who tells rank 0 of this: where members change, several have it one after another."""

    def __repr__(self) -> str:
        return f"<Progress: {self.num_calls} calls, {self.phase}{', waiting' * self.is_waiting}>"

    @property
    def is_waiting(self) -> bool:
        """Whether some thread waits in a call for other ranks, or is held to."""
        return bool(self._waiting) or self._num_held > 0

    @property
    def value(self) -> int:
        """What a heartbeat carries: twice the number of calls, plus one while a thread waits in one."""
        return (2 * self.num_calls + self.is_waiting) & MAX_VALUE

    def own_s(self) -> tuple[dict[str, float], float]:
        """Return the seconds in each phase without the waits in it, and the seconds waited in all, until now."""
        with self._lock:
            now_ns = time.monotonic_ns()
            waited_s = dict(self._waited_in_s)
            if self._wait_ns:
                waited_s[self._wait_phase] += (now_ns - self._wait_ns) / 1e9
            spent_s = dict(self.phase_s)
            spent_s[self.phase] += (now_ns - self._phase_ns) / 1e9
        return {phase: max(0.0, spent_s[phase] - waited_s[phase]) for phase in PHASES}, sum(waited_s.values())

    @property
    def is_idle(self) -> bool:
        """Whether the training thread waits for others, as far as it is seen."""
        return self._wait_ns > 0

    @property
    def total_s(self) -> float:
        """Seconds since this began to count."""
        return (time.monotonic_ns() - self._began_ns) / 1e9

    @property
    def starting_s(self) -> float:
        """Seconds until the first step began."""
        return ((self._first_step_ns or time.monotonic_ns()) - self._began_ns) / 1e9

    def touch(self) -> None:
        """Count a call."""
        self.num_calls += 1

    def enter(self, phase: str) -> None:
        """Say that the training thread is in ``phase`` from now on; the first after a step begins another step."""
        now_ns = time.monotonic_ns()
        before, start_ns, self.phase, self._phase_ns = self.phase, self._phase_ns, phase, now_ns
        self.phase_s[before] += (now_ns - start_ns) / 1e9
        if phase != ELSEWHERE and not self._step_ns:
            self._step_ns = now_ns
            self._first_step_ns = self._first_step_ns or now_ns
        if before != ELSEWHERE and self.on_span is not None:
            self.on_span(before, "compute", start_ns, now_ns)
        self._block("")

    def leave(self) -> None:
        """Say that the phase is over; foreign code that is held then waits until it is released, or a phase begins."""
        before = self.phase
        self.enter(self._phase_around)
        if self._num_held:
            self._block(before)

    @contextmanager
    def stepping(self, number: int) -> Iterator[None]:
        """Within this context the training thread makes a step, which is finished unless something is raised."""
        self._phase_around = STEP
        self.enter(STEP)
        try:
            yield
            self.end_step(number)
        finally:
            self._phase_around = ELSEWHERE
            self.enter(ELSEWHERE)

    def end_step(self, number: int | None = None, *, is_next_begun: bool = False) -> None:
        """Count a step that is finished; ``is_next_begun`` where nobody could say when the next one begins."""
        now_ns = time.monotonic_ns()
        start_ns, self._step_ns = self._step_ns or now_ns, now_ns if is_next_begun else 0
        self.num_steps, self.thread = self.num_steps + 1, threading.get_ident()
        self.steps_s += (now_ns - start_ns) / 1e9
        if self.on_span is not None:
            self.on_span(f"step {self.num_steps if number is None else number}", "step", start_ns, now_ns)

    def waiting(self, reason: str = "") -> AbstractContextManager[None]:
        """Count a call that waits for other ranks, and say so while it does: ``with progress.waiting(): ...``."""
        return _Wait(self, reason) if reason else self._wait

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within this context a thread computes for which the training thread may be waiting."""
        with self._lock:
            self._num_working += 1
            self._turn()
        try:
            yield
        finally:
            with self._lock:
                self._num_working -= 1
                self._turn()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Within this context the training thread writes a checkpoint to a disk."""
        start_ns = self._store_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._store_ns = 0
            self.stored_s += (time.monotonic_ns() - start_ns) / 1e9

    @property
    def stored_until_now_s(self) -> float:
        """The same, with the write that goes on."""
        start_ns, stored_s = self._store_ns, self.stored_s
        return stored_s + ((time.monotonic_ns() - start_ns) / 1e9 if start_ns else 0.0)

    def hold(self) -> None:
        """Say that somebody waits until :meth:`release`, as foreign code may where nothing of it is seen."""
        with self._lock:
            self._num_held += 1

    def release(self) -> None:
        """Take one :meth:`hold` back."""
        with self._lock:
            self._num_held -= 1
            self._is_blocked &= self._num_held > 0
            self._turn()

    def _block(self, name: str) -> None:
        if bool(name) == self._is_blocked:
            return
        with self._lock:
            self._is_blocked = bool(name)
            if name and not self._waiting:
                self._wait_name, self._wait_phase = name, self.phase
            self._turn()

    def _turn(self) -> None:
        """Begin to count a wait, or count one that is over, if that has changed; with the lock held."""
        is_waiting = (bool(self._waiting) or self._is_blocked) and not self._num_working
        if is_waiting == bool(self._wait_ns):
            return
        now_ns = time.monotonic_ns()
        start_ns, self._wait_ns = self._wait_ns, now_ns if is_waiting else 0
        if is_waiting:
            return
        name, seconds = self._wait_name, (now_ns - start_ns) / 1e9
        self.waited_s[name] = self.waited_s.get(name, 0.0) + seconds
        self._waited_in_s[self._wait_phase] += seconds
        if self.on_span is not None:
            self.on_span(name, "wait", start_ns, now_ns)


class _Wait:
    """A thread's wait, which may hold another; it has no state but its reason, as a small call takes microseconds."""

    def __init__(self, progress: Progress, reason: str) -> None:
        self._progress = progress
        self._reason = reason

    def __enter__(self) -> None:
        progress, thread = self._progress, threading.get_ident()
        progress.num_calls += 1
        with progress._lock:
            if not progress._waiting:
                progress._wait_name, progress._wait_phase = self._reason or progress.phase, progress.phase
            progress._waiting[thread] = progress._waiting.get(thread, 0) + 1
            progress._turn()

    def __exit__(self, *_: object) -> None:
        progress, thread = self._progress, threading.get_ident()
        with progress._lock:
            depth = progress._waiting.pop(thread) - 1
            if depth:
                progress._waiting[thread] = depth
            progress._turn()
        progress.num_calls += 1


class PeerStalls(Protocol):
    """What a rank knows of the training threads of the others.

    >>> async def connect(): return memory_fabrics(2)
    >>> asyncio.run(connect())[0].stalls.stalled
    frozenset()
    """

    @property
    def limit_s(self) -> float:
        """From when on a rank that is still is stalled."""

    @property
    def stalled(self) -> frozenset[int]:
        """The ranks that are stalled."""

    def still_s(self, peer: int) -> float:
        """Return for how many seconds ``peer`` has neither begun a call nor waited in one, as far as is known here."""


class Stalls:
    """Judges by what heartbeats carry; whoever owns the heartbeats calls :meth:`tick`, and hears of stalled ranks."""

    def __init__(self, limit_s: float, on_stall: Callable[[], None]) -> None:
        self.limit_s = limit_s
        self._on_stall = on_stall
        self._values: dict[int, int] = {}
        self._still_s: dict[int, float] = {}
        self.stalled: frozenset[int] = frozenset()
        """The ranks that are stalled."""

    def __repr__(self) -> str:
        return f"<Stalls: {sorted(self.stalled)} after {self.limit_s:g} s>"

    def still_s(self, peer: int) -> float:
        """Return for how long ``peer`` has neither begun a call nor waited in one."""
        return self._still_s.get(peer, 0.0)

    def tick(self, passed_s: float, values: Mapping[int, int]) -> None:
        """Take the last heartbeats' values of all peers that live; ``passed_s`` since the last time."""
        for peer, value in values.items():
            is_still = value == self._values.get(peer) and not value & 1
            self._still_s[peer] = self._still_s.get(peer, 0.0) + passed_s if is_still else 0.0
            self._values[peer] = value
        before = self.stalled
        self.stalled = frozenset(peer for peer in values if self._still_s[peer] >= self.limit_s)
        if self.stalled - before:
            self._on_stall()


class MemberStalls:
    """The same for a group, which numbers its members by their place in its list."""

    def __init__(self, stalls: PeerStalls, members: Sequence[int]) -> None:
        self._stalls = stalls
        self._members = tuple(members)

    @property
    def limit_s(self) -> float:
        """The job's limit."""
        return self._stalls.limit_s

    @property
    def stalled(self) -> frozenset[int]:
        """The members that are stalled."""
        return frozenset(place for place, rank in enumerate(self._members) if rank in self._stalls.stalled)

    def still_s(self, peer: int) -> float:
        """Return how long a member has been still."""
        return self._stalls.still_s(self._members[peer])
