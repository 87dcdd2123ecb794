"""Local steps whose rounds go on without parties that are late (:class:`.Grace`).

Rounds are begun by a thread beside the training, in the order in which rank 0 decides about them
(:mod:`.attendance`). A rank of a party that is in brings its moves; one that is left out brings none, without weight,
while its training goes on. On every rank that thread also makes of each round what the global parameters become, one
round after the other. So they are the same everywhere, and one copy of the parameters has room for all the rounds that
a late party has missed, however many they are.

A party that comes early waits for a quorum as long, and trains on then, with its moves on the way; a loop in which all
ranks meet after as many steps would else wait for rounds that nobody begins. At its next round a party takes over all
that have passed,

    parameters = global ones + (parameters now - those that were sent, or else those that the period began from)

and what it has moved meanwhile goes to the next round that it is in. All ranks of a party must take over as many rounds
in the same step, so they agree on that first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from syncline.errors import ConfigurationError, DeadlineError, SynclineError, name_ranks
from syncline.members import Membership
from syncline.runtime.communicator import Communicator
from syncline.runtime.worker_thread import WorkerThread
from syncline.schedule.replicas import find_parties
from syncline.updates.attendance import Attendance, Begun, Decided, Grace
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.control import ControlStream
from syncline.updates.local_steps_updater import LocalStepsUpdater, take_over
from syncline.updates.messaging import Driver
from syncline.updates.rounds import Move, Round
from syncline.updates.rule import Setting
from syncline.updates.state import StateSource

_log = logging.getLogger(__name__)
_TOLD_BY_THE_LATE = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
"""In a round that a rank is left out of: it does not end, and nothing is known of its steps."""


class Decisions(Driver):
    """What rank 0 decides, as this rank knows it; ``on_decided`` is called on the loop's thread after each one."""

    kinds_of_notes = (Begun, Decided)

    def __init__(self, communicator: Communicator, attendance: Attendance, on_decided: Callable[[], None]) -> None:
        port = communicator.open_port("late parties")
        super().__init__(port, Membership(tuple(range(port.world_size))), timeout_s=communicator.timeout_s)
        self.changed = self._changed
        """Guards what is decided and begun, and tells of each, and of a failure."""
        self.number = 0
        """Of rounds that are decided."""
        self._decided: dict[int, Decided] = {}
        self._attendance, self._on_decided = attendance, on_decided
        self._were_late: set[int] = set()
        self._look_s: float | None = None
        communicator.watch_failure(self.fail)

    def watch(self, stream: int) -> None:
        """Hear from now on what ranks tell each other on a stream, and of losses."""
        self._port.call(lambda: self._watch(stream), self._timeout_s)

    def begin(self, number: int, *, ends: bool) -> None:
        """Tell that this rank has begun a round."""
        self._port.call_soon(self._send_note, 0, Begun(number, ends))

    def left_out(self, number: int) -> Sequence[int]:
        """Return the parties that a round goes on without."""
        return self._decided[number].left_out

    def forget(self, before: int) -> None:
        """Keep no decisions about rounds before this one."""
        with self.changed:
            for number in [number for number in self._decided if number < before]:
                del self._decided[number]

    def wait_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until ``is_over`` or a failure, for so long at most."""
        self._wait_for(is_over, seconds)

    def close(self) -> None:
        """Hear of nothing any more."""
        with contextlib.suppress(SynclineError):  # a loop that broke or hangs has nothing to tell
            self._port.call(self._port.close, self._timeout_s)

    # The loop's thread.

    def _on_lost(self, peer: int, error: Exception) -> None:
        """Fail without who decides: no round begins any more. Rounds' sums, which wait for others, tell of those."""
        if peer == 0:
            self.fail(error)

    def _on_note(self, peer: int, note: Begun | Decided) -> None:
        if isinstance(note, Begun):
            self._attendance.begin(peer, note.number, ends=note.ends, now_s=self._now_s())
            self._decide()
            return
        with self.changed:
            self._decided[note.number] = note
            self.number = note.number + 1
            self.changed.notify_all()
        self._on_decided()

    def _decide(self) -> None:
        number, left_out = self._attendance.number, self._attendance.decide(self._now_s())
        if left_out is not None:
            self._warn_of(left_out, number)
            self._look_s = None
            for rank in range(self._port.world_size):
                self._send_note(rank, Decided(number, left_out))
        elif (look_s := self._attendance.look_s) is not None and look_s != self._look_s:
            self._look_s = look_s
            self._port.call_later(look_s - self._now_s(), self._decide)

    def _warn_of(self, parties: Sequence[int], number: int) -> None:
        """Say of each party once that it was late; its statistics count how often."""
        for party in set(parties).difference(self._were_late):
            self._were_late.add(party)
            who = name_ranks(self._attendance.parties[party])
            _log.warning("round %d of LocalSteps goes on without %s, late by more than its grace", number, who)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


class _Sent(NamedTuple):
    """What this rank brings to a round, if its party is in; ``step`` is its own by then."""

    number: int
    step: int
    fragment: int
    moves: list[Move]
    unsent: tuple[float, int]
    told: Sequence[float]


