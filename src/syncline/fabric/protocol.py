"""What a fabric promises: messages between ranks, in no order but that of their urgency.

The engine and the update rules reach peers only through :class:`Transport`; whether sockets or plain memory are behind
it they cannot tell. Everything here is called on the communication loop's thread alone, and no callback may block.

A message has a *tag*, unique among the messages in flight from one rank to another, and a *signature*: 32 bits that say
which call it belongs to, so that two ranks that call different things never mix their bytes.

What all fabrics do alike with their one listener stands at the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

from syncline.errors import PeerLostError
from syncline.fabric.progress import PeerStalls, Progress
from syncline.fabric.slice_executor import SliceExecutor
from syncline.priorities.settings import Priorities

if TYPE_CHECKING:
    from syncline.fabric.statistics import FabricStatistics


ABORTED = "it aborted its fabric"
"""Why others lose a rank that gives no other reason."""
MAX_CONTROL_BYTES = 16384
"""A control message is small: it goes ahead of all data, and its receiver holds it in memory."""
MAX_TOLD_BYTES = 12 << 10
"""A message to many is smaller: it travels with the set of those whom it is for."""
BULK = 1 << 30
"""From this urgency on, nobody waits for a message: where slow links have smaller pieces, it moves in pieces of up to
64 KiB, since each wakes both ends. What is more urgent may wait for one of them from each sender."""


class PeerLeftError(PeerLostError):
    """A peer closed its fabric in good order: everything that it sent has arrived, and nothing more will.

    What was already under way without needing that peer may still finish.

    >>> PeerLeftError("rank 1 (host a1) has left", rank=1, host="a1").rank
    1
    """


class GivenUpError(PeerLostError):
    """A peer lives, and has given this rank up because others told it to.

    The rest have heard the same, or will: so whoever gets this accuses the peer to nobody.

    >>> GivenUpError("rank 1 (host a1) closed its connections to this rank", rank=1, host="a1").rank
    1
    """


class SendSettings(TypedDict):
    """Keyword arguments of :meth:`Transport.send`, for those who pass them on."""

    signature: int
    urgency: int
    connection_class: int
    on_sent: NotRequired[Callable[[], None] | None]


class ReceiveSettings(TypedDict):
    """Keyword arguments of :meth:`Transport.receive`, for those who pass them on."""

    signature: int
    urgency: int
    on_received: Callable[[], None]
    on_mismatch: NotRequired[Callable[[int], None] | None]


class FabricListener(Protocol):
    """Who is told what a fabric sees beside the messages that were asked for; on the communication loop's thread.

    >>> class Printer:
    ...     def on_peer_lost(self, peer, error): print(error)
    ...     def on_control(self, peer, payload): print(peer, payload)
    ...     def on_stall(self): print("some rank has hung")
    >>> async def listen():
    ...     first, second = memory_fabrics(2)
    ...     second.set_listener(Printer())
    ...     first.send_control(1, b"hello")
    ...     await first.close(); await asyncio.sleep(0)
    >>> asyncio.run(listen())
    0 b'hello'
    rank 0 (host memory) left: it closed its fabric
    """

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """``peer`` is gone for good: no message will arrive from it. Called once for each peer.

        The error is a :class:`~syncline.errors.PeerLostError`; it is a :class:`PeerLeftError` if ``peer`` closed its
        fabric in good order. Messages that had arrived before can still be received.
        """

    def on_control(self, peer: int, payload: bytes) -> None:
        """Take a small out-of-band message; those of one peer come in the order in which it sent them."""

    def on_stall(self) -> None:
        """Look for who is stalled (:attr:`Transport.stalls`): there are more such ranks than before."""


class Transport(Protocol):
    """Moves messages between ranks: all that an engine, its executor and ports know of the network.

    All is called on the communication loop's thread, and returns at once. ``tag`` (up to 64 bits) is unique among the
    messages in flight from one rank to another; ``signature`` (32 bits) is the same at both ends. A closed transport
    raises :class:`~syncline.errors.FabricClosedError`.

    >>> async def exchange():
    ...     first, second = memory_fabrics(2)
    ...     landed, there = bytearray(4), asyncio.Event()
    ...     second.receive(0, 7, memoryview(landed), signature=1, urgency=0, on_received=there.set)
    ...     first.send(1, 7, memoryview(b"four"), signature=1, urgency=0, connection_class=0)
    ...     await there.wait()
    ...     return bytes(landed)
    >>> asyncio.run(exchange())
    b'four'
    """

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """What errors call its ranks: the job's own numbers, which are other ones where the job has lost ranks."""

    def send(
        self,
        peer: int,
        tag: int,
        payload: memoryview,
        *,
        signature: int,
        urgency: int,
        connection_class: int,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue ``payload`` (C-contiguous bytes, unchanged until ``on_sent``) for ``peer``; lower urgency goes first.

        ``on_sent`` says that the memory is free again, not that the message was received; it never runs inside this
        call. A send to a peer that is lost is dropped, ``on_sent`` with it: the loss was reported to the listener.
        A ``connection_class`` beyond those that are open goes with the last of them; the receiver need not know it.
        """

    def receive(
        self,
        peer: int,
        tag: int,
        destination: memoryview,
        *,
        signature: int,
        urgency: int,
        on_received: Callable[[], None],
        on_mismatch: Callable[[int], None] | None = None,
    ) -> None:
        """Let the message ``tag`` of ``peer`` land in ``destination`` (writable bytes of exactly its size).

        ``on_received`` never runs inside this call. A large message is granted in the order of the ``urgency`` of its
        sender; this one orders what the sender has not announced yet. If the message has another signature or size,
        nothing is written, and ``on_mismatch`` is told its signature.
        """

    def cancel(self, peer: int, tag: int) -> None:
        """Forget a posted receive; its destination is not written any more after this returns.

        If a part of the message had arrived, the rest is thrown away.
        """

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes in these streams (the highest 16 bits of tags) from now on, and what came early.

        For streams in which nothing is received any more, here and later; what is thrown away is counted.
        """

    def send_control(self, peer: int, payload: bytes) -> None:
        """Send at most 16 KiB ahead of all data; the peer's listener gets it in :meth:`FabricListener.on_control`."""

    def tell(self, peers: Collection[int], payload: bytes) -> None:
        """Send a control message of at most 12 KiB to each of ``peers`` that is not lost.

        Others pass it on where there is no connection. What one rank tells the same peers, they get in its order.
        """

    def pass_on(self, peer: int, payload: bytes) -> None:
        """Send a control message on which nothing depends; where there is no connection, others pass it on.

        It gets lost with one of them.
        """

    @property
    def unconnected(self) -> Set[int]:
        """The ranks that are neither connected nor lost; of a job's own fabric a live set."""

    def when_connected(self, peers: Collection[int], then: Callable[[], None]) -> None:
        """Call ``then`` once there are connections to all of ``peers`` that are not lost; at once if there are.

        What an executor sends and receives needs them; :meth:`send` and :meth:`send_control` open them themselves.
        """

    def is_lost(self, peer: int) -> bool:
        """Whether ``peer`` was reported lost."""

    def is_local(self, peer: int) -> bool:
        """Whether ``peer`` runs on this machine, as far as its address tells, and may use memory that both share."""

    def describe_peer(self, peer: int) -> str:
        """``"rank 3 (host b1)"``."""

    @property
    def stalls(self) -> PeerStalls:
        """What the others have told of theirs."""

    def open_executor(self, reference: SliceExecutor, most_bytes: int, ranks: Sequence[int] = ()) -> SliceExecutor:
        """Return who executes slices here: ``reference``, or compiled code that does the same, to the bit.

        ``reference`` sends and receives on this transport; rank k of its calls is ``ranks[k]`` here (none: k). Compiled
        code has slices of at most ``most_bytes`` under way in a connection class.
        """


class Fabric(Transport, Protocol):
    """A transport from its opening to its end, as whoever owns it sees it.

    >>> async def open_and_close():
    ...     fabrics = memory_fabrics(2)
    ...     await asyncio.gather(*(fabric.close() for fabric in fabrics))
    ...     return fabrics[0]
    >>> asyncio.run(open_and_close())
    <MemoryFabric rank 0 of 2: closed>
    """

    def set_listener(self, listener: FabricListener) -> None:
        """Tell ``listener`` from now on (one listener; what happened before is delivered at once)."""

    @property
    def progress(self) -> Progress:
        """What this rank's training threads have begun; the fabric tells the others, with its heartbeats."""

    async def open_classes(self, priorities: Priorities, *, timeout_s: float, only_check: bool = False) -> None:
        """Open the further connections of ``priorities`` to every peer, and mark all; all ranks call this alike.

        Returns when every peer has them too; at once if they are open. From then on messages, windows and grants have
        the sizes of several classes. Raises ``ConfigurationError`` if ranks ask for different ones, ``HandshakeError``
        (who is missing) at the deadline, ``PeerLostError``; then they stay closed. In memory, where there are no
        connections, every class is there and nobody is asked. With ``Priorities.off()``, sizes are those of one class
        again, also of what neighbours send unasked; connections stay open, unused.

        With ``only_check`` nothing is opened yet: raises ``ConfigurationError`` if other classes, open or checked, do
        not go with these, or if this process may not open as many files.
        """

    def statistics(self) -> FabricStatistics:
        """Return a frozen record of what was sent, received, queued and refused."""

    async def close(self) -> None:
        """Send what is queued, say goodbye, and release every socket and task, all within the close deadline.

        It never raises for peers that do not answer: what they did not take by then is dropped.
        """

    def abort(self, reason: str = ABORTED) -> None:
        """Release everything at once, without goodbye; peers see this rank as lost, for this ``reason``."""


def call_back(callback: Callable[[], object]) -> None:
    """Call ``callback``; what it raises goes to the loop's exception handler, as from any callback of the loop."""
    try:
        callback()
    except Exception as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"a callback of the fabric failed: {error!r}", "exception": error}
        )


MAX_BACKLOG_BYTES = 16 << 20
"""Control messages of one peer that are kept until somebody listens: a start may take its time."""
COST_BYTES = 256
"""What keeping a message costs beside its bytes."""

Event = Callable[[FabricListener], None]


class ListenerSlot:
    """Tells the listener, or keeps what there is to tell; a listener's mistake breaks nothing here."""

    def __init__(self) -> None:
        self._listener: FabricListener | None = None
        self._backlog: list[Event] = []
        self._backlog_bytes: Counter[int] = Counter()

    def listen(self, listener: FabricListener) -> None:
        """Tell ``listener`` from now on; what happened before is told at once."""
        self._listener = listener
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.tell(event)

    def has_room(self, peer: int, num_bytes: int) -> bool:
        """Whether a message of ``peer`` may be told; False if nobody listens and too much of it is kept already."""
        if self._listener is not None:
            return True
        self._backlog_bytes[peer] += num_bytes + COST_BYTES
        return self._backlog_bytes[peer] <= MAX_BACKLOG_BYTES

    def tell(self, event: Event) -> None:
        """Tell an event, at once or when somebody is there."""
        if self._listener is None:
            self._backlog.append(event)
        else:
            call_back(partial(event, self._listener))
