"""The link of one bucket between a worker and its server shard: what travels, the sums of both ends, and the ends.

    Push, End, Hello       worker to server: the bucket in its own number type
    Reply, ReplyAverage    server to worker: the bucket in the type in which gradients are summed

Between workers of a site and the server a relay has both ends: it is a server to the ones, a worker to the other.

They are what one state machine says and the other is told, as records in a head of fixed size, with the bucket behind
it. Messages of one direction have one size, whatever they say, so that a receive can be posted before it is known what
will come.

:class:`HostedShard` is on the loop's thread alone. Its memory: for each worker one push, the message that comes
next and one reply; one cumulative sum, and the average of a period's end. A relay has a push to send in its place, and
room for the server's next answer.

Of :class:`WorkerLink` the training thread calls ``step``, ``use``, ``hurry`` and the methods about the end of a period;
the methods named ``on_*`` and ``move`` run on the loop's thread. The lock of ``changed`` guards what both see; sums are
made outside it, on memory that only the training thread has at that moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch

from syncline.fabric import BULK
from syncline.observe import Trace
from syncline.runtime.port import Port
from syncline.runtime.worker_thread import WorkerThread
from syncline.tensors.device_copies import CopyKind, HostCopier, Mark, copy_beside
from syncline.tensors.memory import aligned, bytes_of
from syncline.updates.flat import shares, sum_dtype, weighted_sum
from syncline.updates.messaging import MessageStream, decode_record, encode_record
from syncline.updates.overlapped.placement import ServerLayout
from syncline.updates.overlapped.rebase import Collect
from syncline.updates.overlapped.relay import RelayShard
from syncline.updates.overlapped.server import (
    Average,
    Clear,
    End,
    Fold,
    Forward,
    Hello,
    Push,
    Reply,
    ReplyAverage,
    ServerInstruction,
    ServerShard,
    Stop,
    Take,
)
from syncline.updates.overlapped.worker import BucketWorker, Keep, Send, Use

Told = Push | End | Hello | Reply | ReplyAverage
HEAD_BYTES, RANK_BYTES = 256, 18
"""Room for the text of a record, and for each rank: how many of its pushes were dropped, and that it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """To a server or a relay: this rank ended ``period``, which is averaged elsewhere."""

    period: int
    last_rounds: tuple[tuple[int, int], ...]
    """Of each bucket there (by number), the last round that it pushed for."""


UP, DOWN = range(2)
"""Kinds of messages on a bucket's stream: to its server, and from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """One bucket, as its messages have it, and where they go at first; equal on every rank."""

    index: int
    stream: int
    """Its messages' tags belong to this stream."""
    connection_class: int
    num_elements: int
    dtype: torch.dtype
    world_size: int
    server: int
    relay_of: Mapping[int, int]
    """Of each rank that pushes to a relay in place of the server, that."""

    def open_messages(self, port: Port, *, epoch: int) -> MessageStream:
        """Return the bucket's messages, after those of collectives; ``epoch`` counts the servers that it has had.

        What a server sent before it left is received after that too: the last averages come so.
        """
        return MessageStream(
            port,
            self.stream,
            urgency=BULK + self.index,
            connection_class=self.connection_class,
            epoch=epoch,
            even_if_lost=True,
        )

    def make_up(self, copier: HostCopier | None = None) -> Message:
        """Return room for a message from a worker."""
        return Message(self, self.dtype, copier)

    def make_down(self, copier: HostCopier | None = None) -> Message:
        """Return room for a message from the server."""
        return Message(self, sum_dtype(self.dtype), copier)


