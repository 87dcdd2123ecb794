"""Ports of a job in memory, for tests of what is sent on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.runtime import communicators_in_memory
from syncline.runtime.port import Port

WAIT_S = 60.0


class Ports:
    """One port on each rank; a context, at whose end all is given up."""

    def __init__(self, num_ranks: int, seed: int | None = None) -> None:
        self.communicators = communicators_in_memory(num_ranks, seed=seed)
        self.ports = [communicator.open_port("test") for communicator in self.communicators]

    def __enter__(self) -> list[Port]:
        return self.ports

    def __exit__(self, *_: object) -> None:
        for communicator in self.communicators:
            communicator.abort()


def on_loop(port: Port, function: Callable[[], Any]) -> Any:
    """Call ``function`` on the loop; return what it returns."""

    return port.call(function, WAIT_S)
