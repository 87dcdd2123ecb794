"""A group: some ranks of a job, on the job's own fabric, as if they were a job of their own.

A member's rank in its group is its place in the group's list. Errors name the job's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from syncline.errors import ConfigurationError
from syncline.fabric import ABORTED, Fabric, FabricListener
from syncline.fabric.progress import MemberStalls
from syncline.fabric.protocol import FabricStatistics, ReceiveSettings, SendSettings
from syncline.fabric.slice_executor import SliceExecutor
from syncline.runtime.relay import Relay, enclose


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

    def open_executor(self, reference: SliceExecutor, ranks: Sequence[int] | None = None) -> SliceExecutor:
        """Return who executes slices on the job's fabric."""
        members = self.members if ranks is None else [self.members[rank] for rank in ranks]
        return self._fabric.open_executor(reference, members)

    async def open_classes(self, *_: object, **__: object) -> None:
        """Refuse: connections are the job's."""
        raise ConfigurationError("Connection classes are opened by all ranks of a job together, not by a group")

    async def use_one_class(self) -> None:
        """Leave the job's connections alone."""

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
        self.stalls.close()
        self._relay.remove_group(self)

    def abort(self, reason: str = ABORTED) -> None:  # noqa: ARG002 - its ranks go on elsewhere
        """Listen no more."""
        self.stalls.close()
        self._relay.remove_group(self)

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """Pass on the loss of a member."""
        if peer in self.members:
            self._listening.on_peer_lost(self.members.index(peer), error)

    def on_control(self, peer: int, payload: bytes) -> None:
        """Pass on what another member's engine tells."""
        if peer in self.members:
            self._listening.on_control(self.members.index(peer), payload)

    @property
    def _listening(self) -> FabricListener:
        assert self._listener is not None, "a group is with the relay only while someone listens"
        return self._listener


def place_in_job(fabric: Fabric) -> tuple[tuple[int, ...], int]:
    """Return the job's numbers of the ranks of ``fabric``, and the stream of the calls that its user makes."""
    if isinstance(fabric, GroupFabric):
        return fabric.members, fabric.streams.start
    return tuple(range(fabric.world_size)), 0
