"""Sockets end with their process: a forked child closes its copies at once.

A child that keeps a rank's sockets open keeps the kernel from telling the other ranks that the rank has died. PyTorch's
loaders fork their workers. The child only closes descriptors: epoll sets are shared with the parent, so nothing may be
taken out of them here.
"""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_sockets: WeakSet[socket.socket] = WeakSet()


def close_in_children(sock: socket.socket) -> socket.socket:
    """Return ``sock``, which children that are forked from now on do not keep."""
    _sockets.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_sockets):
        descriptor = sock.detach()
        if descriptor >= 0:
            os.close(descriptor)
    _sockets.clear()


os.register_at_fork(after_in_child=_close_all)
