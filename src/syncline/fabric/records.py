"""JSON records in the store through which ranks meet; whoever reads them checks what they hold."""

from __future__ import annotations

import json
from typing import Any, Protocol

from syncline.errors import RendezvousError

MAX_RECORD_BYTES = 64 << 10


class Store(Protocol):
    """A key-value store that all ranks reach; the calls may block and are made in a worker thread.

    What else it raises becomes a :class:`~syncline.errors.RendezvousError`.

    >>> class DictStore(dict):  # where all ranks are in one process
    ...     set = dict.__setitem__
    ...     def get(self, key, timeout_s):
    ...         if key not in self:
    ...             raise TimeoutError
    ...         return self[key]
    >>> rendezvous = Rendezvous(DictStore(), job_id="example")
    """

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``, over what was there."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value, as soon as there is one; ``TimeoutError`` if there is none in time.

        The rendezvous asks only for what is there now (``timeout_s`` is 0.0): whoever then waits for an answer of the
        store itself must not raise ``TimeoutError`` because that takes a while.
        """


class StoreRecords:
    """The records of one job. A store that fails is a :class:`RendezvousError`."""

    def __init__(self, store: Store, *, job_id: str) -> None:
        self._store = store
        self._prefix = f"syncline/{job_id}"

    def set(self, key: str, value: object) -> None:
        """Write a record."""
        text = json.dumps(value, separators=(",", ":")).encode()
        assert len(text) <= MAX_RECORD_BYTES, f"record {key} has {len(text)} bytes"
        try:
            self._store.set(f"{self._prefix}/{key}", text)
        except Exception as error:
            raise _store_failed(error) from error

    def get(self, key: str) -> Any:
        """Return what a key holds now, None if it holds nothing that can be used."""
        try:
            text = self._store.get(f"{self._prefix}/{key}", 0.0)
        except TimeoutError:
            return None
        except Exception as error:
            raise _store_failed(error) from error
        if len(text) > MAX_RECORD_BYTES:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None


def _store_failed(error: Exception) -> RendezvousError:
    return RendezvousError(
        f"the store through which the ranks meet failed ({type(error).__name__}: {error}); check that rank 0's "
        "process, or whatever serves MASTER_ADDR and MASTER_PORT, is running and can be reached"
    )
