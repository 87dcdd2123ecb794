"""A server shard at work: receives what workers send, does what the state machine says, and replies.

Everything happens on the communication loop's thread. Memory: for each worker at most ``window`` messages (made when
they are first needed) and one reply, one cumulative sum, and the average of a period's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from syncline.runtime.port import Port
from syncline.updates.flat import sum_dtype
from syncline.updates.overlapped.arithmetic import add_mean, average
from syncline.updates.overlapped.events import (
    Average,
    Clear,
    Contribution,
    End,
    Fail,
    Fold,
    Hello,
    Lost,
    Push,
    Release,
    Replied,
    Reply,
    ReplyAverage,
    ServerEvent,
    ServerInstruction,
    Stop,
)
from syncline.updates.overlapped.messages import DOWN, UP, DownHeader, Kind, UpHeader
from syncline.updates.overlapped.server import ServerShard
from syncline.updates.overlapped.terms import BucketTerms, Message, Terms


@dataclass(slots=True)
class _Buffers:
    """Room for the messages of one worker."""

    places: list[Message] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    is_posted: bool = False
    reply: Message | None = None


class HostedShard:
    """The server shard of one bucket on this rank (loop thread only)."""

    def __init__(
        self,
        port: Port,
        terms: Terms,
        bucket: BucketTerms,
        *,
        epoch: int,
        lost: Iterable[int] = (),
    ) -> None:
        """Host ``bucket`` from now on; ``epoch`` is the number of servers that it had before, which are dead."""
        self.bucket = bucket
        self.machine = ServerShard(
            workers=terms.workers,
            quorum=terms.quorum,
            window=terms.window,
            lost=[rank for rank in lost if rank in terms.workers],
            succeeds=epoch > 0,
            ends_elsewhere=terms.ends_on_tree and epoch == 0,
            shrinks=terms.shrinks,
        )
        self._terms = terms
        self._messages = bucket.open_messages(port, epoch=epoch)
        self._cumulative = torch.zeros(bucket.num_elements, dtype=sum_dtype(bucket.dtype))
        self._mean = torch.empty_like(self._cumulative)
        self._average = torch.empty(0)
        self._buffers = {worker: _Buffers() for worker in self.machine.alive}
        for worker in self.machine.alive:
            self._post(worker)

    @property
    def num_places(self) -> int:
        """Messages that this shard has room for."""
        return sum(len(buffers.places) for buffers in self._buffers.values())

    def lose(self, worker: int) -> None:
        """Go on without ``worker``."""
        if worker in self._buffers and worker in self.machine.alive:
            self.handle(Lost(worker=worker))

    def stop(self, worker: int, *, period: int, last_round: int) -> None:
        """Note that ``worker`` ended a period that is averaged elsewhere; it may say so before it knows of a move."""
        if self._messages.epoch == 0 and worker in self.machine.alive:
            self.handle(Stop(worker=worker, period=period, last_round=last_round))

    def retire(self) -> None:
        """Do nothing more: the bucket begins again with a later epoch. What still comes lands, and is dropped."""
        self._messages.retire()

    def _post(self, worker: int) -> None:
        """Wait for the worker's next message, if there is a place for it."""
        buffers = self._buffers[worker]
        if buffers.is_posted or worker not in self.machine.alive:
            return
        if not buffers.free and len(buffers.places) < self._terms.window:
            buffers.free.append(len(buffers.places))
            buffers.places.append(self.bucket.make_up())
        if not buffers.free:
            return
        place = buffers.free.pop()
        buffers.is_posted = True
        self._messages.receive(worker, UP, buffers.places[place].memory, partial(self._landed, worker, place))

    def _landed(self, worker: int, place: int) -> None:
        buffers = self._buffers[worker]
        buffers.is_posted = False
        if worker not in self.machine.alive:
            return  # it was sent before this worker knew
        header = UpHeader.decode(buffers.places[place].memory)
        self.handle(_event(worker, place, header))
        self._post(worker)

    def handle(self, event: ServerEvent) -> None:
        """Tell the state machine what has happened, and do what it says."""
        for instruction in self.machine.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: ServerInstruction) -> None:
        match instruction:
            case Fold(contributions=given):
                weights = [one.weight for one in given]
                add_mean(self._cumulative, self._values(given), weights, scratch=self._mean)
            case Average(contributions=given):
                self._average = torch.empty(self.bucket.num_elements, dtype=self.bucket.dtype)
                average(self._values(given), [one.weight for one in given], out=self._average)
            case Clear():
                self._cumulative.zero_()
            case Release(worker=worker, place=place):
                self._buffers[worker].free.append(place)
                self._post(worker)
            case Reply():
                self._reply(instruction)
            case ReplyAverage():
                self._reply_average(instruction)
            case Fail():
                pass  # every rank sees the losses itself

    def _values(self, given: Iterable[Contribution]) -> list[torch.Tensor]:
        return [self._buffers[one.worker].places[one.place].values for one in given]

    def _reply(self, reply: Reply) -> None:
        message = self._outgoing(reply.worker)
        header = DownHeader(
            kind=Kind.SUM, period=reply.period, closed=reply.closed, clock=reply.clock, accepted=reply.accepted
        )
        header.encode(message.memory)
        message.values.copy_(self._cumulative)
        self._send(reply.worker, message)

    def _reply_average(self, reply: ReplyAverage) -> None:
        message = self._outgoing(reply.worker)
        dropped = tuple(self.machine.dropped(rank) for rank in range(self._terms.world_size))
        header = DownHeader(kind=Kind.AVERAGE, period=reply.period, clock=reply.iteration, dropped=dropped)
        header.encode(message.memory)
        message.values_as(self.bucket.dtype).copy_(self._average)
        self._send(reply.worker, message)

    def _outgoing(self, worker: int) -> Message:
        buffers = self._buffers[worker]
        if buffers.reply is None:
            buffers.reply = self.bucket.make_down(self._terms)
        return buffers.reply

    def _send(self, worker: int, message: Message) -> None:
        self._messages.send(worker, DOWN, message.memory, lambda: self.handle(Replied(worker=worker)))


def _event(worker: int, place: int, header: UpHeader) -> ServerEvent:
    if header.kind is Kind.PUSH:
        return Push(
            worker=worker,
            period=header.period,
            round_number=header.round_number,
            iteration=header.iteration,
            weight=header.weight,
            place=place,
        )
    if header.kind is Kind.END:
        return End(
            worker=worker,
            period=header.period,
            weight=header.weight,
            place=place,
            iteration=header.iteration,
        )
    return Hello(worker=worker, period=header.period, place=place, iteration=header.iteration)
