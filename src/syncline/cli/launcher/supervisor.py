"""Decides what becomes of a job when one of its ranks ends, fails or is interrupted. Events in, instructions out.

The first rank that fails ends the job, but not at once: the others get ``grace_s`` to notice by themselves, so that the
launcher never hides what they would have said. Then SIGTERM, then SIGKILL, all inside ten seconds. Ctrl-C is passed on
once, and the ranks may take their time (a checkpoint is being written) until one of them ends badly; the second Ctrl-C
kills. Where ``grace_s`` is infinite the survivors go on, as some update rules can, and what they end with counts,
unless they are outnumbered by those that failed by themselves. There a rank that fails may be started again after a
pause, to join those that live; what it ends with then counts in place of its failure, once it has come in. When nobody
is left whom it could join, because the job has ended or all are lost, it is ended at once.

How often and after which pause what died is started again is decided here too.

Time is passed in; nothing here touches a process, so tests compare lists of instructions.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

LOSSES = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that say nothing against the process that they end; others come of its own faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """At most ``count`` restarts in any ``period_s`` seconds, with pauses that double up to the longest.

    What then runs for twice the longest pause begins again with the first, as Kubernetes has it: its faults are rare.
    """

    count: int = 0
    period_s: float = 3600.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{times} in {self.period_s:g} s"


@dataclass(slots=True)
class RestartBudget:
    """What one rank, or one whole job, has used of its limits; restarts that lie back far enough are forgotten."""

    limits: RestartLimits
    taken_s: list[float] = field(default_factory=list)
    num_doubled: int = 0
    """How often the next pause is doubled."""

    def take(self, now_s: float, *, ran_s: float) -> float | None:
        """Take one restart of what ran for so long; return the pause before it in seconds, or None if no more is left.

        >>> budget = RestartBudget(RestartLimits(count=9))
        >>> [budget.take(100.0, ran_s=ran_s) for ran_s in (5.0, 5.0, 5.0, 60.0)]
        [1.0, 2.0, 4.0, 1.0]
        """
        self.taken_s = [taken_s for taken_s in self.taken_s if now_s - taken_s < self.limits.period_s]
        if len(self.taken_s) >= self.limits.count:
            return None
        if ran_s >= 2 * self.limits.longest_pause_s:  # it runs well
            self.num_doubled = 0
        pause_s = min(self.limits.first_pause_s * 2.0**self.num_doubled, self.limits.longest_pause_s)
        self.num_doubled += 1
        self.taken_s.append(now_s)
        return pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long ranks may take to end, in seconds after what made them end."""

    grace_s: float = 5.0
    """Survivors of a failure, until SIGTERM; infinite: they go on without those who failed."""
    stubborn_s: float = 3.0
    """From SIGTERM to SIGKILL."""
    interrupt_s: float = 30.0
    """After Ctrl-C, until SIGTERM."""
    rejoins: RestartLimits = field(default_factory=RestartLimits)
    """How often each rank that fails may be started again, to join those that live."""
    min_ranks: int = 1
    """How many must end well where survivors go on."""
    is_whole: bool = True
    """Whether nobody of the job is elsewhere, whom newcomers could join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: by itself with ``code``, or by ``signal_number``."""

    code: int | None = None
    signal_number: int | None = None

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself with code 0."""
        return self.code == 0

    @property
    def is_loss(self) -> bool:
        """Whether somebody else ended it: the kernel for want of memory, an administrator, a scheduler."""
        return self.signal_number in LOSSES

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would report."""
        return self.code if self.code is not None else 128 + (self.signal_number or 0)

    def __str__(self) -> str:
        if self.signal_number is None:
            return f"exit code {self.code}"
        is_named = self.signal_number in set(signal.Signals)  # most real-time signals are not
        return f"killed by {signal.Signals(self.signal_number).name if is_named else f'signal {self.signal_number}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSignal:
    """Instruction: send a signal to a rank's process group."""

    rank: int
    signal_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Instruction: tell the user; ``rank`` has just failed, or all are ending because of ``reason``.

    That is "interrupt" or "termination"; or nobody is left whom they could join, as the job is "over" or they "alone".
    """

    reason: str
    rank: int | None = None
    pause_s: float | None = None
    """In how many seconds the rank is started again, if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """Instruction: start a rank anew, which joins the first of those that live that it reaches; eldest first."""

    rank: int
    living: tuple[int, ...]


