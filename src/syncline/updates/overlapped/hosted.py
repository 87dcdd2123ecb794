"""A server shard at work: receives what workers send, does what the state machine says, and replies.

Everything happens on the communication loop's thread. Memory: for each worker the pushes of open rounds (at most
``window``, by which workers bound themselves), the message that comes next and one reply; one cumulative sum, and the
average of a period's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from syncline.runtime.port import Port
from syncline.updates.flat import sum_dtype
from syncline.updates.overlapped.arithmetic import add_mean, average
from syncline.updates.overlapped.events import (
    Average,
    Clear,
    End,
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
from syncline.updates.overlapped.messages import DOWN, UP, BucketLayout, Message
from syncline.updates.overlapped.placement import ServerLayout
from syncline.updates.overlapped.server import ServerShard


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
    ) -> None:
        """Host ``bucket`` from now on; ``epoch`` is the number of servers that it had before, which are dead."""
        self.bucket = bucket
        self.machine = ServerShard(
            workers=layout.workers,
            quorum=layout.quorum,
            window=layout.window,
            lost=[rank for rank in lost if rank in layout.workers],
            succeeds=epoch > 0,
            ends_elsewhere=layout.ends_on_tree and epoch == 0,
            shrinks=layout.shrinks,
        )
        self._layout = layout
        self._messages = bucket.open_messages(port, epoch=epoch)
        self._cumulative = torch.zeros(bucket.num_elements, dtype=sum_dtype(bucket.dtype))
        self._mean = torch.empty_like(self._cumulative)
        self._average = torch.empty(0)
        self._landed: dict[int, Message] = {}
        """What the state machine has not released yet, by place."""
        self._places = count()
        for worker in self.machine.alive:
            self._post(worker)

    def lose(self, worker: int) -> None:
        """Go on without ``worker``."""
        if worker in self.machine.alive:
            self.handle(Lost(worker=worker))

    def stop(self, worker: int, *, period: int, last_round: int) -> None:
        """Note that ``worker`` ended a period that is averaged elsewhere; it may say so before it knows of a move."""
        if self._messages.epoch == 0 and worker in self.machine.alive:
            self.handle(Stop(worker=worker, period=period, last_round=last_round))

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
        place = next(self._places)
        self._landed[place] = message
        self.handle(replace(event, worker=worker, place=place))
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
            case Release(place=place):
                del self._landed[place]
            case Reply():
                self._reply(instruction, self._cumulative)
            case ReplyAverage():
                dropped = tuple(self.machine.dropped(rank) for rank in range(self._layout.world_size))
                self._reply(replace(instruction, dropped=dropped), self._average)

    def _values(self, given: Iterable[Push | End | Hello]) -> list[torch.Tensor]:
        return [self._landed[one.place].values for one in given]

    def _reply(self, reply: Reply | ReplyAverage, values: torch.Tensor) -> None:
        message = self.bucket.make_down()
        message.write(reply)
        message.values_as(values.dtype).copy_(values)
        self._messages.send(reply.worker, DOWN, message.memory, lambda: self.handle(Replied(worker=reply.worker)))
