"""The link between the two ranks of a pair: messages in order, the next one received once the last was taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from syncline.errors import DeadlineError
from syncline.observe import Trace
from syncline.runtime.port import Port
from syncline.runtime.relay import LossHandler
from syncline.updates.memory import bytes_of
from syncline.updates.messaging.mailbox import Mailbox, MessageStream
from syncline.updates.phased.messages import Message, decode


class PairLink:
    """One end. ``on_message`` is told, on the loop's thread, of each message when all of it is here.

    Public methods may be called on any thread.
    """

    def __init__(
        self,
        port: Port,
        *,
        partner: int,
        stream: int,
        on_message: Callable[[Message], None],
        on_lost: LossHandler,
        trace: Trace,
    ) -> None:
        self.partner = partner
        self._port = port
        self._trace = trace
        self._num_sent = 0
        self._unsent: set[int] = set()
        """Numbers of the messages that are on their way, whose memory is not to be used for something else."""
        self._changed = threading.Condition()
        messages = MessageStream(port, stream, urgency=-1)
        self._mailbox = Mailbox(
            messages, messages, decode=decode, on_message=lambda _, message: on_message(message), on_lost=on_lost
        )

    def open(self) -> None:
        """Receive from now on."""
        self.take_next()

    @property
    def sent_bytes(self) -> int:
        """Bytes that were sent to the partner."""
        return self._mailbox.sent_bytes.total()

    def send(self, message: Message) -> None:
        """Send ``message``, whose tensors nobody changes any more."""
        with self._changed:
            number, self._num_sent = self._num_sent, self._num_sent + 1
            self._unsent.add(number)
        self._port.call_soon(self._send, number, message)

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

    def take_next(self) -> None:
        """Receive the next message: the last one was taken."""
        self._port.call_soon(self._mailbox.listen, self.partner)

    def _send(self, number: int, message: Message) -> None:
        payloads = [bytes_of(tensor) for tensor in message.tensors if tensor is not None]
        sent = partial(self._sent, number, message, self._trace.now_ns())
        self._mailbox.send(self.partner, message.encode(), payloads, sent)

    def _sent(self, number: int, message: Message, start_ns: int) -> None:
        with self._changed:
            self._unsent.discard(number)
            self._changed.notify_all()
        self._trace.span(f"send for {message.phase}", "communication", start_ns, self._trace.now_ns())
