"""Which streams of the world's connections are a group's: its first rank takes a range, and tells the others.

Only the members of a group talk about it, through the store, so that disjoint groups are made at once, and groups are
made although another one has failed; two ranks make the groups that they share in one order, as PyTorch asks. Keys
carry a token of the world, which no earlier world in the same store has had.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from syncline.errors import ConfigurationError, PeerLostError, RendezvousError
from syncline.fabric.slice_executor import NUM_STREAMS

STREAMS_OF_A_GROUP = 4
"""The first for the calls of the communicator's own methods, the third for staged calls, the last for messages."""
MAX_GROUPS = (NUM_STREAMS - 1) // STREAMS_OF_A_GROUP - 1
FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02


class GroupStreams:
    """Gives out the streams of one world; ``token`` is the same on all of its ranks, and of no other world.

    They come after ``first``: another world has had those before it, on the same connections.
    """

    def __init__(self, store: Any, *, token: str, first: int = 0) -> None:
        self._store = store
        self._token = token
        self._first = first
        self.next_stream = first + STREAMS_OF_A_GROUP
        """The first that is free, as far as this rank knows."""
        self._num_uses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(
        self,
        ranks: Sequence[int],
        *,
        rank: int,
        timeout_s: float,
        is_lost: Callable[[int], bool],
        purpose: str = "",
        num_groups: int = 1,
    ) -> range:
        """Return the streams of the next group of ``ranks`` for this ``purpose``, or of several, which all ask for.

        PyTorch's name of the group does not serve: it counts the groups that each rank has seen, if only members meet.
        Raises :class:`PeerLostError` if its first rank is lost meanwhile, :class:`RendezvousError` if that does not
        come within ``timeout_s``, :class:`ConfigurationError` when the world has had too many groups.
        """
        members = hashlib.sha256(f"{purpose}{tuple(ranks)}".encode()).hexdigest()
        with self._lock:
            self._num_uses[members] += 1
            key = f"syncline/{self._token}/{members}/{self._num_uses[members]}"
        if rank == ranks[0]:
            number = int(self._store.add(f"syncline/{self._token}/groups", num_groups)) - num_groups + 1
            self._store.set(key, str(number))
        else:
            number = self._wait(key, ranks[0], timeout_s=timeout_s, is_lost=is_lost)
        most = MAX_GROUPS - self._first // STREAMS_OF_A_GROUP
        if number + num_groups - 1 > most:
            raise ConfigurationError(
                f"This is group {number} of one world, which has streams for {most}; make groups once and keep "
                "them, or destroy the world's group and open it again"
            )
        start = self._first + number * STREAMS_OF_A_GROUP
        stop = start + num_groups * STREAMS_OF_A_GROUP
        self.next_stream = max(self.next_stream, stop)
        return range(start, stop)

    def open_store(self, streams: range, name: str) -> Any:
        """Return a part of the world's store for the group that has ``streams``, and for ``name``, alone."""
        return PrefixStore(f"syncline/{self._token}/{streams.start}/{name}", self._store)

    def _wait(self, key: str, first: int, *, timeout_s: float, is_lost: Callable[[int], bool]) -> int:
        deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while not self._store.check([key]):
            if is_lost(first):
                text = f"rank {first}, the first of a new group, is lost, so the group cannot be made; make one without"
                raise PeerLostError(text, rank=first, host="")
            if time.monotonic() > deadline_s:
                raise RendezvousError(
                    f"rank {first}, the first of a new group, did not come to make it within {timeout_s:g} s; let all "
                    "its ranks call new_group()"
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        return int(self._store.get(key))
