"""Runs a job: reads the ranks' output, tells the supervisor what happens, and does what it says.

A rank's process is started in its own process group, watched through a pidfd, ended with all its children. It dies with
its launcher, however that ends: the kernel sends SIGKILL (``PR_SET_PDEATHSIG``). That is set between fork and exec,
where only what needs no lock is allowed: one foreign call, prepared before, and ``os.getppid``. The launcher has a
single thread, so no lock can be held by another one at that moment.

One thread, no locks: output pipes, the exit of processes (pidfds), signals and timers are all events of
the asyncio loop.

A job that has failed as a whole is run again after a pause, as often as it may be. The ranks of one machine start again
together. Those of other machines lose their peers and end, so their launchers do the same, and all meet anew: a rank
believes nothing that an earlier attempt left in a store, and no connection of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import math
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from syncline.cli.launcher.environment import JOIN, RESTART_COUNT, without_place
from syncline.cli.launcher.failure import (
    describe_ending,
    describe_failures,
    describe_first,
    describe_restarts,
    fate_of,
    since_last_survived,
)
from syncline.cli.launcher.job import Job, RankProcess
from syncline.cli.launcher.supervisor import (
    Announce,
    Exit,
    Failure,
    Instruction,
    Limits,
    RestartBudget,
    RestartLimits,
    SendSignal,
    StartAgain,
    Supervisor,
)
from syncline.cli.launcher.terminal import Terminal, colour_of
from syncline.errors import LaunchError, escape_text
from syncline.last_words import LAST_WORDS, LastWords, read_words
from syncline.runtime.live import render

READ_BYTES = 1 << 16
NUM_KEPT_LINES = 400
"""Of each rank's standard error, for the report of a failure."""
ELSEWHERE = -1
"""Stands for a rank that another launcher has started."""


PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 127
_SHORTAGES = {
    errno.EMFILE: "; raise the launcher's limit on open files (ulimit -n): it holds 3 for each rank",
    errno.EAGAIN: "; raise this user's limit on processes (ulimit -u), or the container's (pids.max)",
    errno.ENOMEM: "; the launcher may have no more memory: raise its limit (ulimit -v), or the container's",
}
"""What of the launcher's own may run short, by the kernel's answer: the remedy. Of a program it is said by itself."""


class RankHandle:
    """A running rank: its output pipes (None where it writes to the terminal itself) and its pidfd."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.stdout = process.stdout
        self.stderr = process.stderr
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def send_signal(self, signal_number: int) -> None:
        """Signal the whole process group; a group that is gone is no error."""
        try:
            os.killpg(self._process.pid, signal_number)
        except ProcessLookupError:
            return
        if signal_number == signal.SIGTERM:
            os.killpg(self._process.pid, signal.SIGCONT)  # a stopped process would not notice

    def take_exit(self) -> Exit:
        """How the process ended; call once, after the pidfd became readable. Kills what is left of its group.

        The process stays a zombie until its group is swept, so that its number cannot belong to somebody else.
        """
        result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.send_signal(signal.SIGKILL)
        self._process.wait()
        os.close(self.pidfd)
        if result is not None and result.si_code == os.CLD_EXITED:
            return Exit(code=result.si_status)
        return Exit(signal_number=-self._process.returncode)


def start_rank(command: Sequence[str], *, environment: Mapping[str, str], owns_terminal: bool, name: str) -> RankHandle:
    """Start ``command``; with ``owns_terminal`` its standard output is the launcher's own."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if owns_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_die_with_parent(),  # noqa: PLW1509  (safe here: see this module's docstring)
        )
    except OSError as error:
        remedy = _SHORTAGES.get(error.errno or 0, "")
        raise LaunchError(f"{name} cannot be started: '{command[0]}': {error.strerror}{remedy}") from error
    return RankHandle(process)


def _die_with_parent() -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died in between
            os._exit(CANNOT_EXECUTE)

    return prepare


LIMIT_BYTES = 1 << 16
REDRAW_INTERVAL_S = 1.0
LOOK_S = 0.5


