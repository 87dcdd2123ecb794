"""The link between the two ranks of a pair: messages in order, the next one received once the last was taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from syncline.errors import DeadlineError
from syncline.observe import Trace
from syncline.runtime.port import Port
from syncline.runtime.tags import first_tag
from syncline.updates.memory import bytes_of
from syncline.updates.phased.messages import HEADER_BYTES, Message, decode


class PairLink:
    """One end. ``on_message`` is told, on the loop's thread, of each message when all of it is here.

    A message's tags are those of ``stream`` and its running number; its header is slice 0, its tensors the others.
    Public methods may be called on any thread.
    """

    def __init__(
        self, port: Port, *, partner: int, stream: int, on_message: Callable[[Message], None], trace: Trace
    ) -> None:
        self.partner = partner
        self.sent_bytes = 0
        self._port = port
        self._stream = stream
        self._on_message = on_message
        self._trace = trace
        self._num_sent = self._num_received = 0
        self._unsent: dict[int, list[memoryview]] = {}
        """Memory of each message that is on its way, until it may be used for something else."""
        self._changed = threading.Condition()
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._num_missing = 0

    def open(self) -> None:
        """Receive from now on."""
        self._port.call_soon(self._receive_header)

    def send(self, message: Message) -> None:
        """Send ``message``, whose tensors nobody changes any more."""
        header = message.encode()
        parts = [header, *(bytes_of(tensor) for tensor in message.tensors if tensor is not None)]
        with self._changed:
            number, self._num_sent = self._num_sent, self._num_sent + 1
            self._unsent[number] = parts
            self.sent_bytes += sum(len(part) for part in parts)
        self._port.call_soon(self._send, number, message, parts)

    def wait_sent(self, timeout_s: float) -> None:
        """Wait until everything has left, so that no rank runs ahead of its partner without bounds."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unsent, timeout_s):
                raise DeadlineError(
                    f"{self._port.describe_peer(self.partner)} took nothing for {timeout_s:g} s: {len(self._unsent)} "
                    "messages to it have not left; it is far behind, or does not call step()"
                )

    def give_up(self) -> None:
        """Let nobody wait for what will not leave any more."""
        with self._changed:
            self._unsent.clear()
            self._changed.notify_all()

    def _send(self, number: int, message: Message, parts: list[memoryview]) -> None:
        start_ns = self._trace.now_ns()
        for index, part in enumerate(parts):
            if part.nbytes:
                self._port.send(
                    self.partner,
                    first_tag(self._stream, number, index),
                    part,
                    urgency=-1,
                    on_sent=partial(self._sent, number, message, part, start_ns),
                )
            else:
                self._sent(number, message, part, start_ns)

    def _sent(self, number: int, message: Message, part: memoryview, start_ns: int) -> None:
        with self._changed:
            left = self._unsent.get(number)
            if left is None:
                return
            left[:] = [other for other in left if other is not part]
            if left:
                return
            del self._unsent[number]
            self._changed.notify_all()
        self._trace.span(f"send for {message.phase}", "communication", start_ns, self._trace.now_ns())

    def _receive_header(self) -> None:
        tag = first_tag(self._stream, self._num_received, 0)
        self._port.receive(self.partner, tag, self._header, urgency=-1, on_received=self._on_header)

    def _on_header(self) -> None:
        message = decode(self._header)
        tensors = [tensor for tensor in message.tensors if tensor is not None]
        filled = [(index, tensor) for index, tensor in enumerate(tensors, 1) if tensor.nbytes]
        self._num_missing = len(filled)
        if not filled:
            self._complete(message)
        for index, tensor in filled:
            self._receive_tensor(message, index, tensor)

    def _receive_tensor(self, message: Message, index: int, tensor: torch.Tensor) -> None:
        tag = first_tag(self._stream, self._num_received, index)
        received = partial(self._on_tensor, message)
        self._port.receive(self.partner, tag, bytes_of(tensor), urgency=-1, on_received=received)

    def _on_tensor(self, message: Message) -> None:
        self._num_missing -= 1
        if not self._num_missing:
            self._complete(message)

    def _complete(self, message: Message) -> None:
        self._num_received += 1
        self._on_message(message)

    def take_next(self) -> None:
        """Receive the next message: the last one was taken."""
        self._port.call_soon(self._receive_header)
