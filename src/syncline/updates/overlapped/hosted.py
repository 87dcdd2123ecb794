"""A server shard at work: receives what workers send, does what the state machine says, and replies.

Everything happens on the communication loop's thread. Memory: for each worker the pushes of open rounds (at most
``window``, by which workers bound themselves), the message that comes next and one reply; one cumulative sum, and the
average of a period's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

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
    Push,
    Reply,
    ReplyAverage,
    ServerInstruction,
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
        for worker in self.machine.alive:
            self._post(worker)

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
            if isinstance(instruction, Clear):
                self._cumulative.zero_()
            elif isinstance(instruction, Fold | Average):
                self._sum(instruction)
            elif isinstance(instruction, Reply):
                self._reply(instruction, self._cumulative)
            else:
                dropped = tuple(self.machine.dropped(rank) for rank in range(self._layout.world_size))
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
