"""Agreements of several ranks in one process: messages in any order, deaths, cuts, ranks that rest late."""

from __future__ import annotations

import random
from collections import deque

from syncline.members import Epoch
from syncline.members.agreement import Agreement, Effect, Go, Interrupt, Report, Stop, Tell


class World:
    """Ranks that agree; what happens next is drawn from ``seed``."""

    def __init__(self, num_ranks: int, seed: int, *, min_ranks: int = 1) -> None:
        self.random = random.Random(seed)
        first = Epoch(number=0, members=tuple(range(num_ranks)))
        self.machines = [Agreement(rank=rank, epoch=first, min_ranks=min_ranks) for rank in range(num_ranks)]
        self.epochs = [first] * num_ranks
        self.dead: set[int] = set()
        self.stopped: dict[int, Exception] = {}
        self.must_rest: set[int] = set()
        self.links: dict[tuple[int, int], deque[Report]] = {}
        self.losses: list[tuple[int, int]] = []
        """Who will find whom lost, some time."""
        self.gone: set[tuple[int, int]] = set()
        """Links that are broken; what is on the way in them is lost."""
        self.agreed: dict[int, set[tuple[int, ...]]] = {}

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(len(self.machines)) if rank not in self.dead]

    @property
    def going_on(self) -> list[int]:
        return [rank for rank in self.living if rank not in self.stopped]

    def kill(self, rank: int) -> None:
        """Let a rank die; what it has sent may still arrive, and each other finds out when it does."""
        if rank in self.dead:
            return
        self.dead.add(rank)
        for other in self.living:
            self.losses.append((other, rank))

    def cut(self, one: int, other: int) -> None:
        """Break a connection."""
        if one == other or (one, other) in self.gone:
            return
        self.gone |= {(one, other), (other, one)}
        self.losses += [(one, other), (other, one)]

    def find(self, rank: int, peer: int) -> None:
        """Let a rank find another lost: nothing comes from it any more."""
        self.links.pop((peer, rank), None)
        self.gone |= {(peer, rank)}
        if rank not in self.dead:
            self.do(rank, self.machines[rank].lose(peer))
            self.must_rest.add(rank)

    def do(self, rank: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                for peer in effect.peers:
                    if (rank, peer) not in self.gone:
                        self.links.setdefault((rank, peer), deque()).append(effect.report)
            elif isinstance(effect, Interrupt):
                self.must_rest.add(rank)
            elif isinstance(effect, Go):
                self.epochs[rank] = effect.epoch
                self.agreed.setdefault(effect.epoch.number, set()).add(effect.epoch.members)
            else:
                assert isinstance(effect, Stop)
                self.stopped[rank] = effect.error

    def step(self) -> bool:
        """Do one thing that can happen; False if nothing can."""
        rests = [rank for rank in self.must_rest if rank not in self.dead and rank not in self.stopped]
        ready = [("rest", rank) for rank in sorted(rests)]
        ready += [("lose", place) for place in range(len(self.losses))]
        ready += [("deliver", link) for link, queue in sorted(self.links.items()) if queue]
        if not ready:
            return False
        what, which = self.random.choice(ready)
        if what == "rest":
            self.must_rest.discard(which)
            if not self.machines[which].is_resting:
                self.do(which, self.machines[which].rest(first_free=10 + which))
        elif what == "lose":
            self.find(*self.losses.pop(which))
        else:
            source, target = which
            report = self.links[which].popleft()
            if target not in self.dead and target not in self.stopped and which not in self.gone:
                self.do(target, self.machines[target].hear(source, report))
        return True

    def settle(self) -> None:
        """Let everything happen that can; ranks whose epoch has a member that stopped find that out, as in a call."""
        for _ in range(3 * len(self.machines)):
            while self.step():
                pass
            for rank in self.going_on:
                waits_for = {*self.epochs[rank].members} & {*self.stopped} - {*self.machines[rank].losses}
                for peer in sorted(waits_for):  # it closes its fleet, so that others lose it
                    self.losses.append((rank, peer))
                if self.machines[rank].is_resting and not waits_for:
                    machine = self.machines[rank]
                    self.do(rank, machine.expire() or machine.expire())  # the first time it may wait once more
            if not (self.losses or self.must_rest.intersection(self.going_on) or any(self.links.values())):
                return
