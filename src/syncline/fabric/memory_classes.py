"""Opening connection classes in memory: there is nothing to open, but all ranks must ask for the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from syncline.errors import ConfigurationError, HandshakeError, PeerLostError
from syncline.priorities.terms import Priorities


class MemoryClasses:
    """What each rank of an in-memory network has asked for, in order; ``describe(rank)`` names one."""

    def __init__(self, describe: Callable[[int], str]) -> None:
        self._describe = describe
        self._asked: dict[int, list[Priorities]] = {}
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        """Let those who wait know that a rank was lost or closed."""
        self._changed.set()

    async def ask(
        self,
        rank: int,
        priorities: Priorities,
        world_size: int,
        lost: Mapping[int, PeerLostError],
        check_open: Callable[[], None],
        *,
        timeout_s: float,
    ) -> None:
        """Return when all others have asked for the same; raise if one is lost, late, or asks for something else.

        Asking again for the same returns at once.
        """
        others = [other for other in range(world_size) if other != rank]
        asked = self._asked.setdefault(rank, [])
        if asked and asked[-1] == priorities:
            return
        asked.append(priorities)
        number = len(asked)
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s):
                while any(not self._has_asked(other, number) and other not in lost for other in others):
                    self._changed.clear()
                    await self._changed.wait()
                    check_open()
        except TimeoutError:
            silent = ", ".join(self._describe(other) for other in others if not self._has_asked(other, number))
            raise HandshakeError(
                f"rank {rank} cannot open {priorities} within {timeout_s:g} s: {silent} did not ask for them; check "
                "that all ranks make the same calls in the same order"
            ) from None
        for other in others:
            if not self._has_asked(other, number):
                raise lost[other]
            self._check_agree(rank, other, number)

    def _has_asked(self, rank: int, number: int) -> bool:
        return len(self._asked.get(rank, ())) >= number

    def _check_agree(self, rank: int, other: int, number: int) -> None:
        ours, theirs = self._asked[rank][number - 1], self._asked[other][number - 1]
        if ours != theirs:
            raise ConfigurationError(
                f"All ranks must open the same connection classes, but {self._describe(rank)} asks for {ours} and "
                f"{self._describe(other)} for {theirs}; give all ranks the same priorities"
            )
