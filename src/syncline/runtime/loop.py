"""The communication loop: one thread that runs one asyncio loop, on which everything that touches the network lives.

Nothing there needs a lock, and nothing there may block. An exception that no one caught on the loop is a fault of the
whole communicator: it is handed to ``on_crash``, never only logged, so that no caller waits for a loop that is broken.

Its thread gets a core that a training thread has as soon as something arrives, or in its turn. A thread that moves
messages works for some ten microseconds at a time, but a core that computes makes it wait for the end of the other's
slice, some milliseconds each time, and a message takes several threads to come and go. Linux 6.12 and later let a
thread ask for a shorter slice: it gets no more of the core than before, but gets it sooner (EEVDF, Stoica and
Abdel-Wahab, 1995). Any thread may ask; kernels that do not know the wish ignore it. Where no step waits for a message,
the thread had better stand back: each time that it interrupts a computation it costs that one its caches, too. Then it
comes in its turn, and finds more to do at once (Linux's policy for batches).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from syncline.errors import DeadlineError, FabricClosedError, FabricError
from syncline.fabric import new_event_loop

T = TypeVar("T")
SLICE_NS = 100_000
"""The shortest that Linux grants."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""The number of the system call, which Python has no name for."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""The kernel's ``sched_attr``: size, policy, flags, nice, priority, runtime, deadline, period."""


class CommunicationLoop:
    """A thread with an asyncio loop. ``start`` it once, ``stop`` it once; after that, no thread and no file is left.

    >>> loop = CommunicationLoop()
    >>> loop.start(); loop.is_running()
    True
    >>> loop.stop()
    """

    def __init__(self, name: str = "syncline") -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ident = 0
        """That of the thread, while it runs."""
        self._process = os.getpid()
        self._crash_handlers: list[Callable[[BaseException], None]] = []

    def __repr__(self) -> str:
        return f"<CommunicationLoop {self._name}: {'running' if self.is_running() else 'stopped'}>"

    def start(self) -> None:
        """Start the thread; returns once the loop runs."""
        assert self._thread is None, "the communication loop was started twice"
        self._loop = new_event_loop()
        self._loop.set_exception_handler(self._handle_exception)
        started = threading.Event()
        self._loop.call_soon(started.set)
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()
        started.wait()

    def is_running(self) -> bool:
        """Whether the thread is there to run things."""
        return self._thread is not None and self._thread.is_alive() and self._loop is not None

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked from the one that the loop belongs to; the thread did not come along."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise :class:`FabricError` in a forked child."""
        if os.getpid() != self._process:
            raise FabricError(
                f"Only the process that called syncline.init() may talk to the other ranks: that is process "
                f"{self._process}, and this is {os.getpid()}, forked from it; use fleet, model and optimizer "
                "there alone (a DataLoader's workers only load)"
            )

    def is_current(self) -> bool:
        """Whether the caller is the loop's own thread."""
        return threading.get_ident() == self._ident

    def on_crash(self, handler: Callable[[BaseException], None]) -> None:
        """Let ``handler`` know, on the loop's thread, of an exception that no one caught."""
        self._crash_handlers.append(handler)

    def forget_crash(self, handler: Callable[[BaseException], None]) -> None:
        """Let ``handler`` know nothing any more."""
        if handler in self._crash_handlers:
            self._crash_handlers.remove(handler)

    @property
    def clock(self) -> asyncio.AbstractEventLoop:
        """The asyncio loop itself, for what lives on it."""
        self.check_process()
        if self._loop is None:
            raise FabricClosedError(
                f"The communication loop {self._name!r} is stopped, as its fleet or process group was closed; call "
                "syncline.init() or init_process_group() again, and make anew what used the old one"
            )
        return self._loop

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function(*args)`` on the loop's thread, after what was asked for before; from any thread."""
        clock = self.clock
        try:
            clock.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise self.stopped(error) from error

    def stopped(self, why: RuntimeError) -> FabricClosedError:
        """Return the error for ``why``, by which asyncio says that it was closed between two lines."""
        return FabricClosedError(f"The communication loop {self._name!r} is stopped: {why}")

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``coroutine`` on the loop and wait for its result, at most ``timeout_s``; not from the loop's thread."""
        assert not self.is_current(), "the communication loop cannot wait for itself"
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.clock)
        except (FabricError, RuntimeError):
            coroutine.close()
            raise
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(
                f"{getattr(coroutine, '__qualname__', coroutine)} was not done on the loop within {timeout_s:g} s"
            ) from None

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Call ``function`` on the loop's thread, in the order of the calls, and return what it returns; as `run`."""

        async def call() -> T:
            return function()

        call.__qualname__ = getattr(getattr(function, "func", function), "__qualname__", "a call")  # for errors
        return self.run(call(), timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop and its thread; a second call does nothing."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or self.is_of_parent:
            return
        if thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)
            if thread.is_alive():
                raise DeadlineError(f"The communication loop {self._name!r} did not stop within {timeout_s:g} s")
        self._loop = None

    def _main(self) -> None:
        loop = self._loop
        assert loop is not None
        self._ident = threading.get_ident()
        ask_for_short_slices()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # in the end it cancels tasks, and closes the loop
            try:
                runner.get_loop().run_forever()
            except BaseException as error:  # SystemExit in a callback must not end in silence either
                self._crash(error)
        self._ident = 0  # which a later thread may have

    def _handle_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._crash(error if error is not None else RuntimeError(str(context.get("message"))))

    def _crash(self, error: BaseException) -> None:
        for handler in tuple(self._crash_handlers):
            handler(error)


def ask_for_short_slices() -> bool:
    """Ask the kernel to run the calling thread in slices of ``SLICE_NS``; return whether it took the wish.

    A thread of another policy than the default one was given it by someone who knows why, and is left alone.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not _has_default_policy():
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)


def stand_back() -> bool:
    """Let the calling thread interrupt no other from now on; return whether the kernel took the wish.

    So does the thread of a loop whose messages no step waits for, those of its other users among them. It keeps its
    share of the cores. A thread of another policy than the default one is left alone.
    """
    if not _has_default_policy():
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # a sandbox knows one policy, or refuses: nothing depends on it
        return False
    return True


def _has_default_policy() -> bool:
    try:
        return platform.system() == "Linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    except OSError:  # a sandbox does not say
        return False
