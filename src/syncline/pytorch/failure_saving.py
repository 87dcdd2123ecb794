"""``distribute(..., save_on_failure=PATH)``: after a loss one of those who live writes what it has, and all say where.

It happens on the training thread when the fleet closes with a loss, in whatever call that was met. Those who are left
tell each other, over the job's own connections, that they live and have the whole state. When everybody has spoken or
is lost, the lowest rank of them writes; if it fails or dies, the next. A rank that was late hears what was done.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from syncline.errors import DeadlineError, PeerLostError, SynclineError
from syncline.members import QuorumLostError
from syncline.pytorch.checkpoint.saving import save_alone
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.runtime.port import Port

LOSSES = (PeerLostError, QuorumLostError, DeadlineError)
HEAR_S = 15.0
"""Connections give a silent rank up after ten seconds; and steps of different ranks do not end at once."""
ANSWER_S = 5.0
_ALIVE, _WRITTEN, _HEARD = range(3)
_MAX_PROBLEM = 2000
"""Letters of what kept a rank from writing: all that is told is a control message."""

Told = dict[str, str | int | bool]


def save_after_losses(fleet: Fleet, optimizer: DistributedOptimizer, path: Path) -> None:
    """Save one model when ``fleet`` closes because of a loss; every rank of it asks for it alike."""
    (stream,) = fleet.reserve_streams(1)
    fleet.on_close(lambda _: _save_after_loss(fleet, optimizer, path, stream))


def _save_after_loss(fleet: Fleet, optimizer: DistributedOptimizer, path: Path, stream: int) -> None:
    """Save, if there was a loss, also where the user has caught the error; it says where."""
    errors = (fleet.error_in_flight, fleet.communicator.failure)
    error = next((one for one in errors if isinstance(one, LOSSES)), None)
    if error is None:
        return
    port = fleet.communicator.open_port(f"save on failure {stream}")
    try:
        said = _Round(port, stream, limit_s=fleet.timeout_s).run(optimizer, path)
    except SynclineError as failure:  # what the user must see is the loss
        said = f"no checkpoint was written: {failure}"
    finally:
        port.call_soon(port.close)
    error.add_note(said)
    if error is not fleet.error_in_flight or fleet.is_error_shown:
        print(f"rank {port.rank}: {said}", file=sys.stderr)


class _Round:
    """Who is left, who writes, and what became of it."""

    def __init__(self, port: Port, stream: int, *, limit_s: float) -> None:
        self._port = port
        self._stream = stream
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._others = {rank for rank in range(port.world_size) if rank != port.rank}
        self._told: dict[int, dict[int, Told]] = {_ALIVE: {}, _WRITTEN: {}, _HEARD: {}}
        self._gone: set[int] = set()

    def run(self, optimizer: DistributedOptimizer, path: Path) -> str:
        """Take part, and say in a line what came of it."""
        own, updater = self._port.rank, optimizer.training.updater
        is_able = not (updater.is_server or updater.is_mid_step)  # else it has not everything, of one step
        self._port.call(partial(self._begin, is_able=is_able), self._limit_s)
        self._wait(lambda: self._others <= self._told[_ALIVE].keys() | self._gone, HEAR_S)
        able = {rank for rank, told in self._told[_ALIVE].items() if told["is_able"]} | ({own} if is_able else set())
        problems = ["nobody who is left has the whole state"] if not able else []
        for rank in sorted(able):
            if self._said() is None and rank == own:
                self._write(optimizer, path)
            elif rank != own:
                self._wait(partial(self._is_over, rank), self._limit_s)
            if (said := self._said()) is not None:
                return said
            told = self._told[_WRITTEN].get(rank, {"problem": "it does not answer"})
            problems.append(f"rank {rank}: {told['problem']}")
        return f"no checkpoint was written: {'; '.join(problems)}"

    def _said(self) -> str | None:
        """Say what was written, by whomever."""
        for rank, told in tuple(self._told[_WRITTEN].items()):
            if "path" in told:
                return (
                    f"rank {rank} has written a checkpoint of what it had, after step {told['iteration']}, to "
                    f"{told['path']}"
                )
        return None

    def _write(self, optimizer: DistributedOptimizer, path: Path) -> None:
        iteration = optimizer.iteration
        try:
            written = save_alone(path, optimizer.training.model, optimizer.inner, iteration=iteration)
            told: Told = {"iteration": iteration, "path": str(written)}
        except (SynclineError, OSError) as error:
            told = {"problem": str(error)[:_MAX_PROBLEM]}
        self._told[_WRITTEN][self._port.rank] = told
        living = self._told[_ALIVE].keys() - self._gone
        self._port.call_soon(self._tell, _WRITTEN, told)
        # a connection that is broken off takes with it what was not read
        self._wait(lambda: living <= self._told[_HEARD].keys() | self._gone, ANSWER_S)

    def _is_over(self, writer: int) -> bool:
        return writer in self._told[_WRITTEN] or writer in self._gone or self._said() is not None

    def _wait(self, is_over: Callable[[], bool], limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(is_over, limit_s)

    # On the communication loop's thread.

    def _begin(self, *, is_able: bool) -> None:
        self._port.watch_controls(self._stream, self._heard)
        self._tell(_ALIVE, {"is_able": is_able})
        self._port.watch_losses(self._lost)

    def _heard(self, rank: int, payload: bytes) -> None:
        try:
            kind, told = json.loads(payload)
        except ValueError as error:
            self._lost(rank, error)
            return
        with self._changed:
            self._told[kind][rank] = told
            self._changed.notify_all()
        if kind == _WRITTEN:
            self._port.tell(rank, _encoded(_HEARD, {}))

    def _lost(self, rank: int, _: Exception) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _tell(self, kind: int, told: Told) -> None:
        for rank in self._others:
            self._port.tell(rank, _encoded(kind, told))


def _encoded(kind: int, told: Told) -> bytes:
    return json.dumps([kind, told]).encode()
