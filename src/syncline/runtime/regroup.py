"""Drives the agreement: reports as control messages, losses from the fabric, and a training thread that waits.

The state machine lives on the communication loop's thread. The training thread calls :meth:`Regroup.agree` when a call
of the epoch has failed, and rests in it; when it has a communicator for the new epoch, it says so
(:meth:`Regroup.enter`), and a report that comes after that ends the calls of that one.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from functools import lru_cache

from syncline.errors import ConfigurationError, FabricError
from syncline.fabric import MAX_CONTROL_BYTES, GivenUpError
from syncline.members import Epoch
from syncline.members.agreement import Agreement, Effect, Go, Interrupt, Loss, Report, Stop, Tell
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.schedule.layout import joined_ranges

ROUNDS = 4
"""So many times the time of a collective, at most, until all agree: ranks may be lost one after another."""


class Regroup:
    """One rank's part in the agreements on a fabric; ``stream`` is its alone, the same on all ranks.

    ``communicator`` is that of the job, on whose fabric all epochs are; ``epoch`` the one that it makes.
    """

    def __init__(
        self, communicator: Communicator, epoch: Epoch, *, stream: int, min_ranks: int, timeout_s: float
    ) -> None:
        self._port = communicator.open_port("regroup")
        self._communicator = communicator
        self._machine = Agreement(
            rank=epoch.members[communicator.rank], epoch=epoch, min_ranks=min_ranks, describe=self._port.describe_peer
        )
        self._timeout_s = timeout_s
        self._work: Work | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._agreed: Go | None = None
        self._stop: Stop | None = None
        self._interrupt: Interrupt | None = None
        """What came since the last agreement, if anything did."""
        self._port.call(lambda: self._open(stream), timeout_s)

    def agree(self, *, first_free: int) -> Go:
        """Wait until all who are left agree on who goes on; on the training thread.

        ``first_free``: the first stream that this rank has not used. Raises :class:`QuorumLostError` where this rank
        does not go on, :class:`UpdateError` if the others do not answer in time.
        """
        work = self._port.work("the agreement on who goes on", timeout_s=ROUNDS * self._timeout_s)
        self._port.call_soon(self._rest, first_free, work)
        work.wait()
        assert self._agreed is not None, "the agreement ends with an epoch, or with an error"
        return self._agreed

    def enter(self, communicator: Communicator, *, over: Sequence[range]) -> None:
        """Let reports end the calls of ``communicator`` from now on: that of the epoch that was agreed on.

        What still comes in the streams that are ``over`` is dropped, and counted.
        """
        self._port.call_soon(self._enter, communicator, over)

    def expect_leave(self, rank: int) -> None:
        """Take note that all members know that ``rank`` leaves at the end of this step.

        That it has closed its fabric would not tell: a member that goes over to another one does so too.
        """
        self._port.call_soon(self._machine.expect_leave, rank)

    def close(self) -> None:
        """Take part no more."""
        self._port.call_soon(self._close)

    # What happens on the loop's thread.

    def _open(self, stream: int) -> None:
        self._port.watch_controls(stream, self._on_control)
        self._port.watch_losses(self._on_lost)
        self._watch(self._communicator)

    def _watch(self, communicator: Communicator) -> None:
        """Take note of whom the calls of ``communicator`` fail for, when they do.

        Not when the training thread comes to rest: the rank that is late reports whom it has lost in turn, and must not
        be believed meanwhile.
        """
        self._communicator = communicator
        communicator.watch_failure(lambda _: self._on_failure(communicator))

    def _on_failure(self, communicator: Communicator) -> None:
        loss = communicator.loss
        if loss is not None and not loss.is_hearsay:
            self._do(self._machine.lose(communicator.members[loss.rank]))

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._port.close()

    def _rest(self, first_free: int, work: Work) -> None:
        self._work, self._interrupt = work, None
        if self._stop is not None:
            self._finish(self._stop.error)
            return
        self._start_timer()
        self._do(self._machine.rest(first_free=first_free))

    def _enter(self, communicator: Communicator, over: Sequence[range]) -> None:
        self._watch(communicator)
        self._port.drop_streams([range(*each) for each in joined_ranges((one.start, one.stop) for one in over)])
        if self._interrupt is not None:
            self._end_calls(self._interrupt)

    def _on_lost(self, peer: int, error: Exception) -> None:
        if isinstance(error, GivenUpError):
            self._do(self._machine.be_given_up(peer))
        elif peer != self._port.rank:
            self._do(self._machine.lose(peer))
        elif self._work is not None:
            self._finish(error)

    def _on_control(self, peer: int, payload: bytes) -> None:
        try:
            report = decode_report(payload)
        except FabricError as error:
            self._do([Stop(error=error)])
            return
        self._do(self._machine.hear(peer, report))

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                payload = encode_report(effect.report)
                for peer in effect.peers:
                    self._port.tell(peer, payload)
            elif isinstance(effect, Interrupt):
                is_first, self._interrupt = self._interrupt is None, effect
                if is_first:  # of as many reports as there are ranks
                    self._end_calls(effect)
            elif isinstance(effect, Go):
                self._agreed = effect
                self._finish(None)
            else:
                self._stop = effect
                self._communicator.interrupt(str(effect.error))
                self._finish(effect.error)

    def _end_calls(self, interrupt: Interrupt) -> None:
        who = self._port.describe_peer
        why = "the members of the job change" if interrupt.lost is None else f"{who(interrupt.lost)} is lost"
        self._communicator.interrupt(f"{why}, as other ranks report", lost=interrupt.lost)

    def _finish(self, error: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        work, self._work = self._work, None
        if work is not None:
            work.finish(error)

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def _expire(self) -> None:
        self._start_timer()
        self._do(self._machine.expire())


_HEAD = struct.Struct("<IIHH")
_LOSS = struct.Struct("<HHB")


def encode_report(report: Report) -> bytes:
    """Encode a report: a head, a bit for each rank that may be a member of the base, and the losses."""
    members = sum(1 << member for member in report.base.members)
    bits = members.to_bytes(-(-members.bit_length() // 8), "little")
    losses = [_LOSS.pack(rank, loss.accuser, loss.has_left) for rank, loss in sorted(report.losses.items())]
    payload = _HEAD.pack(report.base.number, report.first_free, len(bits), len(losses)) + bits + b"".join(losses)
    if len(payload) > MAX_CONTROL_BYTES - 16:
        raise ConfigurationError(
            f"A report of {len(report.losses)} lost ranks among {len(report.base.members)} has {len(payload)} bytes, "
            f"more than fit into a control message of {MAX_CONTROL_BYTES}; start such a job again from a checkpoint"
        )
    return payload


def decode_report(payload: bytes) -> Report:
    """Decode a report; :class:`FabricError` for what is none."""
    try:
        number, first_free, num_bytes, num_losses = _HEAD.unpack_from(payload)
        start = _HEAD.size + num_bytes
        if len(payload) != start + num_losses * _LOSS.size:
            raise FabricError(f"A report of {len(payload)} bytes is cut off")
        base = _decode_base(number, payload[_HEAD.size : start])
        losses = {
            rank: Loss(accuser=accuser, has_left=bool(has_left))
            for rank, accuser, has_left in _LOSS.iter_unpack(payload[start:])
        }
    except struct.error as error:
        raise FabricError(f"{len(payload)} bytes are no report: {error}") from error
    return Report(base=base, losses=losses, first_free=first_free)


@lru_cache(maxsize=8)
def _decode_base(number: int, encoded: bytes) -> Epoch:
    """Decode the base of a report: once for all ranks that tell the same, and one object for what is kept of them."""
    bits = int.from_bytes(encoded, "little")
    return Epoch(number=number, members=tuple(member for member in range(8 * len(encoded)) if bits >> member & 1))
