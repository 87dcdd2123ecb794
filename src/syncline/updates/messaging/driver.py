"""What joins a pure state machine to the fabric and to the training thread.

The machine is told what happens on the loop's thread, and what it says is done there; the training thread posts what
it has (:meth:`Port.call_soon`) and waits for what it needs. What both see is guarded by the lock of ``_changed``. The
first failure counts: it ends every wait, and every later call raises it.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from syncline.errors import UpdateError, accusing
from syncline.members import Membership
from syncline.runtime.port import Port
from syncline.updates.messaging.mailbox import decode_record, encode_record

_log = logging.getLogger(__name__)

LOOK_S = 0.5
"""After so long a wait, the driver looks for what holds it up."""
LOOK_AGAIN_S = 2.0
STALL_GRACE_S = 4.0
"""Heartbeats tell of a training thread some seconds late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """To everyone: ``rank`` lives and is left behind. Of those that are lost the fabric tells everyone."""

    rank: int


class Driver(ABC):
    """Failures, losses, and waits that end; what the machine's events and instructions are is the subclass's.

    Drivers of all ranks tell each other *notes*: small records, ahead of all else.
    """

    kinds_of_notes: tuple[type, ...] = (LeftBehind,)

    def __init__(self, port: Port, membership: Membership, *, timeout_s: float) -> None:
        self.membership = membership
        self._port = port
        self._timeout_s = timeout_s
        self._progress = port.progress
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    # --- the training thread -------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what has gone wrong, if anything has."""
        if self._failure is not None:
            raise self._failure

    def _wait(self, is_over: Callable[[], bool], reason: str) -> None:
        """Wait until ``is_over`` (asked with the lock held), a failure, or the deadline, for a ``reason`` in a word.

        Who is waited for, lives, and does not train is left behind when it has been waited for long enough.
        """
        start_s, wait_s = time.monotonic(), LOOK_S
        limit_s = min(self._port.stalls.limit_s, self._timeout_s)
        end_s = start_s + max(self._timeout_s, limit_s + STALL_GRACE_S)
        with self._progress.waiting(reason):
            while not self._wait_for(is_over, wait_s) and (now_s := time.monotonic()) < end_s:
                if now_s - start_s >= limit_s:
                    self._port.call(self._leave_behind, self._timeout_s)
                self._look()
                wait_s = min(2 * wait_s, LOOK_AGAIN_S, max(LOOK_S, end_s - now_s - LOOK_S))

    def _wait_for(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Wait without looking for anything; False if neither that nor a failure came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failure is not None or is_over(), seconds)

    def _look(self) -> None:  # noqa: B027 - most have nobody to ask
        """Find out what holds up a wait."""

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def _watch(self, stream: int | None = None) -> None:
        """Hear of losses from now on, and of those before; with a ``stream`` of its own, also of notes."""
        if stream is not None:
            self._port.watch_controls(stream, self._on_control)
        self._port.watch_losses(self._lose)

    def _send_note(self, peer: int, note: Any) -> None:
        if peer == self._port.rank:
            self._port.call_soon(self._on_note, peer, note)
        else:
            self._port.tell(peer, encode_record(note))

    def _tell_others(self, note: Any) -> None:
        for peer in range(self._port.world_size):
            if peer != self._port.rank:
                self._send_note(peer, note)

    def _on_control(self, peer: int, payload: bytes) -> None:
        try:
            note, _ = decode_record(payload, self.kinds_of_notes, "an update's driver")
        except ValueError as error:
            self._lose(peer, UpdateError(f"{self._port.describe_peer(peer)} sent what is none: {error}"))
        else:
            self._on_note(peer, note)

    def _on_note(self, peer: int, note: Any) -> None:
        """Hear of a rank that hangs, this one perhaps; what one that was left behind itself tells is nothing."""
        assert isinstance(note, LeftBehind)
        hangs, who = note.rank, self._port.describe_peer
        if {hangs, peer}.intersection(self.membership.lost) or self._failure is not None:
            return
        if hangs == self._port.rank:
            text = f"{who(hangs)} was left behind: {who(peer)} takes this rank for hung; the others go on without it"
            self.fail(accusing(UpdateError(f"{text}; start it again from a checkpoint"), hangs))
        else:
            self._leave(hangs, f"{who(hangs)} hangs, as {who(peer)} reports")

    def _lose(self, peer: int, error: Exception) -> None:
        """Go on without a rank, or fail; this one is lost when its fleet closes, or its loop is broken."""
        if peer == self._port.rank:
            self.fail(error)
        else:
            self._on_lost(peer, error)

    @abstractmethod
    def _on_lost(self, peer: int, error: Exception) -> None:
        """Go on without another rank, or fail."""

    def _awaited_peers(self) -> Collection[int]:
        """Return whom this rank may wait for."""
        return ()

    def _leave(self, peer: int, text: str) -> None:
        """Go on without a rank that lives, as all others are to."""
        self._tell_others(LeftBehind(rank=peer))
        self._lose(peer, UpdateError(text))

    def _leave_behind(self) -> None:
        stalls = self._port.stalls
        for peer in sorted(stalls.stalled.intersection(self._awaited_peers()).difference(self.membership.lost)):
            who = self._port.describe_peer(peer)
            text = f"{who} lives, but its training thread has made no call for {stalls.still_s(peer):.1f} s"
            _log.warning("rank %d goes on without it: %s", self._port.rank, text)
            self._leave(peer, text)

    def fail(self, error: BaseException) -> None:
        """End everything with ``error``, from any thread."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()