class LineSplitter:
    """Bytes in, whole lines out (without their ends).

    A line that is longer than ``LIMIT_BYTES`` is cut there, so that memory stays bounded. A progress bar redraws its
    line with carriage returns: of these states only the last one is shown, and while the line is not finished at most
    one in each ``REDRAW_INTERVAL_S``.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._redrawn_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Return the lines that ``data`` completes."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        lines = [_shown(line) for line in whole]
        while len(self._partial) > LIMIT_BYTES:
            lines.append(_shown(self._partial[:LIMIT_BYTES]))
            self._partial = self._partial[LIMIT_BYTES:]
        return lines + self._redrawn(now_s)

    def finish(self) -> list[str]:
        """Return the last line, if its end never came."""
        rest, self._partial = self._partial, b""
        return [_shown(rest)] if rest else []

    def _redrawn(self, now_s: float) -> list[str]:
        drawn, _, rest = self._partial.rpartition(b"\r")
        if not drawn or not rest:  # no redraw yet, or the line's end may still follow ("\r\n")
            return []
        self._partial = b"\r" + rest
        if now_s - self._redrawn_s < REDRAW_INTERVAL_S or not drawn.strip(b"\r"):
            return []
        self._redrawn_s = now_s
        return [_shown(drawn)]


def _shown(line: bytes) -> str:
    """Return what a terminal shows of ``line`` when it is complete."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is to be run: the job, an environment for each rank, and how its output is shown."""

    job: Job
    environments: Mapping[int, Mapping[str, str]]
    labels: Mapping[int, str]
    limits: Limits
    logs: Mapping[int, Path] = field(default_factory=dict)
    """Where the output of each rank is written too."""
    terminal_rank: int | None = None
    """The rank whose standard output is the terminal itself, for a progress bar."""
    restarts: RestartLimits = field(default_factory=RestartLimits)
    """How often all ranks may be started again when the job has failed."""
    view: Path | None = None
    """Where rank 0 writes what it knows of all ranks, for a screen."""


