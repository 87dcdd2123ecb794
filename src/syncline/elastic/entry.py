"""How a newcomer comes into a job that runs: it asks a member, waits until it is let in, and is connected then."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.elastic.job_record import Address, JobRecord, address_of
from syncline.elastic.join_connection import JoinConnection, Message, dial_member
from syncline.elastic.join_server import VERSION
from syncline.elastic.party import Admitted, JobOverError, Party
from syncline.endpoints import format_endpoint
from syncline.errors import DeadlineError, HandshakeError
from syncline.fabric import FabricOptions
from syncline.observe import Trace
from syncline.runtime import CommunicationLoop

PAUSE_S = 0.1
MARGIN_S = 30.0
"""For a loop that does not answer; everything on it has deadlines of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a newcomer is told when it may wait."""

    job: JobRecord
    terms: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Entry:
    """One newcomer's way in; for one thread. ``loop`` runs, and the fabric will live on it."""

    loop: CommunicationLoop
    options: FabricOptions
    own_address: str
    machine: str
    join_address: Address
    """Where it listens itself, for those that come after it."""
    addresses: list[Address]
    """Where members listen."""
    topology: str | None = None
    trace: Trace | None = None
    _connection: JoinConnection | None = field(default=None, repr=False)
    _is_over: bool = False
    """Whether a member has said that the job is."""

    def ask(self) -> Welcome:
        """Ask to come in, within ``options.connect_s``.

        Raises ``HandshakeError`` with the reason: another secret, job or version, no member there, no elastic job, a
        member already, too many that wait, no clear place.
        """
        return self.loop.run(self._ask(), self.options.connect_s + MARGIN_S)

    def enter(self, lines: Sequence[str], timeout_s: float) -> Admitted:
        """Say that this rank is ready, and return when it is connected and the members have switched.

        ``lines`` describe its training, which must be the job's.
        Raises ``HandshakeError`` where the job's training is another one, or the larger job could not be connected,
        ``EOFError`` where a member has said that the job is over and nobody else answers, and :class:`DeadlineError`.
        """
        return self.loop.run(self._enter(list(lines), timeout_s), timeout_s + MARGIN_S)

    def close(self) -> None:
        """Stop waiting."""

        async def close() -> None:
            if self._connection is not None:
                self._connection.close()

        self.loop.run(close(), MARGIN_S)

    async def _ask(self) -> Welcome:
        why, now_s = "nobody was asked", asyncio.get_running_loop().time
        until_s = now_s() + self.options.connect_s
        while (left_s := until_s - now_s()) > 0:
            answer = await self._ask_once(left_s)
            if answer["kind"] == "welcome":
                return self._welcomed(answer)
            why = self._go_elsewhere(answer) if answer["kind"] == "elsewhere" else _reason(answer)
            await asyncio.sleep(PAUSE_S)
        where = ", ".join(format_endpoint(*address) for address in self.addresses)
        raise HandshakeError(
            f"The job at {where} does not let this process in within {self.options.connect_s:g} s: {why}"
        )

    async def _ask_once(self, timeout_s: float) -> Message:
        connection = await dial_member(
            self.addresses,
            self.options,
            own_address=self.own_address,
            timeout_s=timeout_s,
            is_once=self._is_over,
        )
        fields = {"machine": self.machine, "join_address": self.join_address, "topology": self.topology}
        await connection.send("join", version=VERSION, **fields)
        try:
            async with asyncio.timeout(self.options.handshake_s):
                answer = await connection.receive()
        except (EOFError, TimeoutError):
            answer = {"kind": "refused", "why": "the member that was asked does not answer", "again": True}
        if answer["kind"] == "welcome":
            self._connection = connection
        else:
            connection.close()
        return answer

    def _go_elsewhere(self, answer: Message) -> str:
        self.addresses = [address_of(each) for each in answer["addresses"]]
        return "its members name one another, and none of them lets it in"

    def _welcomed(self, answer: Message) -> Welcome:
        self.addresses = [address_of(each) for each in answer["addresses"]]
        self._is_over = False
        return Welcome(job=JobRecord.from_json(answer["job"]), terms=answer["terms"])

    async def _enter(self, lines: list[str], timeout_s: float) -> Admitted:
        try:
            async with asyncio.timeout(timeout_s):
                while (admitted := await self._wait(lines)) is None:
                    await asyncio.sleep(PAUSE_S)
                    await self._ask()
        except TimeoutError:
            raise DeadlineError(
                f"The job has not let this process in within {timeout_s:g} s of its distribute() or reconfigure(); "
                "check that its ranks make steps"
            ) from None
        return admitted

    async def _wait(self, lines: list[str]) -> Admitted | None:
        """Wait until the members have switched; None if who leads is gone: the others will tell who leads now."""
        assert self._connection is not None, "it has asked"
        await self._connection.send("ready", lines=lines)
        try:
            return await Party(self._connection, self.options, self.trace).follow(is_newcomer=True)
        except EOFError as error:
            self._is_over = isinstance(error, JobOverError)
            self._connection.close()
            return None


def _reason(answer: Message) -> str:
    """Return why a member refuses for now; raise if it does for good."""
    if not answer["again"]:
        raise HandshakeError(f"The job does not let this process in: {answer['why']}")
    return str(answer["why"])
