"""Virtual time: hosts with an asyncio loop each, in one thread, and the one clock that they all share.

Time moves only when no host has anything left to do at the present instant, and then at once to the next event. What
happens is noted in a log, of which only the hash and the last lines are kept: a seed that is run again gives the same
hash. A host that is stopped or dead gets no turns, as a process that is stopped or dead.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

NEVER = float("inf")
MOST_TURNS = 20_000
"""So often loops turn at one instant, at most."""


class Watched(Protocol):
    """A socket as a selector sees it."""

    @property
    def is_readable(self) -> bool: ...

    @property
    def is_writable(self) -> bool: ...


class SimulationError(AssertionError):
    """What must hold did not."""


class VirtualTime:
    """The clock, what is to happen, and the log of what did."""

    def __init__(self, seed: int | str) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.hosts: list[Host] = []
        self.last_lines: deque[str] = deque(maxlen=200)
        self.num_events = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0

    @property
    def digest(self) -> str:
        """The hash of the whole log so far."""
        return self._hash.hexdigest()

    def note(self, what: str) -> None:
        """Write a line into the log."""
        line = f"{self.now_s!r} {what}\n"
        self._hash.update(line.encode())
        self.last_lines.append(line)
        self.num_events += 1

    def at(self, when_s: float, function: Callable[..., object], *args: Any) -> None:
        """Let something happen; of what happens at one time, what was asked for first."""
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, function, args))

    def at_each(self, due: Iterable[tuple[float, Any]], function: Callable[..., object], *args: Any) -> None:
        """Let the same happen to several: as so many calls of :meth:`at`, in this order.

        Only the next of them is in the heap, which stays small where a thousand ranks send to as many each.
        """
        later = [(when_s, order, target) for order, (when_s, target) in enumerate(due, start=self._order + 1)]
        self._order += len(later)
        later.sort(reverse=True)
        self._push_next(later, function, args)

    def _push_next(
        self, later: list[tuple[float, int, Any]], function: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if later:
            when_s, order, _ = later[-1]
            heapq.heappush(self._events, (when_s, order, self._happen, (later, function, args)))

    def _happen(
        self, later: list[tuple[float, int, Any]], function: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        _, _, target = later.pop()
        self._push_next(later, function, args)
        function(target, *args)

    def after(self, delay_s: float, function: Callable[..., object], *args: Any) -> None:
        """Let something happen after a while."""
        self.at(self.now_s + delay_s, function, *args)

    def run(self, is_over: Callable[[], bool], *, limit_s: float) -> bool:
        """Go on until ``is_over``; False if nothing can happen any more, or the time is over, before that."""
        num_turns = 0
        while not is_over():
            if self.hosts and sum(host.turn() for host in self.hosts):
                num_turns += 1
                if num_turns > MOST_TURNS:
                    raise SimulationError(f"a loop does not come to rest at {self.now_s:.3f} s")
                continue
            num_turns = 0
            next_s = min([host.next_s for host in self.hosts]) if self.hosts else NEVER
            if self._events:
                next_s = min(next_s, self._events[0][0])
            if next_s > limit_s:
                self.now_s = max(self.now_s, limit_s if next_s < NEVER else self.now_s)
                return False
            self.now_s = max(self.now_s, next_s)
            while self._events and self._events[0][0] <= self.now_s:
                _, _, function, args = heapq.heappop(self._events)
                function(*args)
        return True

    def close(self) -> None:
        """End all that runs on the hosts."""
        for host in self.hosts:
            host.close()


class Host:
    """A machine with one process; ``turn_s`` is how long each turn of its loop takes."""

    def __init__(self, time: VirtualTime, number: int, *, turn_s: float = 0.0) -> None:
        self.time = time
        self.number = number
        self.address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.turn_s = turn_s
        self.is_dead = False
        self.is_touched = False
        """Something may be ready to be read or written."""
        self.watched: dict[int, Watched] = {}
        self.errors: list[BaseException] = []
        self._stopped_until_s = 0.0
        self._free_s = 0.0
        self.loop = VirtualLoop(self)
        time.hosts.append(self)

    def __repr__(self) -> str:
        return f"<Host {self.number}>"

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something on this host."""
        return self.loop.create_task(coroutine)

    def stop(self, for_s: float) -> None:
        """Let its process stand still for a while."""
        self.time.note(f"host {self.number} stands still for {for_s}")
        self._stopped_until_s = max(self._stopped_until_s, self.time.now_s + for_s)

    @property
    def next_s(self) -> float:
        """When it has something to do; of what is ready the network tells."""
        if self.is_dead:
            return NEVER
        due_s = self.time.now_s if self.is_touched or self.loop._ready else self.loop.next_timer_s
        return max(due_s, self._free_s, self._stopped_until_s)

    def turn(self) -> bool:
        """Let its loop turn once if there is anything to do now; whether there was."""
        now_s = self.time.now_s
        if self.is_dead or max(self._free_s, self._stopped_until_s) > now_s:
            return False
        if not (self.is_touched or self.loop._ready or self.loop.next_timer_s <= now_s):
            return False
        self._free_s = now_s + self.turn_s
        self.loop.turn()
        self.is_touched = bool(self.loop.selector.select(0))
        return True

    def close(self) -> None:
        """End its tasks and its loop."""
        self.is_dead = False
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        for _ in range(100):
            if not asyncio.all_tasks(self.loop):
                break
            self.loop.turn()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # it was seen where it matters
        self.loop.close()


class _Selector(selectors.SelectSelector):
    """Tells what is ready now among virtual sockets; it never waits."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for key in list(self.get_map().values()):
            sock = self._host.watched.get(key.fd)
            if sock is None:
                continue
            ready = (selectors.EVENT_READ if sock.is_readable else 0) | (
                selectors.EVENT_WRITE if sock.is_writable else 0
            )
            if ready & key.events:
                found.append((key, ready & key.events))
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """One host's loop, whose time is virtual."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.selector = _Selector(host)
        super().__init__(self.selector)
        self.set_exception_handler(self._on_exception)

    def time(self) -> float:
        return self._host.time.now_s

    @property
    def next_timer_s(self) -> float:
        return self._scheduled[0]._when if self._scheduled else NEVER

    def turn(self) -> None:
        """Run what is ready, once."""
        self.stop()
        self.run_forever()

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._host.errors.append(context.get("exception") or RuntimeError(str(context.get("message"))))