class _Stream:
    """One output pipe of a rank."""

    def __init__(self, pipe: IO[bytes], *, is_error: bool, show: Callable[[list[str], bool], None]) -> None:
        self.descriptor = pipe.fileno()
        self._pipe = pipe
        self._is_error = is_error
        self._splitter = LineSplitter()
        self._show = show

    def read(self, now_s: float) -> bytes | None:
        """Show what has arrived; empty at the end of the stream, None when nothing is there for now."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return None
        self._show(self._splitter.feed(data, now_s), self._is_error)
        return data

    def close(self, now_s: float) -> None:
        """Read what is there, and show a last line without an end too."""
        while self.read(now_s):
            pass
        self._show(self._splitter.finish(), self._is_error)
        self._pipe.close()


class Runner:
    """One attempt; ``door``: where its ranks join a job that runs elsewhere, if they do."""

    def __init__(self, session: Session, terminal: Terminal, *, attempt: int = 0, door: str = "") -> None:
        self._session = session
        self._attempt = attempt
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._terminal = terminal
        self._names = {process.rank: process.name for process in session.job.processes}
        if session.job.join is not None:
            self._names = {rank: f"newcomer {rank}" for rank in self._names}
        elif session.job.topology is None:
            self._names = {rank: f"rank {rank}" for rank in self._names}
        self._started_as = dict(self._names)
        self._supervisor = Supervisor(self._names, session.limits, now_s=self._loop.time())
        self.handles: dict[int, RankHandle] = {}
        self._streams: dict[int, list[_Stream]] = {}
        self._unlogged: set[int] = set()
        """Ranks whose logs cannot be written any more."""
        self._tails: dict[int, deque[str]] = {rank: deque(maxlen=NUM_KEPT_LINES) for rank in self._names}
        self._timer: asyncio.TimerHandle | None = None
        self._newcomers: set[int] = set()
        """Whose processes come into a running job, and have not said yet what it calls them."""
        self._labels = dict(session.labels)
        is_newcomer = bool(door) or session.job.join is not None
        self._rank_of = {} if is_newcomer else {rank: rank for rank in self._names}
        """By number in the job."""
        self._words: dict[int, LastWords] = {}
        self._num_made_up = dict.fromkeys(self._names, 0)
        """How many failures of a rank are made up for, as it has come back."""

    async def run(self) -> int:
        """Run all ranks to their end; returns the exit code."""
        try:
            for process in self._session.job.processes:
                self._start(process, self._door)
            await self._finished.wait()
        finally:
            self._kill_rest()
        self._report()
        return self._supervisor.exit_code

    @property
    def was_told_to_end(self) -> bool:
        """Whether the user, or a scheduler, ended the job."""
        return self._supervisor.ended_by is not None

    @property
    def fate(self) -> str:
        """In a few words, what ended the attempt."""
        return fate_of(self._causes, names=self._names, tails=self._tails, words=self._last_words())

    @property
    def left_door(self) -> str:
        """Where ranks of other machines may go on, if somebody else ended all that are here once they had met."""
        was_lost = self._has_met(*self._names) and all(
            failure.exit.is_loss and not failure.was_signalled for failure in self._supervisor.failures
        )
        own = {self._told_by(rank).get("doors", [""])[0] for rank in self._names}
        others = ",".join(door for door in self._doors(self._names).split(",") if door not in own)
        return others or self._door if was_lost else ""

    def _start(self, process: RankProcess, door: str) -> None:
        job, rank = self._session.job, process.rank
        environment = dict(self._session.environments[rank])
        environment[RESTART_COUNT] = str(self._attempt + self._supervisor.num_restarts)
        self._last_words_file(rank).unlink(missing_ok=True)  # of an earlier process
        self._labels[rank] = self._session.labels[rank]
        if door or JOIN in environment:
            self._newcomers.add(rank)
        handle = start_rank(
            job.command,
            environment=without_place(environment) | {JOIN: door} if door else environment,
            owns_terminal=rank == self._session.terminal_rank,
            name=self._names[rank],
        )
        self.handles[rank] = handle
        show = self._show_of(rank)
        self._streams[rank] = [
            _Stream(pipe, is_error=pipe is handle.stderr, show=show)
            for pipe in (handle.stdout, handle.stderr)
            if pipe is not None
        ]
        for stream in self._streams[rank]:
            self._loop.add_reader(stream.descriptor, self._on_output, stream)
        self._loop.add_reader(handle.pidfd, self._on_exit, rank)

    def _show_of(self, rank: int) -> Callable[[list[str], bool], None]:
        def show(lines: list[str], is_error: bool) -> None:
            if is_error:
                self._tails[rank].extend(lines)
            self._learn_number(rank)
            self._log(rank, lines)
            label = "" if rank == self._session.terminal_rank else self._labels[rank]
            self._terminal.write_lines(lines, label=label, colour=colour_of(rank), is_error=is_error)

        return show

    def _log(self, rank: int, lines: list[str]) -> None:
        path = self._session.logs.get(rank)
        if path is None or not lines or rank in self._unlogged:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:  # a full disk must not end the job that is looked at
            self._unlogged.add(rank)
            self._terminal.say(f"the log {path} ends here: {error.strerror}", is_error=True)

    def _on_output(self, stream: _Stream) -> None:
        if stream.read(self._loop.time()) == b"":
            self._loop.remove_reader(stream.descriptor)  # its end; the rank's exit closes it
        if self._terminal.is_broken:
            self.on_signal(signal.SIGPIPE)

    def _on_exit(self, rank: int) -> None:
        handle = self.handles.pop(rank)
        self._loop.remove_reader(handle.pidfd)
        how = handle.take_exit()
        self._close_streams(rank)
        for newcomer in tuple(self._newcomers):  # one that wrote nothing may have come in too
            self._learn_number(newcomer)
        self._words.pop(rank, None)
        if "text" in (told := self._told_by(rank)):
            self._words[rank] = LastWords(ranks=tuple(told["ranks"]), text=escape_text(told["text"]))
        self._do(self._supervisor.on_exit(rank, how, self._loop.time(), outside=frozenset(self._newcomers)))

    def on_signal(self, number: int) -> None:
        """Do what the supervisor makes of a signal that the launcher got."""
        self._do(self._supervisor.on_signal(number, self._loop.time()))

    def _on_time(self) -> None:
        self._do(self._supervisor.on_time(self._loop.time()))

    def _do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._follow(instruction)
        if self._timer is not None:
            self._timer.cancel()
        wake_at_s = self._supervisor.wake_at_s
        self._timer = None if wake_at_s is None else self._loop.call_at(wake_at_s, self._on_time)
        if self._supervisor.is_finished:
            self._finished.set()

    def _follow(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendSignal):
            if instruction.rank in self.handles:
                self.handles[instruction.rank].send_signal(instruction.signal_number)
        elif isinstance(instruction, StartAgain):
            (process,) = (one for one in self._session.job.processes if one.rank == instruction.rank)
            known = *instruction.living, instruction.rank
            self._start(process, self._doors(known) if self._has_met(*known) else "")
        else:
            self._announce(instruction)

    def _has_met(self, *ranks: int) -> bool:
        """Whether one of these has met the others, so that who starts again comes in; else its old place is free."""
        return bool(self._door) or any("met" in self._told_by(rank) for rank in ranks)

    def _doors(self, ranks: Iterable[int]) -> str:
        """Return where members let newcomers in: first these ranks, then the others that they know of."""
        told = [doors for rank in ranks if (doors := self._told_by(rank).get("doors"))]
        return ",".join(dict.fromkeys([*(own for own, *_ in told), *(door for _, *others in told for door in others)]))

    def _announce(self, announcement: Announce) -> None:
        if announcement.rank is None:
            self._terminal.say(describe_ending(announcement.reason, self._supervisor.living))
            return
        failure, living = self._supervisor.failures[-1], self._supervisor.living
        words = describe_first(
            self._names[failure.rank],
            failure.exit,
            num_living=len(living),
            grace_s=self._session.limits.grace_s,
            pause_s=announcement.pause_s,
            would_go_on=any("goes_on" in self._told_by(rank) for rank in living),
        )
        self._terminal.say(words, is_error=True)

    def _report(self) -> None:
        went_on = self._supervisor.went_on and not self.was_told_to_end
        if self.was_told_to_end:
            failures = self._ended_otherwise
        else:
            failures = self._supervisor.failures if went_on else self._causes
        if not failures:
            return
        report = describe_failures(
            failures,
            names=self._names,
            tails=self._tails,
            num_missing=self._supervisor.num_missing if went_on else None,
            words=self._last_words(),
        )
        self._terminal.say("\n".join(report), is_error=True)

    @property
    def _ended_otherwise(self) -> list[Failure]:
        """Those that did not end as they were told, with SIGTERM: what they were to save then may not be whole.

        After Ctrl-C ranks may end as they like, and for who has gone away nobody reads it.
        """
        if self._supervisor.ended_by != signal.SIGTERM:
            return []
        return [
            replace(failure, was_signalled=failure.exit.code is None)  # who has a code of its own ended by itself
            for failure in self._supervisor.failures
            if failure.was_signalled and failure.exit.shell_code != 128 + signal.SIGTERM
        ]

    def _last_words(self) -> Mapping[int, LastWords]:
        """Return what ranks that failed have left, with the ranks as this launcher has started them."""
        return {
            rank: words._replace(ranks=tuple(self._rank_of.get(number, ELSEWHERE) for number in words.ranks))
            for rank, words in self._words.items()
            if any(failure.rank == rank for failure in self._supervisor.failures)
        }

    def _last_words_file(self, rank: int) -> Path:
        return Path(self._session.environments[rank][LAST_WORDS])

    def _told_by(self, rank: int) -> Mapping[str, Any]:
        return read_words(self._last_words_file(rank))

    def _learn_number(self, rank: int) -> None:
        """Let the rank's lines, and the report, carry the number by which errors call it once it has come in."""
        if rank not in self._newcomers or (number := self._told_by(rank).get("number")) is None:
            return
        self._newcomers.discard(rank)
        self._rank_of[number] = rank
        self._num_made_up[rank] = sum(failure.rank == rank for failure in self._supervisor.failures)
        if number != rank:
            self._labels[rank] = f"{self._session.labels[rank].removesuffix(']')}>{number}]"
            self._names[rank] = f"{self._started_as[rank]} (in the job: rank {number})"

    @property
    def _causes(self) -> list[Failure]:
        """Those of which one ended the job: not of ranks that have come back since, if there are others.

        Nor those that a job whose survivors go on has survived.
        """
        seen = dict.fromkeys(self._names, 0)
        left = []
        for failure in self._supervisor.failures:
            seen[failure.rank] += 1
            if seen[failure.rank] > self._num_made_up[failure.rank]:
                left.append(failure)
        left = left or self._supervisor.failures
        return since_last_survived(left, self._last_words()) if math.isinf(self._session.limits.grace_s) else left

    def _kill_rest(self) -> None:
        """Leave nothing behind when the launcher itself fails, for instance because a rank cannot be started."""
        for rank, handle in self.handles.items():
            self._loop.remove_reader(handle.pidfd)
            handle.send_signal(signal.SIGKILL)
            handle.take_exit()
            self._close_streams(rank)
        self.handles.clear()

    def _close_streams(self, rank: int) -> None:
        for stream in self._streams.pop(rank):
            self._loop.remove_reader(stream.descriptor)
            stream.close(self._loop.time())