class Message:
    """A record and a bucket, one after another in memory: of the host, from which ``copier`` copies by itself."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, copier: HostCopier | None) -> None:
        self._num_elements = layout.num_elements
        self._head_bytes = aligned(HEAD_BYTES + RANK_BYTES * layout.world_size)
        num_bytes = self._head_bytes + layout.num_elements * dtype.itemsize
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8) if copier is None else copier.allocate_host(num_bytes)
        self.memory = bytes_of(self._bytes)
        self.values = self.values_as(dtype)

    def values_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the bucket's elements as ``dtype``, which must not be larger than the one it was made for."""
        stop = self._head_bytes + self._num_elements * dtype.itemsize
        return self._bytes[self._head_bytes : stop].view(dtype)

    def write(self, record: Told) -> None:
        """Let ``record`` be what it says."""
        self.memory[: self._head_bytes] = encode_record(record).ljust(self._head_bytes)

    def read(self) -> Told:
        """Return what it says; raises ValueError if that is no record."""
        record: Told = decode_record(bytes(self.memory[: self._head_bytes]), get_args(Told), "the overlapped update")[0]
        return record


# The sums of the overlapped update, in one fixed order each, so that a replay gives the same bits.
#
# Halves are summed as float32, everything else in its own type; averages of parameters are made in float64 and rounded
# once.


def add_mean(
    cumulative: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    weights: Sequence[float],
    *,
    scratch: torch.Tensor | None = None,
) -> None:
    """Add the weighted mean of ``gradients``, in their order, to ``cumulative``; ``scratch`` is overwritten."""
    mean = torch.empty_like(cumulative) if scratch is None else scratch
    cumulative.add_(weighted_sum(gradients, shares(weights), out=mean))


def average(values: Sequence[torch.Tensor], weights: Sequence[float], *, out: torch.Tensor) -> None:
    """Write the weighted mean of ``values``, in their order, to ``out``; of one value, that value."""
    if len(values) == 1:
        out.copy_(values[0])
        return
    out.copy_(weighted_sum(values, shares(weights), out=torch.empty(out.shape, dtype=torch.float64)))


