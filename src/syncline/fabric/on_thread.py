"""Blocking work beside the loop, on a thread that nobody has to wait for.

An executor's threads are joined when the interpreter ends; one that hangs in a foreign call would keep the process
alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STOP_S = 1.0
"""How long a thread that was told to stop is waited for."""


async def on_thread(function: Callable[[], T], stop: threading.Event) -> T:
    """Run ``function`` on a thread of its own and return what it returns; ``stop`` is set when that is not wanted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # it is what the function returned

    def main() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=main, name="syncline-rendezvous", daemon=True)
    thread.start()
    try:
        return await future
    finally:
        stop.set()
        thread.join(STOP_S)
