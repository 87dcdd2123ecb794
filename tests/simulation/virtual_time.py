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
from select import EPOLLIN, EPOLLOUT
from typing import Any, Protocol

from syncline.fabric.peer_transport import Selector

NEVER = float("inf")
MOST_TURNS = 20_000
"""So often loops turn at one instant, at most."""
LOOP_DESCRIPTOR = 1 << 19
"""Names the epoll set of a host's loop; sockets have higher numbers."""


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
    """A machine with one process; ``turn_s`` is how long each turn of its loop takes.

    With ``is_served``, its loop has the library's selector, else asyncio's.
    """

    def __init__(self, time: VirtualTime, number: int, *, turn_s: float = 0.0, is_served: bool = True) -> None:
        self.time = time
        self.number = number
        self.address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.turn_s = turn_s
        self.is_served = is_served
        self.is_dead = False
        self.is_touched = False
        """Something may be ready to be read or written."""
        self.watched: dict[int, Watched] = {}
        self.threads: list[Callable[[], None]] = []
        """What other threads of the process do once a second, as far as it matters."""
        self._errors: list[BaseException] = []
        self._stopped_until_s = 0.0
        self._free_s = 0.0
        self.epoll = VirtualEpoll(self)
        """That of its loop."""
        self.loop = VirtualLoop(self)
        time.hosts.append(self)

    def __repr__(self) -> str:
        return f"<Host {self.number}>"

    @property
    def errors(self) -> list[BaseException]:
        """What nobody has seen of what went wrong on its loop and in its tasks."""
        unseen = [task.exception() for task in self.loop.failed if task._log_traceback]  # type: ignore[attr-defined]
        return self._errors + [error for error in unseen if error is not None]

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something on this host."""
        return self.loop.create_task(coroutine)

    def stop(self, for_s: float) -> None:
        """Let its process stand still for a while."""
        self.time.note(f"host {self.number} stands still for {for_s}")
        self._stopped_until_s = max(self._stopped_until_s, self.time.now_s + for_s)

    def hold(self, for_s: float) -> None:
        """Let its loop stand still for a while, as somebody holds the interpreter; other threads go on."""
        self.time.note(f"host {self.number} is held for {for_s}")
        self._stopped_until_s = max(self._stopped_until_s, self.time.now_s + for_s)
        for second in range(1, int(for_s) + 1):
            self.time.after(float(second), self._run_threads)

    def _run_threads(self) -> None:
        if not self.is_dead:
            for run in self.threads:
                run()

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
        self.is_touched = bool(self.loop.selector.select(0)) or self.epoll.has_ready()
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


class VirtualEpoll:
    """An epoll set of virtual sockets: what :class:`selectors.EpollSelector` and the compiled transport use of one.

    It never waits. Other descriptors, such as that of asyncio's own pipe, are never ready.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._events: dict[int, int] = {}

    def register(self, fd: int, events: int) -> None:
        self._events[fd] = events

    modify = register

    def unregister(self, fd: int) -> None:
        self._events.pop(fd, None)

    def poll(self, _timeout: float | None = None, _max_events: int = -1) -> list[tuple[int, int]]:
        """Return what is ready now, in an order that the seed chooses: a kernel promises none."""
        found = []
        for fd, events in self._events.items():
            sock = self._host.watched.get(fd)
            if sock is None:
                continue
            ready = events & ((EPOLLIN if sock.is_readable else 0) | (EPOLLOUT if sock.is_writable else 0))
            if ready:
                found.append((fd, ready))
        if len(found) > 1:
            self._host.time.random.shuffle(found)
        return found

    def has_ready(self) -> bool:
        """Whether anything is ready now."""
        watched = self._host.watched
        return any(
            (events & EPOLLIN and watched[fd].is_readable) or (events & EPOLLOUT and watched[fd].is_writable)
            for fd, events in self._events.items()
            if fd in watched
        )

    def fileno(self) -> int:
        return LOOP_DESCRIPTOR

    def close(self) -> None:
        self._events.clear()


def _selector(host: Host) -> selectors.EpollSelector:
    """Return the library's selector over virtual sockets, or asyncio's, which serves no transports."""
    selector = Selector() if host.is_served else selectors.EpollSelector()
    selector._selector.close()
    selector._selector = host.epoll
    return selector


class VirtualLoop(asyncio.SelectorEventLoop):
    """One host's loop, whose time is virtual."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.selector = _selector(host)
        super().__init__(self.selector)
        self.set_exception_handler(self._on_exception)
        self.failed: list[asyncio.Task[Any]] = []

    def time(self) -> float:
        return self.host.time.now_s

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **settings: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = super().create_task(coroutine, **settings)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task._exception is not None:  # type: ignore[attr-defined]
            self.failed.append(task)  # to look whether anybody asks for it

    @property
    def next_timer_s(self) -> float:
        return self._scheduled[0]._when if self._scheduled else NEVER

    def turn(self) -> None:
        """Run what is ready, once."""
        self.stop()
        self.run_forever()

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.host._errors.append(context.get("exception") or RuntimeError(str(context.get("message"))))
