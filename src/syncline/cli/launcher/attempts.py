"""Runs a job, and runs it again after a pause if it has failed as a whole, as often as it may be.

The ranks of one machine start again together. Those of other machines lose their peers and end, so their launchers do
the same, and all meet anew: a rank believes nothing that an earlier attempt left in a store, and no connection of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

from syncline.cli.launcher.failure import describe_restarts
from syncline.cli.launcher.restarts import RestartBudget
from syncline.cli.launcher.session import Runner, Session
from syncline.cli.launcher.supervisor import Interrupted, Noticed, Terminated
from syncline.cli.launcher.terminal import Terminal
from syncline.runtime.live import render

LOOK_S = 0.5


def run_job(session: Session, terminal: Terminal) -> int:
    """Run all ranks to their end, in as many attempts as it takes and may; returns the exit code."""
    return asyncio.run(_run_attempts(session, terminal))


async def _run_attempts(session: Session, terminal: Terminal) -> int:
    attempts = _Attempts(session, terminal)
    following = asyncio.create_task(_follow(session.view, terminal)) if session.view else None
    try:
        with attempts.signals():
            return await attempts.run()
    finally:
        if following is not None:
            following.cancel()
            terminal.show([])


async def _follow(path: Path, terminal: Terminal) -> None:
    """Show the view of the job that rank 0 writes."""
    seen = ""
    while True:
        text = _read(path)
        if text != seen:
            terminal.show(render(json.loads(text)))
            seen = text
        await asyncio.sleep(LOOK_S)


def _read(path: Path) -> str:
    """Return a file of a few kB, or nothing where it is not there yet."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


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

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals into events; exec resets them to the default actions for the ranks."""
        endings = (signal.SIGTERM, signal.SIGHUP)
        self._loop.add_signal_handler(signal.SIGINT, self._handle, Interrupted())
        for number in endings:
            self._loop.add_signal_handler(number, self._handle, Terminated(signal_number=number))
        self._loop.add_signal_handler(signal.SIGUSR2, self._handle, Noticed(signal_number=signal.SIGUSR2))
        yield
        for number in (signal.SIGINT, signal.SIGUSR2, *endings):
            self._loop.remove_signal_handler(number)

    async def run(self) -> int:
        """Return the exit code of the last attempt."""
        session, joins, gave_up = self._session, False, None
        while True:
            began_s = self._loop.time()
            self._runner = runner = Runner(session, self._terminal, attempt=len(self._fates), joins=joins)
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
            joins = session.far_door is not None and runner.was_lost
            self._announce(pause_s, joins=joins)
            await asyncio.wait([self._told_to_end], timeout=pause_s)
            if self._told_to_end.done():
                code = 128 + self._told_to_end.result()
                break
        if self._fates and session.restarts.count:
            words = describe_restarts(self._fates, is_success=code == 0, gave_up=gave_up)
            self._terminal.say(words, is_error=code != 0)
        return code

    def _handle(self, event: Interrupted | Terminated | Noticed) -> None:
        if self._runner is not None:
            self._runner.handle(event)
        elif not isinstance(event, Noticed) and not self._told_to_end.done():
            self._told_to_end.set_result(event.signal_number)

    def _announce(self, pause_s: float, *, joins: bool) -> None:
        ranks = "all ranks" if self._session.job.is_whole else "the ranks of this machine"
        where = f", and join at {self._session.far_door}" if joins else ""
        self._terminal.say(
            f"{ranks} start again in {pause_s:g} s{where} (--restarts allows it {self._session.restarts})"
        )
