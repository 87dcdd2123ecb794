"""The relay: a communicator's one listener on its fabric, which hands what happens to whom it concerns.

That is the engine of all ranks, the ports, and the groups: some ranks of the job, on the job's own fabric, that make
collectives among themselves as if they were a job of their own, with an engine of their own. A member's rank in its
group is its place in the group's list; errors name the job's ranks. A group's control messages travel in an envelope
with the group's number.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from syncline.errors import ConfigurationError, FabricClosedError, FabricError
from syncline.fabric import ABORTED, Fabric, FabricListener
from syncline.fabric.progress import MemberStalls
from syncline.fabric.protocol import ReceiveSettings, SendSettings
from syncline.fabric.slice_executor import SliceExecutor

if TYPE_CHECKING:
    from syncline.fabric.statistics import FabricStatistics

LossHandler = Callable[[int, Exception], None]
ControlHandler = Callable[[int, bytes], None]

_ENVELOPE = struct.Struct("<BH")
_GROUP = 0xFF
"""The first byte of an envelope; no kind of control message of an engine has it."""
_GROUP_BYTE = bytes([_GROUP])
MAX_EARLY_BYTES = 4 << 20
"""What one rank may tell groups that this one has not opened yet, all together; some ten thousand calls."""
COST_BYTES = 256
"""What keeping a message costs beside its bytes."""


def enclose(number: int, payload: bytes) -> bytes:
    """Return a control message of group ``number`` as it travels."""
    return _ENVELOPE.pack(_GROUP, number) + payload


class Told:
    """Control messages that are of no engine; a member as a group is, of which losses are told elsewhere."""

    def __init__(self, number: int, on_control: ControlHandler) -> None:
        self.streams = range(number, number + 1)
        self.on_control = on_control

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """Ports watch losses by themselves."""

    def on_stall(self) -> None:
        """And they look for stalled ranks themselves."""

    def enclose(self, payload: bytes) -> bytes:
        """Return a message to the same number elsewhere as it travels."""
        return enclose(self.streams.start, payload)


class Relay:
    """The fabric's listener: hands everything to the engine or to a group, and losses to everyone."""

    def __init__(self, engine: FabricListener) -> None:
        self._engine = engine
        self._groups: dict[int, GroupFabric | Told] = {}
        self._ended_groups: set[int] = set()
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        self._early_bytes: Counter[int] = Counter()
        self._spoilt: dict[int, int] = {}  # groups of which messages were dropped, and who sent too many
        self._losses: dict[int, Exception] = {}
        self.handlers: list[LossHandler] = []

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """Tell the engines first: their errors name what was under way."""
        self._losses[peer] = error
        self._engine.on_peer_lost(peer, error)
        for group in tuple(self._groups.values()):
            group.on_peer_lost(peer, error)
        for handler in tuple(self.handlers):
            handler(peer, error)

    def on_stall(self) -> None:
        """Let every engine look for who is stalled."""
        self._engine.on_stall()
        for group in tuple(self._groups.values()):
            group.on_stall()

    def losses(self) -> tuple[tuple[int, Exception], ...]:
        """Return who is lost or has left, and what was told of it."""
        return tuple(self._losses.items())

    def end(self, rank: int) -> None:
        """Tell the ports that this very rank leaves, so that nobody waits on them."""
        error = FabricClosedError(f"the communicator of rank {rank} is closed; open a new one with syncline.init()")
        handlers, self.handlers = self.handlers, []
        for handler in handlers:
            handler(rank, error)

    def on_control(self, peer: int, payload: bytes) -> None:
        """Hand a control message to the engine, or to its group, which may not have been opened here yet."""
        if payload[:1] != _GROUP_BYTE or len(payload) < _ENVELOPE.size:
            self._engine.on_control(peer, payload)
            return
        _, number = _ENVELOPE.unpack_from(payload)
        inner = payload[_ENVELOPE.size :]
        if number in self._groups:
            self._groups[number].on_control(peer, inner)
        elif number not in self._ended_groups and number not in self._spoilt:
            self._keep(number, peer, inner)

    def add_group(self, group: GroupFabric | Told) -> None:
        """Tell ``group`` from now on, and what was for it before; FabricError if that was too much to be kept."""
        number = group.streams.start
        if number in self._spoilt:
            raise FabricError(
                f"Rank {self._spoilt[number]} told groups more than {MAX_EARLY_BYTES >> 20} MiB before this rank "
                f"opened group {number}, and messages were dropped; let all its ranks open a group before they make "
                "many calls"
            )
        self._groups[number] = group
        for peer, error in self._losses.items():
            group.on_peer_lost(peer, error)
        for peer, payload in self._take_early(number):
            group.on_control(peer, payload)

    def remove_group(self, group: GroupFabric | Told) -> None:
        """Drop whatever still comes for ``group``."""
        if self._groups.pop(group.streams.start, None) is not None:
            self._ended_groups.add(group.streams.start)

    def _keep(self, number: int, peer: int, payload: bytes) -> None:
        """Keep a message for a group that is not open yet; if ``peer`` sends too much, forget all that is the group's.

        A group that has missed one message cannot be used: it would wait for it until its deadline.
        """
        self._early.setdefault(number, []).append((peer, payload))
        self._early_bytes[peer] += len(payload) + COST_BYTES
        if self._early_bytes[peer] > MAX_EARLY_BYTES:
            self._take_early(number)
            self._spoilt[number] = peer

    def _take_early(self, number: int) -> list[tuple[int, bytes]]:
        early = self._early.pop(number, [])
        for peer, payload in early:
            self._early_bytes[peer] -= len(payload) + COST_BYTES
        return early


