"""A selector that lets the loop sleep while transports have nothing for Python.

asyncio asks its selector what is ready. Requests, grants and pieces of messages make sockets ready and need no Python
at all: here they are dealt with inside that question, without the interpreter's lock, and the loop wakes up for whole
messages, timers and what other threads ask of it.
"""

from __future__ import annotations

import selectors
from typing import Any

from syncline.fabric._native import NativeTransport, wait

_EPOLLIN, _EPOLLOUT = 1, 4


class Selector(selectors.EpollSelector):
    """Serves every transport that is registered to be read."""

    def __init__(self) -> None:
        super().__init__()
        self._native_transports: list[NativeTransport] = []
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a file, or serve a native transport."""
        key = super().register(fileobj, events, data)
        self._keys[key.fd] = key
        if isinstance(fileobj, NativeTransport):
            self._native_transports.append(fileobj)
            fileobj.is_served = True
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a file for something else."""
        key = super().modify(fileobj, events, data)
        self._keys[key.fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Watch a file, or serve a native transport, no longer."""
        if isinstance(fileobj, NativeTransport):
            self._native_transports.remove(fileobj)
            fileobj.is_served = False
        key = super().unregister(fileobj)
        del self._keys[key.fd]
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready for Python within ``timeout`` seconds (None: forever)."""
        if not self._native_transports:
            return super().select(timeout)
        found = []
        for descriptor, mask in wait(
            self.fileno(), -1.0 if timeout is None else max(timeout, 0.0), self._native_transports
        ):
            key = self._keys.get(descriptor)
            if key is None:
                continue
            events = (selectors.EVENT_WRITE if mask & ~_EPOLLIN else 0) | (
                selectors.EVENT_READ if mask & ~_EPOLLOUT else 0
            )
            if events & key.events:
                found.append((key, events & key.events))
        return found