def run_job(session: Session, terminal: Terminal) -> int:
    """Run all ranks to their end, in as many attempts as it takes and may; returns the exit code."""
    return asyncio.run(_run_attempts(session, terminal))


async def _run_attempts(session: Session, terminal: Terminal) -> int:
    attempts = _Attempts(session, terminal)
    following = asyncio.create_task(_follow(session.view, terminal)) if session.view else None
    try:
        return await attempts.run()
    finally:
        if following is not None:
            following.cancel()
            terminal.show([])


async def _follow(path: Path, terminal: Terminal) -> None:
    """Show the view of the job that rank 0 writes."""
    seen = ""
    while True:
        with contextlib.suppress(OSError):  # it is not there yet
            if (text := path.read_text()) != seen:  # noqa: ASYNC240 - a few kB
                terminal.show(render(json.loads(text)))
                seen = text
        await asyncio.sleep(LOOK_S)


class _Attempts:
    """One attempt, or the pause before the next, is always there to be told of a signal."""

    def __init__(self, session: Session, terminal: Terminal) -> None:
        self._session = session
        self._terminal = terminal
        self._loop = asyncio.get_running_loop()
        self._budget = RestartBudget(session.restarts)
        self._fates: list[str] = []
        """What ended each attempt that failed."""
        self._runner: Runner | None = None
        self._told_to_end: asyncio.Future[int] = self._loop.create_future()
        # until the loop is closed; exec resets them to the default actions for the ranks
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                self._loop.add_signal_handler(number, self._on_signal, number)

    async def run(self) -> int:
        """Return the exit code of the last attempt."""
        session, door, gave_up = self._session, "", None
        while True:
            began_s = self._loop.time()
            self._runner = runner = Runner(session, self._terminal, attempt=len(self._fates), door=door)
            code = await runner.run()
            self._runner = None
            if code == 0 or runner.was_told_to_end:
                break
            now_s = self._loop.time()
            pause_s = self._budget.take(now_s, ran_s=now_s - began_s)
            self._fates.append(runner.fate)
            if pause_s is None:
                gave_up = str(session.restarts)
                break
            door = runner.left_door
            self._announce(pause_s, joins=bool(door))
            await asyncio.wait([self._told_to_end], timeout=pause_s)
            if self._told_to_end.done():
                code = 128 + self._told_to_end.result()
                break
        if self._fates and session.restarts.count:
            words = describe_restarts(self._fates, is_success=code == 0, gave_up=gave_up)
            self._terminal.say(words, is_error=code != 0)
        return code

    def _on_signal(self, number: int) -> None:
        if self._runner is not None:
            self._runner.on_signal(number)
        elif number != signal.SIGUSR2 and not self._told_to_end.done():
            self._told_to_end.set_result(number)

    def _announce(self, pause_s: float, *, joins: bool) -> None:
        ranks = "all ranks" if self._session.job.is_whole else "the ranks of this machine"
        where = ", and join those that go on elsewhere" if joins else ""
        self._terminal.say(
            f"{ranks} start again in {pause_s:g} s{where} (--restarts allows it {self._session.restarts})"
        )