class GraceLocalStepsUpdater(LocalStepsUpdater):
    """Local steps at work on one model, in rounds that late parties hold up for a while only."""

    def __init__(self, setting: Setting, *, grace: Grace, **settings: Any) -> None:
        communicator = setting.collectives.communicator
        num_parties = len(find_parties(communicator.topology, settings["parties"]))
        quorum = grace.quorum or num_parties // 2 + 1
        if quorum > num_parties:
            raise ConfigurationError(
                f"LocalSteps: Grace(quorum={quorum}) is more than there are parties: {num_parties}; give fewer, "
                "or leave quorum out for more than half"
            )
        super().__init__(setting, pace="equal", **settings)
        self._grace_s = grace.seconds
        self._is_patient = False
        """Whether it waits for rounds that have no quorum, too."""
        self._own_party = self.parties.index(tuple(self._ranks))
        self._offset = 0
        """From a round's number to that of its fragment, as a checkpoint may have brought it."""
        self._sent: _Sent | None = None
        self._num_taken = 0
        """Rounds that the training thread has taken over."""
        self._rounds: dict[int, Round] = {}
        """Those under way."""
        self._num_begun = self._num_global = 0
        """Rounds: that the thread has begun, and of which it has made the global parameters."""
        self._limit = math.inf
        """Of so many it may."""
        self._globals = threading.Lock()
        """Of who makes them, or takes them over."""
        self._ahead: dict[int, list[torch.Tensor]] = {}
        """By fragment, global parameters that were not taken over."""
        patience_s = communicator.timeout_s  # by then a call in which others wait for this rank has failed
        attendance = Attendance(self.parties, quorum=quorum, grace_s=grace.seconds, patience_s=patience_s)
        self._decisions = Decisions(communicator, attendance, self._wake)
        self._thread = WorkerThread("syncline-rounds", on_failure=self._decisions.fail)
        self._decisions.watch(self._reserve(1).start)

    def go_on_from(self, iteration: int) -> None:
        """Count from there on."""
        super().go_on_from(iteration)
        self._offset = self._next_round - self._num_taken

    def end_period(self) -> None:
        """Follow the others' rounds until all ranks have called this; then all have the same parameters."""
        self._is_patient = True
        super().end_period()
        self._is_patient = False

    def load_state(self, source: StateSource) -> None:
        """End the period, as no moves may be on their way, and take the party's state."""
        self.end_period()
        super().load_state(source)

    def close(self) -> None:
        """Give up what is under way."""
        self._decisions.close()
        self._thread.close()
        super().close()

    def _open_ways(self) -> tuple[ControlStream, BucketCollectives]:
        """Return ways for the thread alone: the training thread makes its calls at other times."""
        return ControlStream(self.collectives.communicator, stream=self._reserve(1).start), super()._open_ways()[1]

    # --- the training thread -------------------------------------------------------------------------------------

    def _begin_drifting(self) -> None:
        super()._begin_drifting()
        self._wake()

    def _meet(self) -> None:
        self._land()
        if self._sent is not None:  # there was no quorum
            self._num_ahead -= 1
            return
        self._send(ends=False)
        if not self._overlaps:
            self._land()

    def _send(self, *, ends: bool) -> None:
        fragment = self._next_round % len(self._fragments)
        self._next_round += 1
        moves = self._moves(fragment, copies=not ends)
        unsent, self._unsent[fragment] = self._unsent[fragment], (0.0, 0)
        self._sent = _Sent(self._num_taken, self.step_number, fragment, moves, unsent, self._told(unsent[1], ends=ends))
        self._decisions.begin(self._num_taken, ends=ends)
        self._wake()

    @torch.no_grad()
    def _land(self) -> torch.Tensor:
        """Take over the rounds that this rank has begun or was left out of; return what was told in the last one."""
        if self._is_equal:
            self._begin_drifting()
        start_s = time.monotonic()
        with self.collectives.communicator.progress.waiting("round"):
            if self._sent is not None:
                own, seconds = self._sent.number, self._limit_s if self._is_patient else self._grace_s
                self._decisions.wait_until(lambda: self._decisions.number > own, seconds)
                if self._decisions.number <= own:  # else it may only be over, and rank 0 has left in good order
                    self._decisions.raise_failure()
            with self._globals:
                self._limit = self._num_global  # until the party has agreed
                until = self._num_passable
            if len(self._ranks) > 1:
                until = int(max(self._party.collectives.control.gather_numbers(until, "rounds that have passed")))
            num_waits = self._num_global < until
            self._make_global_until(until)
        is_over = self._sent is not None and self._sent.number < until
        was_in = self._take_over(self._sent if is_over else None)
        counts, num_rounds = self._counts, until - self._num_taken
        self._counts = replace(
            counts,
            num_rounds=counts.num_rounds + num_rounds,
            num_waits=counts.num_waits + num_waits,
            waited_s=counts.waited_s + time.monotonic() - start_s,
            num_left_out=counts.num_left_out + num_rounds - was_in,
        )
        num_missed = num_rounds - is_over
        self._next_round, self._num_ahead = self._next_round + num_missed, self._num_ahead + num_missed
        self._num_taken, self._sent, self._limit = until, None if is_over else self._sent, math.inf
        self._decisions.forget(until)
        return torch.empty(0, len(_TOLD_BY_THE_LATE)) if self._last_told is None else self._last_told

    @property
    def _num_passable(self) -> int:
        """How many rounds can end without another step of this rank."""
        number, sent = self._decisions.number, self._sent
        next_own = self._num_taken if sent is None else sent.number + 1
        if number > next_own and self._is_in(number - 1):  # and all wait for that step
            number -= 1
        return max(number, next_own) if self._is_patient else number

    def _is_in(self, number: int) -> bool:
        return self._own_party not in self._decisions.left_out(number)

    @property
    def _limit_s(self) -> float:
        """For so long a round without a quorum is waited for, at most: half of it passes until all are in."""
        return 2 * self.collectives.timeout_s

    def _make_global_until(self, until: int) -> None:
        """Wait until the parameters of so many rounds are global, and of no more."""
        self._limit = until
        while (number := self._num_global) < until:
            self._decisions.wait_until(lambda: self._num_begun > number, self._limit_s)
            if self._num_begun <= number:  # or the thread is at it, and rank 0 has what it needs, and has left
                self._thread.close(finishes=True)
            if (flight := self._rounds.get(number)) is not None:
                flight.wait_over()
                self._make_global()
            elif self._num_global == number:
                self._decisions.raise_failure()
                raise DeadlineError(
                    f"round {number} of LocalSteps was not begun in {self._limit_s:g} s, as rank 0 has not said who is "
                    "in it; look where that is (py-spy dump --pid)"
                )

    def _take_over(self, sent: _Sent | None) -> bool:
        """Let this rank's parameters follow the global ones; return whether its party was in the round that it sent."""
        was_in = sent is not None and self._is_in(sent.number)
        with self._globals:
            for fragment, means in self._ahead.items():
                moves = self._moves(fragment, copies=False)
                bases = [move.start for move in moves]
                if sent is not None and was_in and sent.fragment == fragment:
                    has_stepped = self._overlaps or sent.step != self.step_number
                    bases = [move.values for move in (sent.moves if has_stepped else moves)]
                for part, move, base, new in zip(self._fragments[fragment], moves, bases, means, strict=True):
                    take_over(new, part, since=base, start=move.start)
            self._ahead.clear()
        if sent is not None and not was_in:
            samples, steps = self._unsent[sent.fragment]
            self._unsent[sent.fragment] = samples + sent.unsent[0], steps + sent.unsent[1]
        return was_in

    # --- the thread of rounds ------------------------------------------------------------------------------------

    @property
    def _round_thread(self) -> WorkerThread:
        return self._thread

    def _wake(self) -> None:
        self._thread.submit(0, (), self._begin_rounds)

    def _begin_rounds(self) -> None:
        """Begin all rounds that are decided; those that this rank is in once it has sent its moves."""
        while (number := self._num_begun) < self._decisions.number:
            is_in, sent = self._is_in(number), self._sent
            if is_in and (sent is None or sent.number != number):
                return
            if not is_in and self._is_equal:  # nobody is late who has made no step
                return
            sent, fragment = sent if is_in else None, self._fragment_of(number)
            moves = self._still(fragment) if sent is None else sent.moves
            weight = 0.0 if sent is None else self._weight_of(*sent.unsent)
            told = _TOLD_BY_THE_LATE if sent is None else sent.told
            flight = self._begin_round(fragment, moves, weight=weight, told=told, on_over=self._make_global)
            with self._decisions.changed:
                self._rounds[number] = flight
                self._num_begun += 1
                self._decisions.changed.notify_all()

    def _fragment_of(self, number: int) -> int:
        return (number + self._offset) % len(self._fragments)

    def _still(self, fragment: int) -> list[Move]:
        """Return moves of a fragment of which nothing moves."""
        moves = []
        for part in self._fragments[fragment]:
            still = torch.zeros((), dtype=part.bucket.parameters.dtype).expand(part.stop - part.start)
            moves.append(Move(part.plan, still, still))
        return moves

    @torch.no_grad()
    def _make_global(self) -> None:
        """Make the global parameters of each round that is over, in order; on either thread."""
        with self._globals:
            while (number := self._num_global) < self._limit:
                flight = self._rounds.get(number)
                if flight is None or not flight.has_result:
                    return
                fragment = self._fragment_of(number)
                parts = self._fragments[fragment]
                starts = self._ahead.get(fragment) or [part.of(self._starts[part.bucket.index]) for part in parts]
                means = flight.means(starts)
                self._step_outer(flight, parts, starts, means)
                self._ahead[fragment], self._last_told = means, flight.wait_told()
                del self._rounds[number]
                self._num_global += 1
