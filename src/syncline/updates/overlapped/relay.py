"""The relay of one bucket for the workers of a site, as a state machine: to them a server, to the server a worker.

A *site* is what the first switch that divides the network parts from the rest. Where every global gradient needs all
workers, what a site's workers push for a round is of no use to the server before the last of it is there; so a relay
waits for that, and the link between the sites carries one mean, with the sum of the weights, in place of each push. The
server's answer crosses once too, and the relay hands it on. A round is closed here when it is closed there.

One that cannot get all the site's workers any more, as one has ended its period, is abandoned here at once: the server
cannot fold it without this site, and is told so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from syncline.updates.overlapped.server import Forward, Push, Reply, ServerInstruction, ServerShard, Stop, Take


class RelayShard(ServerShard):
    """A server shard that makes no global gradients, but asks the bucket's server for them.

    It ends with the first loss, as all buckets then have other servers, to which workers push by themselves. So a round
    that lacks a lost worker is not completed here.
    """

    def __init__(self, *, rank: int, workers: Collection[int]) -> None:
        """``rank`` is this one, under which it pushes; ``workers`` are those of its site."""
        super().__init__(workers=workers, quorum=len(workers), ends_elsewhere=True)
        self._rank = rank
        self._is_sending = False
        """A push, perhaps of an older period, has not left: the next waits, and so does its memory."""
        self._is_out = False
        """What is held went to the server, which counts it if it drops it."""
        self._has_stopped = False

    def sent(self) -> list[ServerInstruction]:
        """Note that the last push has left."""
        self._is_sending = False
        return self._advance()

    def answer(self, reply: Reply, payload: Any = None) -> list[ServerInstruction]:
        """Take what the server has closed, and the sum with it; hand it on to all."""
        begun = self._go_on_to(reply.period)
        if reply.period != self.period or reply.closed <= self.closed:
            return begun
        if reply.accepted == self.closed + 1:
            self._held.clear()
        else:
            self._drop_held()
        self._is_out = False
        self.closed, self.clock = reply.closed, reply.clock
        for account in self._accounts.values():
            account.accepted = reply.accepted  # all of the site were in, or none
        return [*begun, Take(payload=payload), *self._tell(), *self._pass_stop_on()]

    def stop(self, worker: int, *, period: int, last_round: int) -> list[ServerInstruction]:
        """Note that ``worker`` has ended its period, and so that the site makes no round after its last one."""
        return [*super().stop(worker, period=period, last_round=last_round), *self._pass_stop_on()]

    def _complete(self, contributions: tuple[Push, ...]) -> list[ServerInstruction]:
        if self._is_sending or self._is_out:
            return []
        self._is_sending = self._is_out = True
        push = Push(
            worker=self._rank,
            period=self.period,
            round_number=self.closed + 1,
            iteration=min(one.iteration for one in contributions),
            weight=sum(one.weight for one in contributions),
        )
        return [Forward(push=push, contributions=contributions)]

    def _drop_held(self) -> None:
        if self._is_out:
            self._held.clear()
        super()._drop_held()

    def _begin_period(self, period: int) -> list[ServerInstruction]:
        begun = super()._begin_period(period)
        self._is_out = self._has_stopped = False
        return begun

    def _pass_stop_on(self) -> list[ServerInstruction]:
        """Tell the server once, when the last round that the site may push for is closed.

        Not before: to who has stopped it sends no sums, and others of the site wait for that round's.
        """
        last_rounds = [account.final_round for account in self._accounts.values() if account.final_round is not None]
        if self._has_stopped or min(last_rounds, default=self.closed + 1) > self.closed:
            return []
        self._has_stopped = True
        return [Stop(period=self.period, last_round=min(last_rounds))]
