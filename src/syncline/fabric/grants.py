"""Who may send next: the receiver's grants, and the credit for what is sent without asking.

A large message waits at its sender until its receiver grants it. The receiver grants by (urgency, arrival) *across all
senders* and keeps no more than a window of granted bytes under way, so that

- two senders that converge on one rank are ordered by urgency even where no switch honours priorities, and the queues
  in the switches stay short (receiver-driven transport, as in Homa, SIGCOMM 2018);
- nothing arrives for which no destination is known.

An urgent message finds room in the window although less urgent ones fill it: a switch that honours priorities lets it
overtake them, and any other serves it right after them. What is less urgent is not granted before most of it is here:
sent any earlier, the last part of the urgent message would share the link with it.

A window alone would let a few slow senders hold all of it while fast ones idle. So a sender that has nothing under way
gets one quantum more, up to twice the window, unless something more urgent is under way; and one sender's share has its
own limit.

A receiver sees only its own link, but where several receivers draw over one slow link, their windows add up in the
queue in front of it. So each holds to its *share* of such a link, over all senders behind it (see
:mod:`syncline.fabric.link_share`): then that queue does not overflow, whatever TCP makes of it. Among equally urgent
messages those with the smallest share go first: a slow link that idles for a moment is never made up for, and what it
carries hardly delays the others.

Everything here is pure: events in, grants out.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from syncline.fabric.grant_window import GrantLog, GrantWindow
from syncline.fabric.link_share import LinkShare


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """``peer`` may send its message ``tag`` up to byte ``limit_bytes``."""

    peer: int
    tag: int
    limit_bytes: int


@dataclass(slots=True, kw_only=True)
class _Wish:
    """A message that was announced and whose receive is posted."""

    tag: int
    num_bytes: int
    urgency: int
    order: int
    granted_bytes: int = 0
    is_forgotten: bool = False

    def __lt__(self, other: _Wish) -> bool:
        return (self.urgency, self.order) < (other.urgency, other.order)


@dataclass(slots=True, kw_only=True)
class _Sender:
    """What one peer wishes to send, and how much of it is under way."""

    limit_bytes: int
    shares: Sequence[LinkShare] = ()
    wishes: list[_Wish] = field(default_factory=list)
    by_tag: dict[int, _Wish] = field(default_factory=dict)
    underway_bytes: int = 0
    underway_by_urgency: Counter[int] = field(default_factory=Counter)
    log: GrantLog | None = None
    """When grants were given, if the window learns from them."""
    ready_order: int = 0
    """Which wish was last offered in the heap of ready senders; 0 if none is in it."""
    idle_order: int = 0

    @property
    def room_bytes(self) -> float:
        """The smallest share on the sender's route."""
        return min((share.part_bytes for share in self.shares), default=math.inf)

    def best(self) -> _Wish | None:
        """Return the most urgent wish that is not wholly granted."""
        while self.wishes and self.wishes[0].is_forgotten:
            heapq.heappop(self.wishes)
        return self.wishes[0] if self.wishes else None


_Ticket = tuple[int, float, int, int]
"""Urgency, room, order of the wish, peer."""


