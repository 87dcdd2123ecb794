"""A fleet in sites, as :class:`Fleet` is one: a relay stands between the workers of a site and the server.

The server is in the first site. Periods end elsewhere, as on the planner's tree: a worker says that it has stopped, and
begins the next period once all have. What was fed in a period starts anew with it.
"""

from __future__ import annotations

from collections import Counter, deque

from overlapped_fleet import Fleet, FleetWorker, clone_shard, twin

from syncline.updates.overlapped.relay import RelayShard
from syncline.updates.overlapped.server import Clear, Fold, Forward, Push, Reply, ServerShard, Stop, Take


class Relay:
    def __init__(self, site: tuple[int, ...]) -> None:
        self.site, self.rank = site, site[-1]
        self.machine = RelayShard(rank=self.rank, workers=site)
        self.cumulative = 0
        self.up: deque[Push] = deque()
        self.down: tuple[Reply, int] | None = None
        self.notes: tuple[Stop, ...] = ()


class SiteFleet(Fleet):
    """``may_stop`` are the ranks that may end a period before its last iteration."""

    def __init__(self, sites, num_iterations, *, may_stop=(), num_periods=1, **options):
        num_workers = sum(map(len, sites))
        super().__init__(num_workers, num_iterations, num_workers, end=True, **options)
        self.sites, self.may_stop, self.num_periods, self.period = sites, may_stop, num_periods, 0
        self.relays = [Relay(site) for site in sites[1:] if len(site) > 1]
        self.relay_index = {rank: index for index, relay in enumerate(self.relays) for rank in relay.site}
        self.by_rank = {relay.rank: index for index, relay in enumerate(self.relays)}
        direct = [rank for rank in range(num_workers) if rank not in self.relay_index]
        peers = [*direct, *self.by_rank]
        self.shard = ServerShard(workers=peers, quorum=len(peers), ends_elsewhere=True, shrinks=True)
        self.num_pushed, self.num_folded = Counter(), Counter()
        for worker in self.workers:
            worker.notes, worker.early, worker.period = (), None, 0

    def host_of(self, rank):
        index = self.relay_index.get(rank)
        return self.shard if index is None else self.relays[index].machine

    def dropped(self, rank: int) -> int:
        """How many pushes of a worker were dropped, or lie somewhere still."""
        index = self.relay_index.get(rank)
        at_server = rank if index is None else self.relays[index].rank
        found = self.shard.dropped[at_server] + (at_server in self.shard._held)
        if index is not None:
            machine = self.relays[index].machine
            found += machine.dropped[rank] + (rank in machine._held and not machine._is_out)
        return found

    # --- what may happen -----------------------------------------------------------------------------------------

    def choices(self):
        found = super().choices()
        all_ended = all(worker.has_ended and worker.period == self.period for worker in self.workers)
        for worker in self.workers:
            if worker.notes:
                found.append(("note", worker.rank))
            may_stop = worker.rank in self.may_stop and worker.clock.num_steps and not worker.is_waiting
            if may_stop and not worker.has_ended:
                found.append(("end", worker.rank))
            is_behind = worker.period < self.period or (all_ended and self.period + 1 < self.num_periods)
            if worker.has_ended and is_behind:
                found.append(("begin", worker.rank))
        for index, relay in enumerate(self.relays):
            found += [("relay_up", index)] if relay.up else []
            found += [("relay_down", index)] if relay.down else []
            found += [("relay_note", index)] if relay.notes else []
        return found

    def do(self, kind, rank):
        owner = self.relays[rank] if kind.startswith("relay") else self.workers[rank]
        getattr(self, f"_{kind}")(owner)

    def _send(self, worker, send):
        self.num_pushed[worker.rank] += 1
        super()._send(worker, send)

    def _end(self, worker):
        worker.has_ended = True
        worker.notes = (*worker.notes, Stop(period=worker.period, last_round=worker.machine.last_round))

    def _begin(self, worker: FleetWorker) -> None:
        if worker.period == self.period:
            self.period += 1
            self.runs, self.closings = {}, {}
        worker.period += 1
        worker.machine.end_period()
        worker.clock.begin_period()
        worker.fed = worker.own = worker.base = worker.newest = 0
        worker.has_ended = False
        early, worker.early = worker.early, None
        if early is not None and worker.machine.arrived(early[0]):
            worker.newest = early[1]

    def _note(self, worker):
        note, *rest = worker.notes
        worker.notes = tuple(rest)
        machine = self.host_of(worker.rank)
        self.tell(worker.rank, machine.stop(worker.rank, period=note.period, last_round=note.last_round))

    def _down(self, worker):
        reply, value = worker.down
        worker.down = None
        if reply.period == worker.machine.period + 1:
            worker.early = (reply, value)
        elif not worker.has_ended and worker.machine.arrived(reply):
            worker.newest = value
            self._wake(worker)
        self.tell(worker.rank, self.host_of(worker.rank).replied(worker.rank))

    def hand_in(self, message):
        self.tell(message.worker, self.host_of(message.worker).hear(message))

    def _relay_up(self, relay):
        self.obey(self.shard.hear(relay.up.popleft()))
        if not self.is_prompt:
            self.obey_relay(relay, relay.machine.sent())

    def _relay_down(self, relay):
        reply, value = relay.down
        relay.down = None
        self.obey_relay(relay, relay.machine.answer(reply, value))
        self.obey(self.shard.replied(relay.rank))

    def _relay_note(self, relay):
        note, *rest = relay.notes
        relay.notes = tuple(rest)
        self.obey(self.shard.stop(relay.rank, period=note.period, last_round=note.last_round))

    # --- the drivers ---------------------------------------------------------------------------------------------

    def tell(self, rank, instructions):
        """Obey what the machine says that ``rank`` pushes to."""
        index = self.relay_index.get(rank)
        if index is None:
            self.obey(instructions)
        else:
            self.obey_relay(self.relays[index], instructions)

    def _obey(self, instruction):
        match instruction:
            case Clear():
                self.cumulative = 0
            case Fold(round_number=round_number, contributions=contributions):
                self.cumulative += self._mean(contributions)
                ranks = [rank for one in contributions for rank in self._stands_for(one.worker)]
                self.num_folded.update(ranks)
                if self.shard.period == self.period:
                    self.closings[round_number] = tuple(sorted(ranks))
            case Reply(worker=worker) if worker in self.by_rank:
                relay = self.relays[self.by_rank[worker]]
                assert relay.down is None, "two replies at once"
                relay.down = (instruction, self.cumulative)
            case _:
                super()._obey(instruction)

    def _stands_for(self, worker):
        return self.relays[self.by_rank[worker]].site if worker in self.by_rank else (worker,)

    def obey_relay(self, relay, instructions):
        for instruction in instructions:
            match instruction:
                case Clear():
                    relay.cumulative = 0
                case Take(payload=payload):
                    relay.cumulative = payload
                case Stop():
                    relay.notes = (*relay.notes, instruction)
                case Forward(push=push, contributions=contributions):
                    assert [one.worker for one in contributions] == sorted(relay.site)
                    assert not relay.up or self.is_prompt, "the next push waits until the last one has left"
                    mean = self._mean(contributions)
                    assert push.weight == sum(one.weight for one in contributions)
                    relay.up.append(twin_push(push, mean))
                    if self.is_prompt:
                        self.obey_relay(relay, relay.machine.sent())
                case Reply(worker=worker):
                    assert self.workers[worker].down is None, "two replies at once"
                    self.workers[worker].down = (instruction, relay.cumulative)
                case _:
                    raise AssertionError(instruction)

    # --- states --------------------------------------------------------------------------------------------------

    def _clone(self, rank):
        other = super()._clone(rank)
        other.relays = [twin(relay) for relay in self.relays]
        for relay in other.relays:
            relay.up, relay.machine = relay.up.copy(), clone_shard(relay.machine)
        other.num_pushed, other.num_folded = Counter(), Counter()
        return other

    def key(self):
        workers = [tuple(sorted(self._worker_key(self.workers[rank]) for rank in site)) for site in self.sites]
        relays = [self._relay_key(relay) for relay in self.relays]
        return (self.period, self.shard.period, self.shard.closed, self.shard.clock, *workers, *relays)

    def _worker_key(self, worker):
        account = self.host_of(worker.rank)._accounts[worker.rank]
        early = (worker.early[0].closed,) if worker.early else ()
        last = -1 if account.final_round is None else account.final_round
        stopped = (worker.rank in self.may_stop, worker.has_ended, worker.notes != (), last)
        periods = (worker.period, *(one.period for one in worker.up), worker.down[0].period if worker.down else -1)
        return (*super()._worker_key(worker), worker.machine.last_round, early, *stopped, periods)

    def _relay_key(self, relay):
        machine, account = relay.machine, self.shard._accounts[relay.rank]
        down = relay.down[0] if relay.down else None
        return (
            (machine.period, machine.closed, machine.clock, machine._is_sending, machine._is_out, machine._has_stopped),
            tuple((push.period, push.round_number, push.iteration) for push in relay.up),
            (down.period, down.closed, down.clock, down.accepted) if down else (),
            tuple((note.period, note.last_round) for note in relay.notes),
            (account.told, account.is_busy, account.final_round, account.accepted),
            self.shard._held[relay.rank].iteration if relay.rank in self.shard._held else 0,
        )


def twin_push(push: Push, payload: int) -> Push:
    return Push(
        worker=push.worker,
        period=push.period,
        round_number=push.round_number,
        iteration=push.iteration,
        weight=push.weight,
        payload=payload,
    )