class GroupFabric:
    """The fabric of a job as the members of one group see it; closing it leaves the job's open.

    Every member opens it alike; rank k of the group is ``members[k]``. ``streams`` are the group's alone, the first of
    them for the calls of its communicator's own methods. What fails in a group ends the group, and not the job.
    """

    def __init__(self, fabric: Fabric, relay: Relay, members: Sequence[int], *, streams: range) -> None:
        self.members = tuple(members)
        if len(set(self.members)) != len(self.members) or not all(0 <= k < fabric.world_size for k in self.members):
            raise ConfigurationError(
                f"A group lists each of its ranks once, from 0 to {fabric.world_size - 1}, not {list(self.members)}"
            )
        if fabric.rank not in self.members:
            raise ConfigurationError(
                f"Rank {fabric.rank} cannot open a group that it is not in: {list(self.members)}; let its members do so"
            )
        self.rank, self.world_size = self.members.index(fabric.rank), len(self.members)
        self.numbers = tuple(fabric.numbers[rank] for rank in self.members)
        """What errors call the ranks."""
        self.streams = streams
        self._fabric = fabric
        self._relay = relay
        self._listener: FabricListener | None = None
        self.progress = fabric.progress
        self.stalls = MemberStalls(fabric.stalls, self.members)

    def set_listener(self, listener: FabricListener) -> None:
        """Tell ``listener``, the only one, from now on; what happened before is delivered at once."""
        self._listener = listener
        self._relay.add_group(self)

    def send(self, peer: int, tag: int, payload: memoryview, **settings: Unpack[SendSettings]) -> None:
        """Send to a member."""
        self._fabric.send(self.members[peer], tag, payload, **settings)

    def receive(self, peer: int, tag: int, destination: memoryview, **settings: Unpack[ReceiveSettings]) -> None:
        """Receive from a member."""
        self._fabric.receive(self.members[peer], tag, destination, **settings)

    def cancel(self, peer: int, tag: int) -> None:
        """Forget a posted receive."""
        self._fabric.cancel(self.members[peer], tag)

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes in streams that are over."""
        self._fabric.drop_streams(streams)

    def send_control(self, peer: int, payload: bytes) -> None:
        """Send a control message to the group's listener at a member."""
        self._fabric.send_control(self.members[peer], enclose(self.streams.start, payload))

    def tell(self, peers: Collection[int], payload: bytes) -> None:
        """Send a control message to the group's listeners at some members."""
        self._fabric.tell([self.members[peer] for peer in peers], enclose(self.streams.start, payload))

    def pass_on(self, peer: int, payload: bytes) -> None:
        """Send a control message to the group's listener at a member, on which nothing depends."""
        self._fabric.pass_on(self.members[peer], enclose(self.streams.start, payload))

    @property
    def unconnected(self) -> Set[int]:
        """The members that are neither connected nor lost."""
        unconnected = self._fabric.unconnected
        return {place for place, rank in enumerate(self.members) if rank in unconnected} if unconnected else unconnected

    def when_connected(self, peers: Collection[int], then: Callable[[], None]) -> None:
        """Call ``then`` once there are connections to some members."""
        self._fabric.when_connected([self.members[peer] for peer in peers], then)

    def open_executor(self, reference: SliceExecutor, most_bytes: int, ranks: Sequence[int] = ()) -> SliceExecutor:
        """Return who executes slices on the job's fabric."""
        members = [self.members[rank] for rank in ranks] or self.members
        return self._fabric.open_executor(reference, most_bytes, members)

    async def open_classes(self, *_: object, **__: object) -> None:
        """Refuse: connections are the job's."""
        raise ConfigurationError("Connection classes are opened by all ranks of a job together, not by a group")

    def is_lost(self, peer: int) -> bool:
        """Whether a member was reported lost."""
        return self._fabric.is_lost(self.members[peer])

    def is_local(self, peer: int) -> bool:
        """Whether a member runs on this machine."""
        return self._fabric.is_local(self.members[peer])

    def describe_peer(self, peer: int) -> str:
        """``"rank 3 (host b1)"``, as the job numbers it."""
        return self._fabric.describe_peer(self.members[peer])

    def statistics(self) -> FabricStatistics:
        """Return the job's counters of connections between members."""
        whole = self._fabric.statistics()
        place = {rank: index for index, rank in enumerate(self.members)}
        kept = [replace(one, peer=place[one.peer]) for one in whole.connections if one.peer in place]
        lost = tuple(place[rank] for rank in whole.lost_peers if rank in place)
        suspect = tuple(place[rank] for rank in whole.suspect_peers if rank in place)
        return replace(whole, rank=self.rank, connections=tuple(kept), lost_peers=lost, suspect_peers=suspect)

    async def close(self) -> None:
        """Listen no more."""
        self.abort()

    def abort(self, reason: str = ABORTED) -> None:  # noqa: ARG002 - its ranks go on elsewhere
        """Listen no more."""
        self._relay.remove_group(self)

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """Pass on the loss of a member."""
        if peer in self.members:
            self._listening.on_peer_lost(self.members.index(peer), error)

    def on_control(self, peer: int, payload: bytes) -> None:
        """Pass on what another member's engine tells."""
        if peer in self.members:
            self._listening.on_control(self.members.index(peer), payload)

    def on_stall(self) -> None:
        """Let the group's engine look whether a member is stalled."""
        self._listening.on_stall()

    @property
    def _listening(self) -> FabricListener:
        assert self._listener is not None, "a group is with the relay only while someone listens"
        return self._listener


def place_in_job(fabric: Fabric) -> tuple[tuple[int, ...], int]:
    """Return the job's numbers of the ranks of ``fabric``, and the stream of the calls that its user makes."""
    if isinstance(fabric, GroupFabric):
        return fabric.members, fabric.streams.start
    return tuple(range(fabric.world_size)), 0
