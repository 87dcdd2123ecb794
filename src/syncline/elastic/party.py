"""One rank's part in an attempt to grow: it connects the larger job's fabric when it is told to, beside its training.

Members and newcomers do the same. Each asks the member that leads the attempt, which says who will have which rank;
each tells it where it listens, hears where all do, connects to them, and says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from syncline.elastic.job_record import JobRecord
from syncline.elastic.join_connection import JoinConnection
from syncline.errors import HandshakeError, RendezvousError, SynclineError
from syncline.fabric import FabricOptions, TcpFabric, connect_tcp
from syncline.fabric.rendezvous import Generation, Member
from syncline.observe import Trace


class AskedRendezvous:
    """Finds the others through the member that leads; a rendezvous of :func:`connect_tcp`."""

    def __init__(self, connection: JoinConnection, *, attempt: int) -> None:
        self._connection = connection
        self._attempt = attempt
        self._generation: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    async def meet(self, member: Member, *, world_size: int, timeout_s: float, silence_s: float) -> Generation:  # noqa: ARG002 - who leads knows who is gone
        """Say where this rank listens, and wait until all have."""
        await self._connection.send(
            "listening", attempt=self._attempt, host=member.host, address=member.address, port=member.port
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._generation
        except TimeoutError:
            raise RendezvousError(
                f"rank {member.rank} (host {member.host}) waited {timeout_s:.0f} s for the other ranks of the larger "
                f"job; check that all {world_size} run"
            ) from None

    def tell(self, generation: Generation) -> None:
        """Say where all listen."""
        if not self._generation.done():
            self._generation.set_result(generation)

    async def watch(self) -> None:
        """Wait until cancelled: who leads tells when somebody is gone."""
        await asyncio.get_running_loop().create_future()

    async def give_up(self, reason: str) -> None:
        """Nothing: whoever began this tells who leads."""

    async def rest(self) -> None:
        """Nothing, likewise."""


class JobOverError(EOFError):
    """The member that was asked has made its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A rank of the larger job, connected to all others of it."""

    attempt: int
    rank: int
    job: JobRecord
    num_newcomers: int
    """How many of its last ranks are new."""
    fabric: TcpFabric


@dataclass(slots=True)
class Party:
    """Follows what the member that leads says on ``connection``; on the loop on which the fabric is to live."""

    connection: JoinConnection
    options: FabricOptions
    trace: Trace | None = None
    admitted: Admitted | None = None
    """Set when this rank is connected to all others."""
    _connecting: asyncio.Task[None] | None = None
    _rendezvous: AskedRendezvous | None = field(default=None, repr=False)

    async def follow(self, *, is_newcomer: bool) -> Admitted:
        """Connect as often as one is told to; return when the job has switched, and raise if it will not.

        A member does not hear of the switch here, nor of an attempt that is given up: its training knows of both.
        Raises ``HandshakeError`` with the reason where a newcomer is refused, and ``EOFError`` if who leads is gone:
        :class:`JobOverError` if that has ended well.
        """
        try:
            while True:
                message = await self._receive(is_newcomer=is_newcomer)
                kind = message["kind"]
                if kind == "switched" and self.admitted is not None:
                    return self.admitted
                if kind == "connect":
                    await self.drop()
                    self._connect(message)
                elif kind == "generation" and self._rendezvous is not None:
                    self._rendezvous.tell(_generation(message))
                elif kind == "abandoned" and is_newcomer:
                    await self.drop()
        except BaseException:
            await self.drop()
            raise

    async def drop(self) -> None:
        """Forget what was connected, or is on the way."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        admitted, self.admitted = self.admitted, None
        if admitted is not None:
            admitted.fabric.abort("the larger job was given up")

    async def _receive(self, *, is_newcomer: bool) -> dict[str, Any]:
        try:
            message = await self.connection.receive()
        except EOFError:
            if is_newcomer or self.admitted is None:
                raise
            return {"kind": "switched"}  # who leads may have switched already, and is done with these connections
        if message["kind"] == "over":
            raise JobOverError
        if message["kind"] == "refused":
            raise HandshakeError(f"The job does not let this process in: {message['why']}")
        return message

    def _connect(self, plan: dict[str, Any]) -> None:
        rendezvous = AskedRendezvous(self.connection, attempt=int(plan["attempt"]))
        self._rendezvous = rendezvous
        self._connecting = asyncio.create_task(self._open(plan, rendezvous))

    async def _open(self, plan: dict[str, Any], rendezvous: AskedRendezvous) -> None:
        attempt = int(plan["attempt"])
        try:
            job, rank = JobRecord.from_json(plan["job"]), int(plan["rank"])
            fabric = await connect_tcp(
                self.options,
                rank=rank,
                world_size=job.world_size,
                rendezvous=rendezvous,
                topology=job.topology,
                numbers=job.numbers,
                trace=self.trace,
            )
        except SynclineError as error:
            await self.connection.send("failed", attempt=attempt, why=str(error))
            return
        count = int(plan["num_newcomers"])
        self.admitted = Admitted(attempt=attempt, rank=rank, job=job, num_newcomers=count, fabric=fabric)
        await self.connection.send("connected", attempt=attempt)


def _generation(message: dict[str, Any]) -> Generation:
    members = [
        Member(rank=rank, host=str(host), address=str(address), port=int(port))
        for rank, (host, address, port) in enumerate(message["members"])
    ]
    return Generation(epoch=int(message["epoch"]), job_nonce=bytes.fromhex(message["nonce"]), members=tuple(members))