Instruction = SendSignal | Announce | StartAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank that did not end well, in the order in which they ended."""

    rank: int
    exit: Exit
    was_signalled: bool
    """Whether the launcher had told it to end."""


class Supervisor:
    """The job's state: who lives, who failed, and which signals are due when."""

    def __init__(self, ranks: Iterable[int], limits: Limits | None = None, *, now_s: float = 0.0) -> None:
        self.living = set(ranks)
        self.failures: list[Failure] = []
        self.ended_by: int | None = None
        """The signal by which the user ended the job, if they did."""
        self._limits = limits or Limits()
        self.num_restarts = 0
        """How often ranks were started again, to join the others."""
        self._by_age = sorted(self.living)
        self._due: list[tuple[float, int]] = []
        self._exits: dict[int, Exit] = {}
        self._budgets = {rank: RestartBudget(self._limits.rejoins) for rank in self.living}
        self._began_s = dict.fromkeys(self.living, now_s)
        self._pausing: dict[int, float] = {}
        self._were_signalled = False
        self._were_terminated = False

    @property
    def is_finished(self) -> bool:
        """Whether no rank is left; nobody could be joined any more."""
        return not self.living

    @property
    def wake_at_s(self) -> float | None:
        """When :meth:`on_time` should be called, if at all."""
        times_s = [*self._pausing.values(), *(at_s for at_s, _ in self._due)]
        return min(times_s) if times_s and self.living else None

    @property
    def went_on(self) -> bool:
        """Whether the job outlived its failures: of the ranks that nobody else ended, half at least ended well.

        A lost machine is what survivors go on without. Where most ranks fail by themselves, it is the job that fails.
        """
        num_well = sum(how.is_success for how in self._exits.values())
        num_failed = sum(not how.is_success and not how.is_loss for how in self._exits.values())
        return math.isinf(self._limits.grace_s) and num_well >= max(1, self._limits.min_ranks, num_failed)

    @property
    def num_missing(self) -> int:
        """How many ranks did not end well in the end."""
        return sum(not how.is_success for how in self._exits.values())

    @property
    def exit_code(self) -> int:
        """What the launcher returns once it is finished."""
        if self.ended_by is not None:
            return 128 + self.ended_by
        if self.went_on:
            return 0
        return self.failures[0].exit.shell_code if self.failures else 0

    def on_exit(
        self, rank: int, how: Exit, now_s: float, *, outside: frozenset[int] = frozenset()
    ) -> tuple[Instruction, ...]:
        """Decide what to do when a rank's process is over, and its output has been read to the end.

        ``outside``: of all ranks, those that were started to join the others and have not come in.
        """
        self.living.discard(rank)
        is_outside = rank in outside
        if not (how.is_success and is_outside and rank in self._exits):  # else its failure stands
            self._exits[rank] = how
        told: tuple[Instruction, ...] = ()
        if not how.is_success:
            ran_s = 0.0 if is_outside else now_s - self._began_s[rank]
            self.failures.append(Failure(rank=rank, exit=how, was_signalled=self._were_signalled))
            can_rejoin = self._has_members(outside) and not self._were_signalled
            told = self._on_failure(rank, ran_s, now_s, can_rejoin=can_rejoin)
        return told + self._end_newcomers(outside, now_s)

    def _on_failure(self, rank: int, ran_s: float, now_s: float, *, can_rejoin: bool) -> tuple[Instruction, ...]:
        pause_s = self._budgets[rank].take(now_s, ran_s=ran_s) if can_rejoin else None
        if pause_s is not None:
            self._pausing[rank] = now_s + pause_s
            return (Announce(reason="failure", rank=rank, pause_s=pause_s),)
        if len(self.failures) > 1:
            return ()
        self._plan(now_s + self._limits.grace_s)
        return (Announce(reason="failure", rank=rank),) if self.ended_by is None else ()

    def _has_members(self, outside: frozenset[int]) -> bool:
        return not self.living <= outside if self._limits.is_whole else bool(self.living)

    def _end_newcomers(self, outside: frozenset[int], now_s: float) -> tuple[Instruction, ...]:
        if self._has_members(outside):
            return ()
        self._pausing.clear()
        if not self.living or self._were_signalled:
            return ()
        is_over = any(how.is_success for how in self._exits.values())
        self._plan(now_s)
        return (Announce(reason="over" if is_over else "alone"), *self.on_time(now_s))

    def on_signal(self, number: int, now_s: float) -> tuple[Instruction, ...]:
        """Decide what to do when the launcher got a signal, as the user pressed Ctrl-C, for one.

        SIGPIPE: nobody reads its output any more. SIGUSR2 ends nothing by itself: the ranks are to have it.
        """
        if number == signal.SIGUSR2:
            return tuple(SendSignal(rank=rank, signal_number=number) for rank in sorted(self.living))
        is_interrupt = number == signal.SIGINT
        if self.ended_by is not None:
            return self._signal_all(signal.SIGKILL) if is_interrupt else ()
        self.ended_by = number
        self._pausing.clear()
        self._plan(now_s + self._limits.interrupt_s * is_interrupt)
        if is_interrupt:
            return (Announce(reason="interrupt"), *self._signal_all(signal.SIGINT))
        return (Announce(reason="termination"), *self.on_time(now_s))

    def on_time(self, now_s: float) -> tuple[Instruction, ...]:
        """Decide what to do when the time in ``wake_at_s`` has come."""
        instructions: list[Instruction] = []
        while self._due and self._due[0][0] <= now_s:
            _, signal_number = self._due.pop(0)
            instructions.extend(self._signal_all(signal_number))
        for rank in [rank for rank, at_s in self._pausing.items() if at_s <= now_s]:
            del self._pausing[rank]
            self._by_age = [one for one in self._by_age if one in self.living]
            instructions.append(StartAgain(rank=rank, living=tuple(self._by_age)))
            self._by_age.append(rank)
            self.living.add(rank)
            self._began_s[rank] = now_s
            self.num_restarts += 1
        return tuple(instructions)

    def _plan(self, terminate_at_s: float) -> None:
        """End everybody at ``terminate_at_s``, or earlier if that was planned already."""
        if (
            math.isfinite(terminate_at_s)
            and not self._were_terminated
            and (not self._due or terminate_at_s < self._due[0][0])
        ):
            self._due = [
                (terminate_at_s, signal.SIGTERM),
                (terminate_at_s + self._limits.stubborn_s, signal.SIGKILL),
            ]

    def _signal_all(self, signal_number: int) -> tuple[Instruction, ...]:
        self._were_signalled = True
        self._were_terminated |= signal_number != signal.SIGINT
        return tuple(SendSignal(rank=rank, signal_number=signal_number) for rank in sorted(self.living))
