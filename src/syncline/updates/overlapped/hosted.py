"""A server shard at work: receives what workers send, does what the state machine says, and replies.

Everything happens on the communication loop's thread. Memory: for each worker at most ``window`` messages (made when
they are first needed) and one reply, one cumulative sum, and one average for each part of a period's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from syncline.runtime.port import Port
from syncline.updates.overlapped.arithmetic import add_mean, average, sum_dtype
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
    Waiting,
)
from syncline.updates.overlapped.messages import (
    DownHeader,
    Kind,
    MessageKind,
    Question,
    UpHeader,
    decode_stop,
    encode_stop,
    tag,
)
from syncline.updates.overlapped.server import ServerShard
from syncline.updates.overlapped.terms import BucketTerms, Message, Terms


@dataclass(slots=True)
class _Mailbox:
    """The messages of one worker."""

    places: list[Message] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    number: int = 0
    """The next message that will come."""
    is_posted: bool = False
    reply: Message | None = None
    reply_number: int = 0
    question: Question = field(default_factory=Question)


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
        self._is_retired = False
        self._port = port
        self._terms = terms
        self._epoch = epoch
        self._cumulative = torch.zeros(bucket.num_elements, dtype=sum_dtype(bucket.dtype))
        self._mean = torch.empty_like(self._cumulative)
        self._averages: dict[int, torch.Tensor] = {}
        self._mailboxes = {worker: _Mailbox() for worker in self.machine.alive}
        for worker in self.machine.alive:
            self._post(worker)
            self._await_question(worker)
            if terms.ends_on_tree and epoch == 0:
                self._await_stop(worker, 0)

    @property
    def num_places(self) -> int:
        """Messages that this shard has room for."""
        return sum(len(mailbox.places) for mailbox in self._mailboxes.values())

    def lose(self, worker: int) -> None:
        """Go on without ``worker``."""
        if worker in self._mailboxes and worker in self.machine.alive:
            self._handle(Lost(worker=worker))

    def retire(self) -> None:
        """Do nothing more: the bucket begins again with a later epoch. What still comes lands, and is dropped."""
        self._is_retired = True

    def _post(self, worker: int) -> None:
        """Wait for the worker's next message, if there is a place for it."""
        mailbox = self._mailboxes[worker]
        if mailbox.is_posted or worker not in self.machine.alive:
            return
        if not mailbox.free and len(mailbox.places) < self._terms.window:
            mailbox.free.append(len(mailbox.places))
            mailbox.places.append(self.bucket.make_up())
        if not mailbox.free:
            return
        place = mailbox.free.pop()
        mailbox.is_posted = True
        self._port.receive(
            worker,
            tag(self.bucket.stream, MessageKind.UP, mailbox.number, epoch=self._epoch),
            mailbox.places[place].memory,
            urgency=self.bucket.urgency,
            on_received=partial(self._landed, worker, place),
        )

    def _landed(self, worker: int, place: int) -> None:
        mailbox = self._mailboxes[worker]
        mailbox.number += 1
        mailbox.is_posted = False
        if self._is_retired or worker not in self.machine.alive:
            return  # it was sent before this worker knew
        header = UpHeader.decode(mailbox.places[place].memory)
        self._handle(_event(worker, place, header))
        self._post(worker)

    def _handle(self, event: ServerEvent) -> None:
        if self._is_retired:
            return
        for instruction in self.machine.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: ServerInstruction) -> None:
        match instruction:
            case Fold(contributions=given):
                weights = [one.weight for one in given]
                add_mean(self._cumulative, self._values(given), weights, scratch=self._mean)
            case Average(part=part, contributions=given):
                out = self._averages.setdefault(part, torch.empty(self.bucket.num_elements, dtype=self.bucket.dtype))
                average(self._values(given), [one.weight for one in given], out=out)
            case Clear():
                self._cumulative.zero_()
            case Release(worker=worker, place=place):
                self._mailboxes[worker].free.append(place)
                self._post(worker)
            case Reply():
                self._reply(instruction)
            case ReplyAverage():
                self._reply_average(instruction)
            case Fail():
                pass  # every rank sees the losses itself

    def _values(self, given: Iterable[Contribution]) -> list[torch.Tensor]:
        return [self._mailboxes[one.worker].places[one.place].values for one in given]

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
        header = DownHeader(
            kind=Kind.AVERAGE,
            period=reply.period,
            closed=reply.part,
            clock=reply.iteration,
            is_last=reply.is_last,
            dropped=dropped,
        )
        header.encode(message.memory)
        message.values_as(self.bucket.dtype).copy_(self._averages[reply.part])
        self._send(reply.worker, message)

    def _outgoing(self, worker: int) -> Message:
        mailbox = self._mailboxes[worker]
        if mailbox.reply is None:
            mailbox.reply = self.bucket.make_down(self._terms)
        return mailbox.reply

    def _send(self, worker: int, message: Message) -> None:
        mailbox = self._mailboxes[worker]
        number, mailbox.reply_number = mailbox.reply_number, mailbox.reply_number + 1
        self._port.send(
            worker,
            tag(self.bucket.stream, MessageKind.DOWN, number, epoch=self._epoch),
            message.memory,
            urgency=self.bucket.urgency,
            connection_class=self.bucket.connection_class,
            on_sent=lambda: self._handle(Replied(worker=worker)),
        )

    def _await_stop(self, worker: int, number: int) -> None:
        """Learn that ``worker`` has ended a period, of each one after the other."""
        message = encode_stop(period=0, last_round=0)
        self._port.receive(
            worker,
            tag(self.bucket.stream, MessageKind.STOP, number, epoch=self._epoch),
            message,
            urgency=self.bucket.urgency,
            on_received=partial(self._stopped, worker, number, message),
        )

    def _stopped(self, worker: int, number: int, message: memoryview) -> None:
        if self._is_retired or worker not in self.machine.alive:
            return
        period, last_round = decode_stop(message)
        self._handle(Stop(worker=worker, period=period, last_round=last_round))
        self._await_stop(worker, number + 1)

    def _await_question(self, worker: int) -> None:
        """Tell ``worker`` whom this shard waits for, whenever it asks, which it does while it waits."""
        question = self._mailboxes[worker].question
        self._port.receive(
            worker,
            tag(self.bucket.stream, MessageKind.ASK, question.number, epoch=self._epoch),
            question.asked,
            urgency=self.bucket.urgency,
            on_received=partial(self._answer, worker),
        )

    def _answer(self, worker: int) -> None:
        if self._is_retired:
            return
        question = self._mailboxes[worker].question
        number, question.number = question.number, question.number + 1
        answer = Question.encode_answer(self.machine.missing())
        self._port.send(
            worker,
            tag(self.bucket.stream, MessageKind.ANSWER, number, epoch=self._epoch),
            answer,
            urgency=self.bucket.urgency,
            connection_class=self.bucket.connection_class,
        )
        self._await_question(worker)
        self._handle(Waiting(worker=worker))


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
            part=header.round_number,
            weight=header.weight,
            place=place,
            iteration=header.iteration,
            is_last=header.round_number == header.last_part,
        )
    return Hello(worker=worker, period=header.period, place=place, iteration=header.iteration)