def correction(
    newest: torch.Tensor, base: torch.Tensor | None, *, subtract: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what ``newest`` has over ``base``, less the own gradient that it holds."""
    change = newest.clone() if base is None else newest - base
    return change if subtract is None else change.sub_(subtract.to(change.dtype))


class Feed:
    """How corrections come into the gradients that a worker's optimizer gets.

    A correction is added to the gradient of the step at hand, be it for one round or for several. Where the network
    does not keep up, a round stands for a run of r iterations, and its correction is r times as large; it is added in r
    equal parts to the next r steps. The optimizer gets the same sum, in gradients of the size that it is used to; one
    that is large and rare would make Adam's steps small for long.
    """

    def __init__(self, *, replaces: bool = True) -> None:
        self.replaces = replaces
        """Whether the own gradient that is in a global one is taken out: the rule "swap", and not the literal one."""
        self._part: torch.Tensor | None = None
        self._num_left = 0

    def take(
        self,
        gradient: torch.Tensor,
        change: torch.Tensor,
        use: Use,
        own: torch.Tensor | None,  # noqa: ARG002 - for Collect
    ) -> None:
        """Take what a :class:`Use` has changed; ``own`` is the own gradient in it, of one iteration or a run."""
        if use.replaces:
            gradient.copy_(change)
        elif use.run_length <= 1:
            gradient.add_(change.to(gradient))
        else:
            if self._part is not None:
                change.add_(self._part, alpha=self._num_left)
            self._num_left = max(self._num_left, use.run_length)
            self._part = change.div_(self._num_left)

    def finish(self, gradient: torch.Tensor) -> None:
        """Add this step's part of what is left, once in a step."""
        if self._part is None:
            return
        gradient.add_(self._part.to(gradient))
        self._num_left -= 1
        if not self._num_left:
            self._part = None

    def clear(self) -> None:
        """Forget what is left: a period begins."""
        self._part = None
        self._num_left = 0


class HostedShard:
    """The server shard of one bucket on this rank (loop thread only)."""

    def __init__(
        self,
        port: Port,
        layout: ServerLayout,
        bucket: BucketLayout,
        *,
        epoch: int,
        lost: Iterable[int] = (),
        machine: ServerShard | None = None,
    ) -> None:
        """Host ``bucket`` from now on; ``epoch`` is the number of servers that it had before, which are dead.

        ``machine``: what decides, if it is no server.
        """
        self.bucket = bucket
        self._layout = layout
        self._relay_of = {} if epoch or machine else bucket.relay_of
        """Of workers whose pushes come from others; a relay has its own."""
        workers = {self._relay_of.get(worker, worker) for worker in layout.workers}
        self.machine = machine or ServerShard(
            workers=workers,
            quorum=min(layout.quorum, len(workers)),
            lost=workers.intersection(lost),
            succeeds=epoch > 0,
            ends_elsewhere=layout.ends_on_tree and epoch == 0,
            shrinks=layout.shrinks,
        )
        self._messages = bucket.open_messages(port, epoch=epoch)
        self._cumulative = torch.zeros(bucket.num_elements, dtype=sum_dtype(bucket.dtype))
        self._mean = torch.empty_like(self._cumulative)
        self._average = torch.empty(0)
        for worker in self.machine.alive:
            self._post(worker)

    def missing(self) -> set[int]:
        """Return the workers that what comes next waits for here; which one of a site it is knows the site's relay."""
        return set(self.machine.missing()).difference(self._relay_of.values())

    def dropped(self, worker: int) -> int:
        """Return how many pushes of ``worker`` were dropped here, by themselves or in the mean of a site."""
        return self.machine.dropped[self._relay_of.get(worker, worker)]

    def lose(self, worker: int) -> None:
        """Go on without ``worker``."""
        if worker in self.machine.alive:
            self.obey(self.machine.lose(worker))

    def stop(self, worker: int, *, period: int, last_round: int) -> None:
        """Note that ``worker`` ended a period that is averaged elsewhere; it may say so before it knows of a move."""
        if self._messages.epoch == 0 and worker in self.machine.alive:
            self.obey(self.machine.stop(worker, period=period, last_round=last_round))

    def retire(self) -> None:
        """Do nothing more: the bucket begins again with a later epoch. What still comes lands, and is dropped."""
        self._messages.retire()

    def _post(self, worker: int) -> None:
        """Wait for the worker's next message."""
        message = self.bucket.make_up()
        self._messages.receive(worker, UP, message.memory, partial(self._on_message, worker, message))

    def _on_message(self, worker: int, message: Message) -> None:
        if worker not in self.machine.alive:
            return  # it was sent before this worker knew
        event = message.read()
        assert isinstance(event, Push | End | Hello)
        self.obey(self.machine.hear(replace(event, worker=worker, payload=message.values)))
        self._post(worker)

    def obey(self, instructions: Iterable[ServerInstruction]) -> None:
        """Do what the state machine says."""
        for instruction in instructions:
            self._do(instruction)

    def _do(self, instruction: ServerInstruction) -> None:
        if isinstance(instruction, Clear):
            self._cumulative.zero_()
        elif isinstance(instruction, Fold | Average):
            self._sum(instruction)
        elif isinstance(instruction, Reply):
            self._reply(instruction, self._cumulative)
        elif isinstance(instruction, ReplyAverage):
            dropped = tuple(self.dropped(rank) for rank in range(self._layout.world_size))
            self._reply(replace(instruction, dropped=dropped), self._average)

    def _sum(self, instruction: Fold | Average) -> None:
        values = [one.payload for one in instruction.contributions]
        weights = [one.weight for one in instruction.contributions]
        if isinstance(instruction, Fold):
            add_mean(self._cumulative, values, weights, scratch=self._mean)
        else:
            self._average = torch.empty(self.bucket.num_elements, dtype=self.bucket.dtype)
            average(values, weights, out=self._average)

    def _reply(self, reply: Reply | ReplyAverage, values: torch.Tensor) -> None:
        message = self.bucket.make_down()
        message.write(reply)
        message.values_as(values.dtype).copy_(values)
        self._messages.send(reply.worker, DOWN, message.memory, lambda: self.obey(self.machine.replied(reply.worker)))


class HostedRelay(HostedShard):
    """The relay of one bucket on this rank, which sums for workers of its site (loop thread only)."""

    machine: RelayShard

    def __init__(self, port: Port, layout: ServerLayout, bucket: BucketLayout) -> None:
        """Host it until the first loss, between the ranks that push here and the bucket's server."""
        site = [rank for rank, relay in bucket.relay_of.items() if relay == port.rank]
        super().__init__(port, layout, bucket, epoch=0, machine=RelayShard(rank=port.rank, workers=site))
        self._listen()

    def _listen(self) -> None:
        message = self.bucket.make_down()
        self._messages.receive(self.bucket.server, DOWN, message.memory, partial(self._on_answer, message))

    def _on_answer(self, message: Message) -> None:
        reply = message.read()
        assert isinstance(reply, Reply)
        self.obey(self.machine.answer(reply, message.values))
        self._listen()

    def _do(self, instruction: ServerInstruction) -> None:
        if isinstance(instruction, Forward):
            self._forward(instruction)
        elif isinstance(instruction, Take):
            self._cumulative = instruction.payload
        elif isinstance(instruction, Stop):
            stopped = Stopped(period=instruction.period, last_rounds=((self.bucket.index, instruction.last_round),))
            self._messages.port.tell(self.bucket.server, encode_record(stopped))
        else:
            super()._do(instruction)

    def _forward(self, forward: Forward) -> None:
        message = self.bucket.make_up()
        message.write(forward.push)
        values = [one.payload for one in forward.contributions]
        weights = [one.weight for one in forward.contributions]
        message.values.copy_(weighted_sum(values, shares(weights), out=self._mean))
        self._messages.send(self.bucket.server, UP, message.memory, lambda: self.obey(self.machine.sent()))


class Place:
    """An own gradient, or the sum over a run of them, until it is settled: on its device, and as a push."""

    def __init__(self, push: Message, like: torch.Tensor, copier: HostCopier | None) -> None:
        self.push = push
        self.values = push.values if copier is None else torch.empty_like(like)


class WorkerLink:
    """One bucket of one worker.

    What it reckons with lies where the gradients do. On a device, copies of it go to ``copier``'s memory beside the
    training, and ``thread`` waits for them, and pushes.
    """

    def __init__(
        self,
        port: Port,
        layout: ServerLayout,
        bucket: BucketLayout,
        *,
        changed: threading.Condition,
        feed: Feed | Collect,
        trace: Trace,
        copier: HostCopier | None,
        thread: WorkerThread,
    ) -> None:
        self.bucket = bucket
        self._copier, self._thread = copier, thread
        self.server = bucket.relay_of.get(port.rank, bucket.server)
        """Or the site's relay."""
        self.machine = BucketWorker(rank=port.rank, num_rounds=layout.period)
        self.num_forgotten = 0
        """Pushes that died with a server."""
        self.dropped: tuple[int, ...] = (0,) * layout.world_size
        self._port = port
        self._messages = bucket.open_messages(port, epoch=0)
        self._changed = changed
        self._feed = feed
        self._trace = trace
        self._places: dict[int, Place] = {}
        self._end: Message | None = None
        self._sent_end: Message | None = None
        """Of this period, once it is written: what a new server has to get too."""
        self._has_ended = False
        self.has_average = False
        """Whether the period's average is here; read it with the lock held."""
        self._newest: Message | None = None
        """The newest sum that was pulled and not used."""
        self._base: torch.Tensor | None = None
        """The sum that was used last; none at a period's start."""
        self._early: tuple[Reply, Message] | None = None
        """The newest sum of the next period, which this worker has not begun."""
        self._average: Message | None = None
        self.start = bucket.make_up()
        """The parameters that the newest period began with which this worker knows the start of, the same on all ranks:
        what they have moved since is summed on the tree, and a server's successor may have to be told."""
        self.greeting = Hello(worker=port.rank, period=0)
        """Which period that is, as a server's successor is told it."""
        self.num_heard = 0
        """Messages of servers."""

    # --- the training thread -------------------------------------------------------------------------------------

    def step(self, gradient: torch.Tensor, *, iteration: int, weight: float) -> None:
        """Take the own gradient of this iteration; push what is to be pushed."""
        with self._changed:
            instructions, messages = self.machine.step(iteration=iteration, weight=weight), self._messages
        for instruction in instructions:
            if isinstance(instruction, Keep):
                self._keep(instruction, gradient)
            else:
                self._push(instruction, messages)

    def hurry(self, *, iteration: int) -> None:
        """Push what was made so far; the worker waits for it."""
        with self._changed:
            instructions, messages = self.machine.hurry(iteration=iteration), self._messages
        for instruction in instructions:
            self._push(instruction, messages)

    def use(self, gradient: torch.Tensor) -> int:
        """Fold the newest global gradient, if it is not used yet, into ``gradient``; return how many rounds it adds."""
        with self._changed:
            used = self.machine.used
            use = self.machine.use()
            if use is None:
                return 0
            message, base = self._newest, self._base
            assert message is not None
            self._newest, self._base = None, (newest := self._on_device(message, gradient))
        start_ns = self._trace.now_ns()
        own = self._places[use.subtract].values if use.subtract is not None else gradient if use.replaces else None
        subtract = own if self._feed.replaces and not use.replaces else None
        change = correction(newest, base, subtract=subtract)
        if not self._feed.replaces:
            use = replace(use, replaces=False)
        self._feed.take(gradient, change, use, own)
        self._trace.span(
            f"fold into bucket {self.bucket.index}", "fold", start_ns, self._trace.now_ns(), round_number=use.closed
        )
        return use.closed - used

    def finish_step(self, gradient: torch.Tensor) -> None:
        """Add to ``gradient`` what is left of earlier corrections."""
        self._feed.finish(gradient)

    def unsettled(self) -> list[tuple[torch.Tensor, int]]:
        """Return the own gradients for which no global one was used yet, as sums over runs."""
        with self._changed:
            runs = self.machine.unsettled
        return [(self._places[place].values, count) for place, count in runs]

    def end(self, parameters: torch.Tensor, *, iteration: int, weight: float, told: tuple[int, ...]) -> None:
        """Send what the period ends with, to be averaged; ``iteration`` counts since the start of the training."""
        message = self._end = self._end or self.bucket.make_up()
        message.values.copy_(parameters)
        period = self.machine.period
        message.write(End(worker=self._port.rank, period=period, iteration=iteration, weight=weight, told=told))
        with self._changed:
            self._has_ended = True
            self._sent_end = message
            self._forget_sums()
            messages, server = self._messages, self.server
        self._port.call_soon(messages.send, server, UP, message.memory)

    def stop(self) -> int:
        """End the period, which is averaged without the server; return the last round that was pushed for."""
        with self._changed:
            self._has_ended = True
            self._forget_sums()
            return self.machine.last_round

    def take_average(self, out: torch.Tensor) -> None:
        """Copy the average to ``out``."""
        if self._average is not None:  # else the mean of a collective is there already
            out.copy_(self._average.values_as(self.bucket.dtype))

    def begin_period(self) -> None:
        """Forget the last period."""
        self._feed.clear()
        with self._changed:
            self._average = None
            self._forget_sums()
            self.machine.end_period()
            early, self._early = self._early, None
            if early is not None and self.machine.arrived(early[0]):
                self._newest = early[1]
            self._has_ended = self.has_average = False
            self._sent_end = None

    def keep_start(self, parameters: torch.Tensor) -> None:
        """Take note of what a period begins with, which a checkpoint may have brought."""
        self.start.values.copy_(parameters)

    def keep_mean(self, mean: torch.Tensor, *, iteration: int, told: tuple[int, ...]) -> None:
        """Take note of what the next period begins with, where no server said so; on the loop's thread."""
        self.greeting = replace(self.greeting, period=self.machine.period + 1, iteration=iteration, told=told)
        self.start.values.copy_(mean)

    def _forget_sums(self) -> None:
        """Forget what was pulled in this period."""
        self._newest = self._base = None

    def _keep(self, keep: Keep, gradient: torch.Tensor) -> None:
        if keep.place not in self._places:
            self._places[keep.place] = Place(self.bucket.make_up(self._copier), gradient, self._copier)
        own = self._places[keep.place].values
        if keep.add:
            own.add_(gradient)
        else:
            own.copy_(gradient)

    def _push(self, send: Send, messages: MessageStream) -> None:
        place, round_number = self._places[send.place], send.push.round_number
        place.push.write(send.push)
        if self._copier is None:
            self._port.call_soon(self._transmit, place.push, messages, round_number)
        else:
            copied = copy_beside(self._copier, CopyKind.TO_HOST, place.values, place.push.values)
            self._thread.submit(0, (), partial(self._push_when, copied, place.push, messages, round_number))

    def _push_when(self, copied: Mark, message: Message, messages: MessageStream, round_number: int) -> None:
        assert self._copier is not None, "there is something to wait for"
        self._copier.wait(copied)
        self._port.call_soon(self._transmit, message, messages, round_number)

    def _on_device(self, message: Message, like: torch.Tensor) -> torch.Tensor:
        """Return the values of a message where the gradients are, for what comes next in the training's stream."""
        if self._copier is None:
            return message.values
        values = torch.empty_like(like, dtype=message.values.dtype)
        self._copier.follow(copy_beside(self._copier, CopyKind.TO_DEVICE, values, message.values))
        return values

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def is_owed_average(self, server: int) -> bool:
        """Whether the average that ends the period is still to come from ``server``; if that has left, it is here."""
        return self.server == server and self._sent_end is not None and not self.has_average

    def listen(self) -> None:
        """Let the next message of the server land."""
        message = self.bucket.make_down(self._copier)
        on_reply = partial(self._on_reply, message, self._trace.now_ns())
        self._messages.receive(self.server, DOWN, message.memory, on_reply)

    def move(self, server: int, *, epoch: int) -> None:
        """Go on with another server, or another shard of this one; what was pushed to the one before is forgotten."""
        with self._changed:
            if self._port.is_lost(self.server):
                self._messages.cancel(self.server, DOWN)
            self._forget_sums()
            self._early = None
            self.machine.sent()
            self.num_forgotten += self.machine.restart()
            self._messages.retire()
            self.server, self._messages = server, self.bucket.open_messages(self._port, epoch=epoch)
            has_start = self.greeting.period > self.machine.period
            self.has_average = self.has_average or has_start
            end = None if has_start else self._sent_end
            self._changed.notify_all()
        self.listen()
        self.start.write(self.greeting)
        self._messages.send(server, UP, self.start.memory)
        if end is not None:
            self._messages.send(server, UP, end.memory)

    def _transmit(self, message: Message, messages: MessageStream, round_number: int) -> None:
        """Send a push, unless it was for a server that is dead; what is to be said to its successor move() says."""
        messages.send(self.server, UP, message.memory, partial(self._on_sent, round_number, self._trace.now_ns()))

    def _on_sent(self, round_number: int, start_ns: int) -> None:
        self._trace.span(
            f"push of bucket {self.bucket.index}", "push", start_ns, self._trace.now_ns(), round_number=round_number
        )
        with self._changed:
            self.machine.sent()
            self._changed.notify_all()

    def _on_reply(self, message: Message, start_ns: int) -> None:
        self._trace.span(f"pull of bucket {self.bucket.index}", "pull", start_ns, self._trace.now_ns())
        self.num_heard += 1
        with self._changed:
            reply = message.read()
            if isinstance(reply, ReplyAverage):
                self._on_average(reply, message)
            elif isinstance(reply, Reply) and reply.period == self.machine.period + 1:
                self._early = reply, message  # others have begun the next period, this worker waits for other buckets
            elif isinstance(reply, Reply) and not self._has_ended and self.machine.arrived(reply):
                self._newest = message
            self._changed.notify_all()
        self.listen()

    def _on_average(self, reply: ReplyAverage, message: Message) -> None:
        if reply.period != self.machine.period or not self._has_ended:
            return
        self.greeting = replace(self.greeting, period=reply.period + 1, iteration=reply.iteration, told=reply.told)
        self.start.values.copy_(message.values_as(self.bucket.dtype))
        self.dropped = reply.dropped
        self._average = message
        self.has_average = True
