"""One attempt to connect a larger job, as the member that leads it keeps it. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from syncline.elastic.job_record import JobRecord
from syncline.errors import name_ranks

NONCE_BYTES = 32


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Who of the larger job listens, and who is connected to all others; ranks are those of the larger job.

    >>> job = JobRecord.first(Topology.flat(1), machines=["a"], join_addresses=[("127.0.0.1", 1)])
    >>> attempt = Attempt(number=1, job=job)
    >>> attempt.listens(0, ["a", "127.0.0.1", 2])
    True
    >>> attempt.connected(0)
    True
    """

    number: int
    job: JobRecord
    num_newcomers: int = 1
    is_decided: bool = False
    """Whether the members may have switched: from then on it is not given up."""
    token: Callable[[int], str] = secrets.token_hex
    _listening: dict[int, list[Any]] = field(default_factory=dict)
    _connected: set[int] = field(default_factory=set)

    @property
    def is_connected(self) -> bool:
        """Whether all ranks are connected to one another."""
        return len(self._connected) == self.job.world_size

    def plan(self, rank: int) -> dict[str, Any]:
        """Return what a rank is told at first."""
        told = {"attempt": self.number, "rank": rank, "num_newcomers": self.num_newcomers}
        return told | {"job": self.job.to_json()}

    def listens(self, rank: int, member: list[Any]) -> bool:
        """Note where a rank listens (host, address and port); return whether it is the last one."""
        self._listening[rank] = member
        return len(self._listening) == self.job.world_size

    def generation(self) -> dict[str, Any]:
        """Return where all listen, as every rank is told then."""
        members = [self._listening[rank] for rank in range(self.job.world_size)]
        return {"epoch": int(self.token(8), 16) or 1, "nonce": self.token(NONCE_BYTES), "members": members}

    def connected(self, rank: int) -> bool:
        """Note that a rank is connected to all others; return whether all are."""
        self._connected.add(rank)
        return self.is_connected

    def describe_missing(self) -> str:
        """Say who has not done its part."""
        ranks = range(self.job.world_size)
        silent = [rank for rank in ranks if rank not in self._listening]
        if silent:
            return f"{name_ranks(silent)} of the larger job did not come"
        return f"{name_ranks([rank for rank in ranks if rank not in self._connected])} did not connect to all others"
