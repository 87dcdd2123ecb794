"""A worker's link to the server shard of one bucket: its pushes, its pulls, and the end of a period.

The training thread calls ``step``, ``use``, ``hurry`` and the methods about the end of a period; the methods named
``on_*`` and ``move`` run on the loop's thread. The lock of ``changed`` guards what both see; sums are made outside it,
on memory that only the training thread has at that moment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from syncline.observe import Trace
from syncline.runtime.port import Port
from syncline.updates.overlapped.arithmetic import Feed, correction, own_inside
from syncline.updates.overlapped.events import Keep, Reply, Send
from syncline.updates.overlapped.inbox import PullBuffers
from syncline.updates.overlapped.messages import DownHeader, Kind, MessageKind, Question, UpHeader, encode_stop, tag
from syncline.updates.overlapped.rebase import Collect
from syncline.updates.overlapped.terms import BucketTerms, Message, Terms
from syncline.updates.overlapped.worker import BucketWorker


class WorkerLink:
    """One bucket of one worker."""

    def __init__(
        self,
        port: Port,
        terms: Terms,
        bucket: BucketTerms,
        *,
        server: int,
        changed: threading.Condition,
        is_additive: bool,
        feed: Feed | Collect,
        trace: Trace,
    ) -> None:
        self.bucket = bucket
        self.server = server
        self.epoch = 0
        self.machine = BucketWorker(window=terms.window, num_rounds=terms.period, push=terms.push)
        self.num_forgotten = 0
        """Pushes that died with a server."""
        self.dropped: tuple[int, ...] = (0,) * terms.world_size
        self.awaited: tuple[int, ...] = ()
        """Whom the server waits for, as it last said."""
        self._port = port
        self._terms = terms
        self._changed = changed
        self._is_additive = is_additive
        self._feed = feed
        self._trace = trace
        self._places: dict[int, Message] = {}
        self._ends: list[Message] = []
        self._sent_ends: tuple[Message, ...] = ()
        """Of this period, once all are written: what a new server has to get too."""
        self._has_ended = False
        self._has_all_parts = False
        self._early: Reply | None = None
        self._pulls = PullBuffers(bucket, terms)
        self._start = bucket.make_up() if terms.keeps_start else None
        self._start_period = 0
        self.start_iteration = 0
        """The fleet's iteration at the start of the newest period that this worker knows the start of."""
        self._up_number = self._down_number = 0
        self._question = Question()

    # --- the training thread -------------------------------------------------------------------------------------

    def step(self, gradient: torch.Tensor, *, iteration: int, weight: float) -> None:
        """Take the own gradient of this iteration; push what is to be pushed."""
        with self._changed:
            instructions, epoch = self.machine.step(iteration=iteration, weight=weight), self.epoch
        for instruction in instructions:
            if isinstance(instruction, Keep):
                self._keep(instruction, gradient)
            else:
                self._push(instruction, epoch)

    def hurry(self, *, iteration: int) -> None:
        """Push what was made so far; the worker waits for it."""
        with self._changed:
            instructions, epoch = self.machine.hurry(iteration=iteration), self.epoch
        for instruction in instructions:
            self._push(instruction, epoch)

    def use(self, gradient: torch.Tensor) -> int:
        """Fold the newest global gradient, if it is not used yet, into ``gradient``; return how many rounds it adds."""
        with self._changed:
            used = self.machine.used
            use = self.machine.use()
            if use is None:
                return 0
            newest, base = self._pulls.take()
        start_ns = self._trace.now_ns()
        own = own_inside(use, lambda place: self._places[place].values, gradient)
        if self._is_additive:
            use = replace(use, subtract=(), replaces=False)
        change = correction(
            newest=newest.values,
            base=None if base is None else base.values,
            subtract=[self._places[place].values for place in use.subtract],
        )
        self._feed.take(gradient, change, use, own)
        with self._changed:
            self._pulls.give_back()
        self._trace.span(
            f"fold into bucket {self.bucket.index}", "fold", start_ns, self._trace.now_ns(), round_number=use.closed
        )
        self._port.call_soon(self.on_room)
        return use.closed - used

    def finish_step(self, gradient: torch.Tensor) -> None:
        """Add to ``gradient`` what is left of earlier corrections."""
        self._feed.finish(gradient)

    def unsettled(self) -> list[tuple[torch.Tensor, int]]:
        """Return the own gradients for which no global one was used yet, as sums over runs."""
        with self._changed:
            runs = self.machine.unsettled
        return [(self._places[place].values, count) for place, count in runs]

    def end(self, parts: Sequence[torch.Tensor], *, iteration: int, weight: float) -> None:
        """Send what the period ends with, to be averaged; ``iteration`` counts since the start of the training."""
        self._ends += [self.bucket.make_up() for _ in parts[len(self._ends) :]]
        del self._ends[len(parts) :]
        for part, (message, values) in enumerate(zip(self._ends, parts, strict=True)):
            message.values.copy_(values)
            header = UpHeader(
                kind=Kind.END,
                period=self.machine.period,
                round_number=part,
                iteration=iteration,
                last_part=len(parts) - 1,
                weight=weight,
            )
            header.encode(message.memory)
        with self._changed:
            self._has_ended = True
            self._sent_ends = tuple(self._ends)
            self._pulls.reset()  # the sums of this period are of no use any more; the averages need the room
            epoch = self.epoch
        for message in self._ends:
            self._port.call_soon(self._transmit, message, epoch)
        self._port.call_soon(self.on_room)

    def stop(self) -> None:
        """Tell the server that this worker has ended the period, which is averaged without it."""
        with self._changed:
            self._has_ended = True
            self._pulls.reset()
            note = encode_stop(period=self.machine.period, last_round=self.machine.last_round)
            number = self.machine.period
        self._port.call_soon(self._tell_stop, note, number)

    def _tell_stop(self, note: memoryview, number: int) -> None:
        self._port.send(
            self.server,
            tag(self.bucket.stream, MessageKind.STOP, number, epoch=self.epoch),
            note,
            urgency=self.bucket.urgency,
            connection_class=self.bucket.connection_class,
        )

    def has_average(self) -> bool:
        """Whether the period's average is here, with all its parts that will come. Call it with the lock held."""
        return self._has_all_parts

    def take_average(self, part: int, *, out: torch.Tensor) -> bool:
        """Copy a part of the average to ``out``; False if it never came, because its server died."""
        message = self._pulls.average(part)
        if message is None:
            return False
        out.copy_(message.values_as(self.bucket.dtype))
        return True

    def begin_period(self) -> None:
        """Forget the last period."""
        self._feed.clear()
        with self._changed:
            self._pulls.release_averages()
            self._pulls.reset()
            self.machine.end_period()
            early, self._early = self._early, None
            if early is not None and self.machine.arrived(early):
                self._pulls.take_early()
            self._pulls.drop_early()
            self._has_ended = self._has_all_parts = False
            self._sent_ends = ()
        self._port.call_soon(self.on_room)

    def keep_start(self, parameters: torch.Tensor) -> None:
        """Take note of what the first period begins with."""
        if self._start is not None:
            self._start.values.copy_(parameters)

    def keep_mean(self, mean: torch.Tensor, *, iteration: int) -> None:
        """Take note of what the next period begins with, where no server said so; on the loop's thread."""
        self.start_iteration = iteration
        self._start_period = self.machine.period + 1
        if self._start is not None:
            self._start.values.copy_(mean)

    def _keep(self, keep: Keep, gradient: torch.Tensor) -> None:
        if keep.place not in self._places:
            self._places[keep.place] = self.bucket.make_up()
        own = self._places[keep.place].values
        if keep.add:
            own.add_(gradient.to(own.device))
        else:
            own.copy_(gradient)

    def _push(self, send: Send, epoch: int) -> None:
        message = self._places[send.place]
        header = UpHeader(
            kind=Kind.PUSH,
            period=send.period,
            round_number=send.round_number,
            iteration=send.iteration,
            weight=send.weight,
        )
        header.encode(message.memory)
        self._port.call_soon(self._transmit, message, epoch, send.round_number)

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def on_room(self) -> None:
        """Let the next message of the server land, if there is room for it."""
        with self._changed:
            message = self._pulls.begin_landing()
        if message is None:
            return
        self._port.receive(
            self.server,
            tag(self.bucket.stream, MessageKind.DOWN, self._down_number, epoch=self.epoch),
            message.memory,
            urgency=self.bucket.urgency,
            on_received=partial(self._on_reply, self.epoch, self._trace.now_ns()),
        )

    def ask(self) -> None:
        """Ask the server whom it waits for."""
        server, question, epoch = self.server, self._question, self.epoch
        urgency = self.bucket.urgency
        answer_tag = tag(self.bucket.stream, MessageKind.ANSWER, question.number, epoch=epoch)
        ask_tag = tag(self.bucket.stream, MessageKind.ASK, question.number, epoch=epoch)
        question.number += 1
        self._port.receive(
            server, answer_tag, question.answered, urgency=urgency, on_received=partial(self._on_answer, question)
        )
        self._port.send(server, ask_tag, question.asked, urgency=urgency, connection_class=self.bucket.connection_class)

    def move(self, server: int, *, epoch: int) -> None:
        """Go on with another server, or another shard of this one; what was pushed to the one before is forgotten."""
        with self._changed:
            if self._port.is_lost(self.server):
                self._port.cancel(
                    self.server, tag(self.bucket.stream, MessageKind.DOWN, self._down_number, epoch=self.epoch)
                )
                self._pulls.drop_landed()
            elif not self._pulls.abandon_landing():
                self._let_land()
            self._pulls.drop_early()
            self._pulls.reset()
            self._early = None
            self.machine.sent()
            self.num_forgotten += self.machine.restart()
            self.server, self.epoch = server, epoch
            self._up_number = self._down_number = 0
            self._question = Question()
            has_start = self._start_period > self.machine.period
            self._has_all_parts = self._has_all_parts or has_start
            ends = () if has_start else self._sent_ends
            self._changed.notify_all()
        self.on_room()
        if self._start is not None:
            hello = UpHeader(kind=Kind.HELLO, period=self._start_period, iteration=self.start_iteration)
            hello.encode(self._start.memory)
            self._transmit(self._start, self.epoch)
        for message in ends:
            self._transmit(message, self.epoch)

    def _let_land(self) -> None:
        """Take what the server may have sent already, and do nothing with it."""
        sink = self.bucket.make_down(self._terms)
        down_tag = tag(self.bucket.stream, MessageKind.DOWN, self._down_number, epoch=self.epoch)
        urgency = self.bucket.urgency
        self._port.receive(self.server, down_tag, sink.memory, urgency=urgency, on_received=lambda: None)

    def _transmit(self, message: Message, epoch: int, round_number: int | None = None) -> None:
        """Send ``message``; with ``round_number`` it is a push, and the machine is told when it has left."""
        if epoch != self.epoch:
            return  # it was for a server that is dead; what is to be said to its successor was said in move()
        number, self._up_number = self._up_number, self._up_number + 1
        self._port.send(
            self.server,
            tag(self.bucket.stream, MessageKind.UP, number, epoch=epoch),
            message.memory,
            urgency=self.bucket.urgency,
            connection_class=self.bucket.connection_class,
            on_sent=partial(self._on_sent, epoch, round_number, self._trace.now_ns())
            if round_number is not None
            else None,
        )

    def _on_sent(self, epoch: int, round_number: int, start_ns: int) -> None:
        self._trace.span(
            f"push of bucket {self.bucket.index}", "push", start_ns, self._trace.now_ns(), round_number=round_number
        )
        with self._changed:
            if epoch == self.epoch:
                self.machine.sent()
                self._changed.notify_all()

    def _on_answer(self, question: Question) -> None:
        self.awaited = question.decode_answer()

    def _on_reply(self, epoch: int, start_ns: int) -> None:
        if epoch != self.epoch:
            return
        self._trace.span(f"pull of bucket {self.bucket.index}", "pull", start_ns, self._trace.now_ns())
        with self._changed:
            self._down_number += 1
            message = self._pulls.landed()
            header = DownHeader.decode(message.memory)
            if header.kind is Kind.AVERAGE:
                self._on_average(header, message)
            elif header.period == self.machine.period + 1:
                self._early = _reply(header)  # others have begun the next period, this worker waits for other buckets
                self._pulls.keep_early()
            elif not self._has_ended and self.machine.arrived(_reply(header)):
                self._pulls.keep_newest()
            else:
                self._pulls.drop_landed()
            self._changed.notify_all()
        self.on_room()

    def _on_average(self, header: DownHeader, message: Message) -> None:
        if header.period != self.machine.period or not self._has_ended:
            self._pulls.drop_landed()
            return
        if header.closed == 0:
            self.start_iteration = header.clock
        if header.closed == 0 and self._start is not None:
            self._start.values.copy_(message.values_as(self.bucket.dtype))
            self._start_period = header.period + 1
        self.dropped = header.dropped
        self._pulls.keep_average(header.closed)
        self._has_all_parts = header.is_last


def _reply(header: DownHeader) -> Reply:
    return Reply(worker=0, period=header.period, closed=header.closed, clock=header.clock, accepted=header.accepted)
