"""How much may be under way to one rank: as little as keeps its link busy.

What is under way cannot be called back, so an urgent message waits for a whole window of it, and its request for one
more. Too small a window lets the link idle until hosts have answered, and how long they take is not known: tens of
microseconds on a quiet machine, milliseconds where ranks wait for a core. But it shows. Where L bytes are under way on
average and an arrival takes W seconds from its grant, L / W bytes arrive in a second (Little's law): if that is the
link's rate, a smaller window may do, and if it is less, the link idles, or what comes to it is held up elsewhere. So
the window follows L / W in small steps, between two bounds. (The mirror image of :mod:`syncline.fabric.link_share`,
whose queue belongs to several receivers.) Everything here is pure: time comes in as an argument.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

BUSY = 0.92
"""A link that brings this part of its rate is busy; 0.956 of it is payload."""
NUM_WINDOWS = 2
"""How many windows must arrive before the next step."""
GROWTH, DECAY = 1.25, 0.85


class GrantWindow:
    """The bytes that may be granted and not yet here, from ``least_bytes`` to ``most_bytes``; it begins with the most.

    Equal bounds, or a link of unknown rate, keep it as it is.
    """

    def __init__(self, most_bytes: int, *, least_bytes: int | None = None, bytes_per_s: float = math.inf) -> None:
        self.num_bytes = most_bytes
        self.most_bytes = most_bytes
        self.least_bytes = min(most_bytes, least_bytes or most_bytes)
        self.bytes_per_s = bytes_per_s
        self._begin()

    @property
    def is_fixed(self) -> bool:
        """Whether nothing can be learnt."""
        return self.least_bytes == self.most_bytes or math.isinf(self.bytes_per_s)

    def learn(self, num_bytes: int, *, underway_bytes: int, took_s: float) -> None:
        """Note that ``num_bytes`` came ``took_s`` after their grant, and ``underway_bytes`` were under way with them.

        Where less was under way than might have been, the window was not what held the link up.
        """
        if underway_bytes < self.num_bytes:
            return
        self._num_learnt_bytes += num_bytes
        self._sum_underway_bytes += underway_bytes * num_bytes
        self._sum_took_s += took_s * num_bytes
        if self._num_learnt_bytes >= NUM_WINDOWS * self.num_bytes:
            is_busy = self._sum_underway_bytes >= BUSY * self.bytes_per_s * self._sum_took_s
            wanted_bytes = int(self.num_bytes * (DECAY if is_busy else GROWTH))
            self.num_bytes = min(self.most_bytes, max(self.least_bytes, wanted_bytes))
            self._begin()

    def _begin(self) -> None:
        self._num_learnt_bytes = self._sum_underway_bytes = self._sum_took_s = 0.0


@dataclass(slots=True)
class _Noted:
    left_bytes: int
    underway_bytes: int
    granted_s: float


class GrantLog:
    """When one sender's grants were given; its messages count as if they came in turn.

    ``underway_bytes`` were granted before, nobody noted when.
    """

    def __init__(self, *, underway_bytes: int = 0) -> None:
        self._unknown_bytes = underway_bytes
        self._grants: deque[_Noted] = deque()

    def granted(self, num_bytes: int, *, underway_bytes: int, now_s: float) -> None:
        """Note a grant, and what is under way with it."""
        self._grants.append(_Noted(num_bytes, underway_bytes, now_s))

    def arrived(self, num_bytes: int, window: GrantWindow, *, now_s: float) -> None:
        """Let ``window`` learn from bytes that are here."""
        unknown_bytes = min(num_bytes, self._unknown_bytes)
        self._unknown_bytes -= unknown_bytes
        rest = num_bytes - unknown_bytes
        while rest:
            grant = self._grants[0]
            part_bytes = min(rest, grant.left_bytes)
            window.learn(part_bytes, underway_bytes=grant.underway_bytes, took_s=now_s - grant.granted_s)
            rest -= part_bytes
            grant.left_bytes -= part_bytes
            if not grant.left_bytes:
                self._grants.popleft()
