"""A worker's link to the server shard of one bucket: its pushes, its pulls, and the end of a period.

The training thread calls ``step``, ``use``, ``hurry`` and the methods about the end of a period; the methods named
``on_*`` and ``move`` run on the loop's thread. The lock of ``changed`` guards what both see; sums are made outside it,
on memory that only the training thread has at that moment.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import torch

from syncline.observe import Trace
from syncline.runtime.port import Port
from syncline.updates.messaging.mailbox import MessageStream
from syncline.updates.overlapped.arithmetic import Feed, correction, own_inside
from syncline.updates.overlapped.events import End, Hello, Keep, Reply, ReplyAverage, Send
from syncline.updates.overlapped.messages import DOWN, UP, BucketLayout, Message
from syncline.updates.overlapped.placement import ServerLayout
from syncline.updates.overlapped.rebase import Collect
from syncline.updates.overlapped.worker import BucketWorker


class WorkerLink:
    """One bucket of one worker."""

    def __init__(
        self,
        port: Port,
        layout: ServerLayout,
        bucket: BucketLayout,
        *,
        server: int,
        changed: threading.Condition,
        replaces: bool,
        feed: Feed | Collect,
        trace: Trace,
    ) -> None:
        self.bucket = bucket
        self.server = server
        self.machine = BucketWorker(rank=port.rank, window=layout.window, num_rounds=layout.period)
        self.num_forgotten = 0
        """Pushes that died with a server."""
        self.dropped: tuple[int, ...] = (0,) * layout.world_size
        self._port = port
        self._messages = bucket.open_messages(port, epoch=0)
        self._changed = changed
        self._replaces = replaces
        self._feed = feed
        self._trace = trace
        self._places: dict[int, Message] = {}
        self._end: Message | None = None
        self._sent_end: Message | None = None
        """Of this period, once it is written: what a new server has to get too."""
        self._has_ended = False
        self._has_average = False
        self._newest: Message | None = None
        """The newest sum that was pulled and not used."""
        self._base: Message | None = None
        """The sum that was used last; none at a period's start."""
        self._early: tuple[Reply, Message] | None = None
        """The newest sum of the next period, which this worker has not begun."""
        self._average: Message | None = None
        self._start = bucket.make_up() if layout.keeps_start else None
        self._start_period = 0
        self.num_heard = 0
        """Messages of servers."""
        self.start_iteration = 0
        """The fleet's iteration at the start of the newest period that this worker knows the start of."""

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
            newest, base = self._newest, self._base
            assert newest is not None
            self._newest, self._base = None, newest
        start_ns = self._trace.now_ns()
        own = own_inside(use, lambda place: self._places[place].values, gradient)
        if not self._replaces:
            use = replace(use, subtract=(), replaces=False)
        change = correction(
            newest=newest.values,
            base=None if base is None else base.values,
            subtract=[self._places[place].values for place in use.subtract],
        )
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

    def end(self, parameters: torch.Tensor, *, iteration: int, weight: float) -> None:
        """Send what the period ends with, to be averaged; ``iteration`` counts since the start of the training."""
        message = self._end = self._end or self.bucket.make_up()
        message.values.copy_(parameters)
        period = self.machine.period
        message.write(End(worker=self._port.rank, period=period, iteration=iteration, weight=weight))
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

    def has_average(self) -> bool:
        """Whether the period's average is here. Call it with the lock held."""
        return self._has_average

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
            self._has_ended = self._has_average = False
            self._sent_end = None

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

    def _forget_sums(self) -> None:
        """Forget what was pulled in this period."""
        self._newest = self._base = None

    def _keep(self, keep: Keep, gradient: torch.Tensor) -> None:
        if keep.place not in self._places:
            self._places[keep.place] = self.bucket.make_up()
        own = self._places[keep.place].values
        if keep.add:
            own.add_(gradient.to(own.device))
        else:
            own.copy_(gradient)

    def _push(self, send: Send, messages: MessageStream) -> None:
        message = self._places[send.place]
        message.write(send.push)
        self._port.call_soon(self._transmit, message, messages, send.push.round_number)

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def is_owed_average(self, server: int) -> bool:
        """Whether the average that ends the period is still to come from ``server``; if that has left, it is here."""
        return self.server == server and self._sent_end is not None and not self._has_average

    def listen(self) -> None:
        """Let the next message of the server land."""
        message = self.bucket.make_down()
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
            has_start = self._start_period > self.machine.period
            self._has_average = self._has_average or has_start
            end = None if has_start else self._sent_end
            self._changed.notify_all()
        self.listen()
        if self._start is not None:
            period, iteration = self._start_period, self.start_iteration
            self._start.write(Hello(worker=self._port.rank, period=period, iteration=iteration))
            self._messages.send(server, UP, self._start.memory)
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
        self.start_iteration = reply.iteration
        if self._start is not None:
            self._start.values.copy_(message.values_as(self.bucket.dtype))
            self._start_period = reply.period + 1
        self.dropped = reply.dropped
        self._average = message
        self._has_average = True
