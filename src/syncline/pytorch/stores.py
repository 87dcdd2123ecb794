"""The stores through which ranks find each other: torch's TCPStore, used for the meeting and dropped after it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from syncline.endpoints import format_endpoint
from syncline.errors import RendezvousError
from syncline.pytorch.environment import Environment

ANSWER_S = 30.0
"""How long the store may take to answer."""


class TorchStore:
    """A ``torch.distributed`` store as the fabric's rendezvous uses it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        self._store.set(key, value)  # type: ignore[arg-type]  # the binding takes bytes as well

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value; ``TimeoutError`` if there is none in time."""
        if timeout_s > 0:
            try:
                self._store.wait([key], timedelta(seconds=timeout_s))
            except dist.DistStoreError:
                raise TimeoutError(f"{key} was not set within {timeout_s:g} s") from None
        elif not self._store.check([key]):
            raise TimeoutError(f"{key} is not set")
        return bytes(self._store.get(key))


class LocalStore:
    """The store of a job of one rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        self._values[key] = value

    def get(self, key: str, timeout_s: float) -> bytes:  # noqa: ARG002 - nobody else writes
        """Return the value; ``TimeoutError`` if there is none."""
        if key not in self._values:
            raise TimeoutError(f"{key} is not set")
        return self._values[key]


def open_store(environment: Environment, *, timeout_s: float) -> TorchStore | LocalStore:
    """Open the store of the job: the agent's, that of torch.distributed, or one that rank 0 serves.

    Whoever holds the result keeps the store open; dropping it closes it.
    """
    if environment.world_size == 1:
        return LocalStore()
    if dist.is_available() and dist.is_initialized():
        return TorchStore(PrefixStore("syncline", dist.distributed_c10d._get_default_store()))
    assert environment.master_address is not None, "checked when the environment was read"
    assert environment.master_port is not None, "checked when the environment was read"
    serves = environment.rank == 0 and not environment.uses_agent_store
    host, port = environment.master_address, environment.master_port
    return TorchStore(_open(lambda: _tcp_store(host, port, serves=serves, timeout_s=timeout_s), host, port))


def _tcp_store(host: str, port: int, *, serves: bool, timeout_s: float) -> Store:
    store = TCPStore(
        host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), multi_tenant=False
    )
    store.set_timeout(timedelta(seconds=ANSWER_S))
    return store


def _open(make: Callable[[], Store], host: str, port: int) -> Store:
    try:
        return make()
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        raise RendezvousError(
            f"The store at MASTER_ADDR:MASTER_PORT {format_endpoint(host, port)} cannot be opened: {error}; check that "
            "rank 0 runs, that the port is free there, and that this host reaches it"
        ) from error
