"""Who is on each host of a job, and when another comes for one that is lost."""

from __future__ import annotations

from typing import Any


class Growth:
    """The hosts of a job; what is heard counts where it grows, else everybody stays."""

    def __init__(self, world_size: int) -> None:
        self.on = list(range(world_size))
        """Which process is on each host, or was last."""
        self.broken: set[int] = set()
        """Hosts that a fault keeps from the others now."""
        self._members: tuple[int, tuple[int, ...]] = (0, ())
        self._numbers: dict[int, int] = {}
        self._addresses: dict[int, str] = {}
        self._struck: set[int] = set()
        self._is_over = False

    def strike(self, place: int) -> None:
        """Take note that whoever is on a host is to be lost."""
        self._struck.add(self.on[place])

    def hear(self, event: dict[str, Any]) -> None:
        """Take note of what a process tells: its number, where it lets others in, who the members are."""
        rank = event["rank"]
        if event["event"] == "ready":
            self._numbers[rank], self._addresses[rank] = event["number"], event["join"]
        elif event["event"] == "step":
            self._members = max(self._members, (event["step"], tuple(event["members"] or ())))
        elif event["event"] == "done":
            self._is_over = True

    def is_whole(self) -> bool:
        """Whether nobody is missed: only then may one more be lost."""
        return all(self._is_member(rank) and rank not in self._struck for rank in self.on)

    def vacant(self, ended: set[int]) -> list[int]:
        """Return the hosts whose process has ended and is no member any more, of a job that is not over."""
        if self._is_over or not self._members[1]:
            return []
        return [
            place
            for place, rank in enumerate(self.on)
            if rank in ended and place not in self.broken and not self._is_member(rank)
        ]

    def addresses(self, ended: set[int]) -> str:
        """Return where a newcomer may ask."""
        return ",".join(address for rank, address in sorted(self._addresses.items()) if rank not in ended)

    def _is_member(self, rank: int) -> bool:
        return self._numbers.get(rank) in self._members[1]