class GrantScheduler:
    """Orders the grants of one rank.

    ``window`` bounds what is granted and has not arrived, but for one quantum and for the allowance to what is more
    urgent and to idle senders, twice the window in all (see the module); ``sender_bytes`` does so for single senders,
    and ``shares`` for the slow links that a sender's route crosses (the same object for all senders behind one link). A
    grant is for ``quantum_bytes`` at most, or a quarter of a window that grows. Each call costs O(log n) in the number
    of waiting messages.
    """

    def __init__(
        self,
        *,
        window: GrantWindow,
        quantum_bytes: int,
        sender_bytes: Mapping[int, int] | None = None,
        shares: Mapping[int, Sequence[LinkShare]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window = window
        self._least_quantum_bytes = quantum_bytes
        self._sender_bytes = dict(sender_bytes or {})
        self._shares = dict(shares or {})
        self._now = now
        self._senders: dict[int, _Sender] = {}
        # One heap each for senders below their limit and for senders with nothing under way.
        # Entries are not removed when they no longer hold: they are checked when they surface.
        self._ready: list[_Ticket] = []
        self._idle: list[_Ticket] = []
        self._underway_by_urgency: Counter[int] = Counter()
        self._order = 0
        self.underway_bytes = 0

    def __repr__(self) -> str:
        waiting = sum(len(sender.by_tag) for sender in self._senders.values())
        return f"<GrantScheduler: {self.underway_bytes} of {self.window_bytes} bytes under way, {waiting} messages>"

    def resize(self, *, window: GrantWindow, quantum_bytes: int, sender_bytes: Mapping[int, int]) -> None:
        """Grant with these sizes from now on; what is under way stays so, and teaches the new window nothing."""
        self._window, self._least_quantum_bytes = window, quantum_bytes
        self._sender_bytes = dict(sender_bytes)
        for peer, sender in self._senders.items():
            sender.limit_bytes = self._limit_of(peer)
            sender.log = self._log_for(sender.limit_bytes, underway_bytes=sender.underway_bytes)
            self._offer(peer, sender)

    @property
    def window_bytes(self) -> int:
        """How much may be under way, now."""
        return self._window.num_bytes

    @property
    def quantum_bytes(self) -> int:
        """How much one grant is for at most, now."""
        least_bytes = self._least_quantum_bytes
        return least_bytes if self._window.is_fixed else max(least_bytes, self._window.num_bytes // 4)

    @property
    def has_wishes(self) -> bool:
        """Whether some message may be waiting for a grant."""
        return bool(self._ready)

    def shares_of(self, peer: int) -> Sequence[LinkShare]:
        """Return this rank's shares of the slow links on the route from ``peer``."""
        return self._shares.get(peer, ())

    def wish(self, peer: int, tag: int, *, num_bytes: int, urgency: int) -> None:
        """Take note that ``peer`` has a message for which a receive is posted."""
        assert num_bytes > 0, "an empty message needs no grant"
        sender = self._senders.get(peer)
        if sender is None:
            limit = self._limit_of(peer)
            sender = _Sender(limit_bytes=limit, shares=self.shares_of(peer), log=self._log_for(limit))
            self._senders[peer] = sender
        assert tag not in sender.by_tag, f"message {tag:#x} of rank {peer} wishes twice"
        self._order += 1
        wish = _Wish(tag=tag, num_bytes=num_bytes, urgency=urgency, order=self._order)
        sender.by_tag[tag] = wish
        heapq.heappush(sender.wishes, wish)
        if sender.best() is wish:
            self._offer(peer, sender)

    def arrived(self, peer: int, *, num_bytes: int, urgency: int) -> None:
        """Take note that granted bytes of a message of ``urgency`` are here."""
        sender = self._senders[peer]
        sender.underway_bytes -= num_bytes
        self.underway_bytes -= num_bytes
        sender.underway_by_urgency[urgency] -= num_bytes
        if not sender.underway_by_urgency[urgency]:
            del sender.underway_by_urgency[urgency]
        self._count_arrival(urgency, num_bytes)
        if sender.log is not None:
            sender.log.arrived(num_bytes, self._window, now_s=self._now())
        if sender.shares:
            now_s = self._now()
            for share in sender.shares:
                share.arrived(num_bytes, now_s)
            self._offer_waiting(sender)
        assert sender.underway_bytes >= 0, f"rank {peer} sent more than it was granted"
        if sender.wishes:
            self._offer(peer, sender)

    def lost(self, peer: int, num_segments: int) -> None:
        """Take note that ``peer`` had to send segments again that were granted."""
        for share in self.shares_of(peer):
            share.lost(num_segments)

    def forget(self, peer: int, tag: int) -> None:
        """Grant nothing more of this message; what was granted is still expected."""
        sender = self._senders.get(peer)
        wish = sender.by_tag.pop(tag, None) if sender else None
        if sender is None or wish is None:
            return
        wish.is_forgotten = True
        if sender.best() is not None:
            self._offer(peer, sender)

    def forget_peer(self, peer: int, *, underway: Mapping[int, int]) -> None:
        """Expect nothing more of ``peer``; ``underway`` is what it was granted and did not send, by urgency."""
        sender = self._senders.pop(peer, None)
        if sender is None:
            return
        self.underway_bytes -= sender.underway_bytes
        for share in sender.shares:
            share.forgotten(sender.underway_bytes)
        self._offer_waiting(sender)
        for urgency, num_bytes in underway.items():
            self._count_arrival(urgency, num_bytes)

    def grants(self) -> list[Grant]:
        """Return what may be sent now, most urgent first."""
        found: list[Grant] = []
        while self.underway_bytes < 2 * self.window_bytes:
            chosen = self._pop(self._ready, needs_idle=False)
            if chosen is None:
                return found
            peer, sender, wish = chosen
            if not self._is_its_turn(wish.urgency):
                self._offer(peer, sender)
                break
            found.append(self._grant(peer, sender, wish))
        while self.underway_bytes < 2 * self.window_bytes:
            chosen = self._pop(self._idle, needs_idle=True)
            if chosen is None:
                break
            peer, sender, wish = chosen
            if self._is_anything_more_urgent_underway(wish.urgency):
                self._offer(peer, sender)
                break
            found.append(self._grant(peer, sender, wish))
        return found

    def _grant(self, peer: int, sender: _Sender, wish: _Wish) -> Grant:
        amount = min(wish.num_bytes - wish.granted_bytes, self.quantum_bytes, sender.limit_bytes)
        for share in sender.shares:
            amount = min(amount, share.quantum_bytes(wish.urgency))
        if sender.shares:
            now_s = self._now()
            for share in sender.shares:
                share.granted(amount, now_s)
        wish.granted_bytes += amount
        sender.underway_bytes += amount
        self.underway_bytes += amount
        if sender.log is not None:
            sender.log.granted(amount, underway_bytes=self.underway_bytes, now_s=self._now())
        sender.underway_by_urgency[wish.urgency] += amount
        self._underway_by_urgency[wish.urgency] += amount
        if wish.granted_bytes == wish.num_bytes:
            heapq.heappop(sender.wishes)
            del sender.by_tag[wish.tag]
        if sender.wishes:
            self._offer(peer, sender)
        return Grant(peer=peer, tag=wish.tag, limit_bytes=wish.granted_bytes)

    def _limit_of(self, peer: int) -> int:
        return max(self._sender_bytes.get(peer, self._window.most_bytes), 1)

    def _log_for(self, limit_bytes: int, *, underway_bytes: int = 0) -> GrantLog | None:
        """Return a log for a sender that the window learns from: on a slower route it says nothing of this link."""
        if self._window.is_fixed or limit_bytes < self._window.most_bytes:
            return None
        return GrantLog(underway_bytes=underway_bytes)

    def _offer(self, peer: int, sender: _Sender) -> None:
        """Put the sender's best wish where it may be chosen."""
        wish = sender.best()
        if wish is None:
            return
        ticket = (wish.urgency, sender.room_bytes, wish.order, peer)
        if sender.underway_bytes < sender.limit_bytes and sender.ready_order != wish.order:
            sender.ready_order = wish.order
            heapq.heappush(self._ready, ticket)
        if not sender.underway_bytes and sender.idle_order != wish.order:
            sender.idle_order = wish.order
            heapq.heappush(self._idle, ticket)

    def _pop(self, heap: list[_Ticket], *, needs_idle: bool) -> tuple[int, _Sender, _Wish] | None:
        while heap:
            _, _, order, peer = heapq.heappop(heap)
            sender = self._senders.get(peer)
            if sender is None:
                continue
            if needs_idle and sender.idle_order == order:
                sender.idle_order = 0
            elif not needs_idle and sender.ready_order == order:
                sender.ready_order = 0
            wish = sender.best()
            if wish is None or wish.order != order:
                continue
            if sender.underway_bytes and (needs_idle or sender.underway_bytes >= sender.limit_bytes):
                continue
            used_up = next((share for share in sender.shares if share.is_used_up), None)
            if used_up is None:
                return peer, sender, wish
            used_up.waiting.add(peer)
        return None

    def _offer_waiting(self, sender: _Sender) -> None:
        """Let those wait no longer who were passed over for want of what is free again."""
        for share in sender.shares:
            if not share.waiting or share.is_used_up:
                continue
            waiting, share.waiting = share.waiting, set()
            for peer in sorted(waiting):
                if peer in self._senders:
                    self._offer(peer, self._senders[peer])

    def _count_arrival(self, urgency: int, num_bytes: int) -> None:
        self._underway_by_urgency[urgency] -= num_bytes
        if not self._underway_by_urgency[urgency]:
            del self._underway_by_urgency[urgency]

    def _is_its_turn(self, urgency: int) -> bool:
        """Whether a message has room in the window: less urgent ones do not take it, and more urgent ones go alone."""
        ahead = sum(num_bytes for other, num_bytes in self._underway_by_urgency.items() if other < urgency)
        if ahead + self._underway_by_urgency.get(urgency, 0) >= self.window_bytes:
            return False
        most = self.window_bytes // 4
        return ahead <= most or self._weighted_ahead(urgency) <= most

    def _weighted_ahead(self, urgency: int) -> int:
        """Return the more urgent bytes under way; those on a slow route fill as much less of the link to this rank."""
        ahead = 0
        for sender in self._senders.values():
            urgent = sum(num_bytes for other, num_bytes in sender.underway_by_urgency.items() if other < urgency)
            ahead += urgent * min(sender.limit_bytes, self.window_bytes) // self.window_bytes
        return ahead

    def _is_anything_more_urgent_underway(self, urgency: int) -> bool:
        return min(self._underway_by_urgency, default=urgency) < urgency


class EagerCredit:
    """The receiver's account of what one peer may send without asking.

    A message costs its bytes and a header, so that empty messages have a bound too. What was consumed is given back
    in batches of a quarter, so that credit costs few frames.
    """

    def __init__(self, credit_bytes: int) -> None:
        self.credit_bytes = credit_bytes
        self.used_bytes = 0
        self._owed_bytes = 0

    def take(self, cost_bytes: int) -> bool:
        """Charge an arriving message; False if the peer had no credit for it."""
        self.used_bytes += cost_bytes
        return self.used_bytes <= self.credit_bytes

    def consume(self, cost_bytes: int) -> int:
        """Note that a charged message is out of the way; return the bytes to give back now, or 0."""
        self._owed_bytes += cost_bytes
        if self._owed_bytes * 4 < self.credit_bytes:
            return 0
        returned, self._owed_bytes = self._owed_bytes, 0
        self.used_bytes -= returned
        return returned
