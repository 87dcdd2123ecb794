"""The grants of one receiver on virtual time: senders at different rates, cancelled messages, senders that are lost.

What is under way never exceeds twice the window, every message that is not cancelled arrives whole, and in the end
nothing is under way: no credit leaks, and none is made.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from virtual_time import SimulationError, VirtualTime

from syncline.fabric._native import EagerCredit, GrantScheduler
from syncline.fabric.sizing import GrantWindow

DELAY_S = 0.001


@dataclass(slots=True)
class Message:
    """One message at its sender."""

    tag: int
    num_bytes: int
    urgency: int
    granted_bytes: int = 0
    sent_bytes: int = 0
    arrived_bytes: int = 0
    is_cancelled: bool = False


class GrantScenario:
    """One seed of it."""

    def __init__(self, seed: int, *, num_ranks: int = 0) -> None:
        choose = self.choose = random.Random(f"grants {seed}")
        self.time = VirtualTime(f"grants time {seed}")
        most_bytes = choose.choice((1000, 20_000, 100_000))
        least_bytes = choose.choice((most_bytes, most_bytes // 4))
        self.bytes_per_s = choose.choice((1e6, 1e8))
        window = GrantWindow(most_bytes=most_bytes, least_bytes=least_bytes, bytes_per_s=self.bytes_per_s)
        self.scheduler = GrantScheduler(window=window, quantum_bytes=max(1, most_bytes // 5))
        self.most_bytes = most_bytes
        self.senders = {peer: self._messages(peer) for peer in range(num_ranks or choose.randint(1, 6))}
        self.rates = {peer: self.bytes_per_s * choose.choice((1.0, 0.3, 0.01)) for peer in self.senders}
        self.queues: dict[int, deque[tuple[Message, int]]] = {peer: deque() for peer in self.senders}
        self.lost: set[int] = set()

    def _messages(self, peer: int) -> dict[int, Message]:
        choose = self.choose
        sizes = [choose.randint(1, choose.choice((100, 5000, 60_000))) for _ in range(choose.randint(1, 12))]
        return {
            100 * peer + place: Message(tag=100 * peer + place, num_bytes=size, urgency=choose.randrange(4))
            for place, size in enumerate(sizes)
        }

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        for peer, messages in self.senders.items():
            for message in messages.values():
                self.time.at(self.choose.choice((0.0, self.choose.random() * 0.1)), self._wish, peer, message)
                if self.choose.random() < 0.1:
                    self.time.at(self.choose.random() * 0.1, self._cancel, peer, message)
            if self.choose.random() < 0.1:
                self.time.at(self.choose.random() * 0.1, self._lose, peer)
        self.time.run(lambda: False, limit_s=1e6)
        self._check_end()
        self._check_credit()
        return self.time

    def _wish(self, peer: int, message: Message) -> None:
        if peer in self.lost or message.is_cancelled:
            return
        self.scheduler.wish(peer, message.tag, num_bytes=message.num_bytes, urgency=message.urgency)
        self._grant()

    def _grant(self) -> None:
        for peer, tag, limit_bytes in self.scheduler.grants(now_s=self.time.now_s):
            self.time.note(f"rank {peer} may send {tag} up to {limit_bytes}")
            message = self.senders[peer][tag]
            if not message.granted_bytes < limit_bytes <= message.num_bytes:
                raise SimulationError(f"a grant up to {limit_bytes} of {message}")
            message.granted_bytes = limit_bytes
            self.time.after(DELAY_S, self._send, peer, message, limit_bytes)
        if self.scheduler.underway_bytes > 2 * self.most_bytes + max(1, self.most_bytes // 4):
            raise SimulationError(f"{self._underway} is more than twice the window of {self.most_bytes}")

    @property
    def _underway(self) -> str:
        return f"{self.scheduler.underway_bytes} bytes under way"

    def _send(self, peer: int, message: Message, limit_bytes: int) -> None:
        if peer in self.lost:
            return
        queue = self.queues[peer]
        queue.append((message, limit_bytes - message.sent_bytes))
        message.sent_bytes = limit_bytes
        if len(queue) == 1:
            self._move(peer)

    def _move(self, peer: int) -> None:
        _, num_bytes = self.queues[peer][0]
        self.time.after(DELAY_S + num_bytes / self.rates[peer], self._arrive, peer)

    def _arrive(self, peer: int) -> None:
        if peer in self.lost:
            return
        message, num_bytes = self.queues[peer].popleft()
        message.arrived_bytes += num_bytes
        self.scheduler.arrived(peer, num_bytes=num_bytes, urgency=message.urgency, now_s=self.time.now_s)
        self._grant()
        if self.queues[peer]:
            self._move(peer)

    def _cancel(self, peer: int, message: Message) -> None:
        message.is_cancelled = True
        if peer not in self.lost:
            self.scheduler.forget(peer, message.tag)
            self._grant()

    def _lose(self, peer: int) -> None:
        self.lost.add(peer)
        underway: dict[int, int] = {}
        for message in self.senders[peer].values():
            rest = message.granted_bytes - message.arrived_bytes
            if rest:
                underway[message.urgency] = underway.get(message.urgency, 0) + rest
        self.scheduler.forget_peer(peer, underway=underway)
        self._grant()

    def _check_end(self) -> None:
        if self.scheduler.underway_bytes:
            raise SimulationError(f"{self._underway} are of what will not come")
        for peer, messages in self.senders.items():
            for message in messages.values():
                wanted = message.granted_bytes if message.is_cancelled else message.num_bytes
                if peer not in self.lost and message.arrived_bytes != wanted:
                    raise SimulationError(f"of {message} of rank {peer} not all came")

    def _check_credit(self) -> None:
        """What a sender may send unasked: taken and given back in any order, it is never more or less."""
        credit, may_send, held = EagerCredit(10_000), 10_000, deque[int]()
        for _ in range(200):
            cost = self.time.random.randint(1, 3000)
            if self.time.random.random() < 0.6 and cost <= may_send:
                may_send -= cost
                if not credit.take(cost):
                    raise SimulationError(f"a message of {cost} bytes had credit, and was refused")
                held.append(cost)
            elif held:
                may_send += credit.consume(held.popleft())
            if may_send + credit.used_bytes != credit.credit_bytes:
                raise SimulationError(
                    f"of {credit.credit_bytes} bytes of credit {may_send + credit.used_bytes} are left"
                )
        while held:
            may_send += credit.consume(held.popleft())
        if may_send * 4 < 3 * credit.credit_bytes:
            raise SimulationError(f"of {credit.credit_bytes} bytes of credit only {may_send} came back")


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return GrantScenario(seed).run()
