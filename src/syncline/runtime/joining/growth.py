"""How a job grows: a newcomer asks a member, and both connect the larger job's fabric beside what they do.

Members and newcomers do the same: each asks the member that leads the attempt, which says who will have which rank;
each tells it where it listens, hears where all do, connects to them, and says so. A newcomer waits until it is let in;
members train meanwhile. The first member tells, with two numbers in the commit of each step, which attempt is under way
and that it is connected; so all switch at the same step's end. The numbers of the others are 0, and a sum shows the
first's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from syncline.endpoints import format_endpoint
from syncline.errors import ConfigurationError, DeadlineError, HandshakeError, RendezvousError, SynclineError
from syncline.fabric import FabricOptions, TcpFabric, connect_tcp
from syncline.fabric.rendezvous import Generation, Member
from syncline.fabric.shared_port import SharedListener, open_listener
from syncline.fabric.sockets import advertised_endpoint, resolve_address
from syncline.last_words import tell
from syncline.members.job_record import NO_FLAGS, Address, Flags, JobRecord, address_of
from syncline.observe import tell_if_long
from syncline.runtime.joining.connection import JoinConnection, Message, dial_member
from syncline.runtime.joining.server import VERSION, JoinServer
from syncline.runtime.loop import CommunicationLoop
from syncline.schedule import with_gateways_chosen
from syncline.topology import Topology

_log = logging.getLogger(__name__)

MAX_PORTS = 64
"""Ranks of one host take the next free ports."""
_MOST_DOORS = 32
"""Of other machines a launcher is told: what it hands on is one environment variable."""
PAUSE_S = 0.1
ANSWER_S = 30.0
"""For a loop that does not answer; everything on it has deadlines of its own."""


class AskedRendezvous:
    """Finds the others through the member that leads; a rendezvous of :func:`connect_tcp`."""

    def __init__(self, connection: JoinConnection, *, attempt: int) -> None:
        self._connection = connection
        self._attempt = attempt
        self._generation: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    async def meet(self, member: Member, *, world_size: int, timeout_s: float, silence_s: float) -> Generation:  # noqa: ARG002 - who leads knows who is gone
        """Say where this rank listens, and wait until all have."""
        where = {"host": member.host, "address": member.address, "port": member.port}
        await self._connection.send("listening", attempt=self._attempt, **where, is_reachable=member.is_reachable)
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
    topology: Topology
    """Of its members, with their gateways chosen."""
    fabric: TcpFabric
    loop: CommunicationLoop
    """The fabric's, which is whoever takes it to stop."""


@dataclass(slots=True)
class Party:
    """Follows what the member that leads says, on the ``loop`` on which the fabric is to live."""

    options: FabricOptions
    loop: CommunicationLoop
    admitted: Admitted | None = None
    """Set when this rank is connected to all others."""
    _connecting: asyncio.Task[None] | None = None
    _rendezvous: AskedRendezvous | None = field(default=None, repr=False)

    async def follow(self, connection: JoinConnection, *, is_newcomer: bool) -> Admitted:
        """Connect as often as one is told to there; return when the job has switched, and raise if it will not.

        A member does not hear of the switch here, nor of an attempt that is given up: its training knows of both.
        Raises ``HandshakeError`` with the reason where a newcomer is refused, and ``EOFError`` if who leads is gone:
        :class:`JobOverError` if that has ended well.
        """
        try:
            while True:
                message = await self._receive(connection, is_newcomer=is_newcomer)
                kind = message["kind"]
                if kind == "switched" and self.admitted is not None:
                    return self.admitted
                if kind == "connect":
                    await self.drop()
                    self._rendezvous = AskedRendezvous(connection, attempt=int(message["attempt"]))
                    self._connecting = asyncio.create_task(self._open(connection, message, self._rendezvous))
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

    async def _receive(self, connection: JoinConnection, *, is_newcomer: bool) -> dict[str, Any]:
        try:
            message = await connection.receive()
        except EOFError:
            if is_newcomer or self.admitted is None:
                raise
            return {"kind": "switched"}  # who leads may have switched already, and is done with these connections
        if message["kind"] == "over":
            raise JobOverError
        if message["kind"] == "refused":
            raise HandshakeError(f"The job does not let this process in: {message['why']}")
        return message

    async def _open(self, connection: JoinConnection, plan: dict[str, Any], rendezvous: AskedRendezvous) -> None:
        attempt = int(plan["attempt"])
        try:
            job, rank = JobRecord.from_json(plan["job"]), int(plan["rank"])
            topology = with_gateways_chosen(job.topology)
            fabric = await connect_tcp(
                self.options,
                rank=rank,
                world_size=job.world_size,
                rendezvous=rendezvous,
                topology=topology,
                numbers=job.numbers,
            )
        except SynclineError as error:
            await connection.send("failed", attempt=attempt, why=str(error))
            return
        self.admitted = Admitted(
            attempt=attempt,
            rank=rank,
            job=job,
            num_newcomers=int(plan["num_newcomers"]),
            topology=topology,
            fabric=fabric,
            loop=self.loop,
        )
        await connection.send("connected", attempt=attempt)


def _generation(message: dict[str, Any]) -> Generation:
    members = [
        Member(rank=rank, host=str(host), address=str(address), port=int(port), is_reachable=bool(is_reachable))
        for rank, (host, address, port, is_reachable) in enumerate(message["members"])
    ]
    return Generation(epoch=int(message["epoch"]), job_nonce=bytes.fromhex(message["nonce"]), members=tuple(members))


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
    _connection: JoinConnection | None = field(default=None, repr=False)
    _is_over: bool = False
    """Whether a member has said that the job is."""
    _waits_for: str = ""

    def ask(self) -> Mapping[str, Any]:
        """Ask to come in, within ``options.connect_s``; return what this process takes over from the job.

        Raises ``HandshakeError`` with the reason: another secret, job or version, no member there, no elastic job, a
        member already, too many that wait, no clear place.
        """
        with tell_if_long(self._wait_in_words):
            return self.loop.run(self._ask(), self.options.connect_s + ANSWER_S)

    def enter(self, lines: Sequence[str], timeout_s: float) -> Admitted:
        """Say that this rank is ready, and return when it is connected and the members have switched.

        ``lines`` describe its training, which must be the job's.
        Raises ``HandshakeError`` where the job's training is another one, or the larger job could not be connected,
        ``EOFError`` where a member has said that the job is over and nobody else answers, and :class:`DeadlineError`.
        """
        with tell_if_long(self._wait_in_words):
            return self.loop.run(self._enter(list(lines), timeout_s), timeout_s + ANSWER_S)

    def close(self) -> None:
        """Stop waiting."""
        if self._connection is not None:
            self.loop.call(self._connection.close, ANSWER_S)

    def _wait_in_words(self) -> str:
        where = ", ".join(format_endpoint(*address) for address in self.addresses)
        return f"{self.machine} waits to come into the job at {where}: {self._waits_for}"

    async def _ask(self) -> Mapping[str, Any]:
        why, now_s = "nobody was asked", asyncio.get_running_loop().time
        until_s = now_s() + self.options.connect_s
        while (left_s := until_s - now_s()) > 0:
            answer = await self._ask_once(left_s)
            if answer["kind"] == "welcome":
                self.addresses = [address_of(each) for each in answer["addresses"]]
                self._is_over = False
                terms: Mapping[str, Any] = answer["terms"]
                return terms
            why = self._go_elsewhere(answer) if answer["kind"] == "elsewhere" else _reason(answer)
            self._waits_for = why
            await asyncio.sleep(PAUSE_S)
        where = ", ".join(format_endpoint(*address) for address in self.addresses)
        raise HandshakeError(
            f"The job at {where} does not let this process in within {self.options.connect_s:g} s: {why}"
        )

    async def _ask_once(self, timeout_s: float) -> Message:
        self._waits_for = "no member answers there; check that its job runs, and that this host reaches it"
        connection = await dial_member(
            self.addresses,
            self.options,
            own_address=self.own_address,
            timeout_s=timeout_s,
            is_once=self._is_over,
        )
        fields = {
            "machine": self.machine,
            "join_address": self.join_address,
            "shares_port": self.options.shared_port is not None,
            "topology": self.topology,
        }
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
        self._waits_for = "its members let it in at the end of a step"
        await self._connection.send("ready", lines=lines)
        try:
            return await Party(self.options, self.loop).follow(self._connection, is_newcomer=True)
        except EOFError as error:
            self._is_over = isinstance(error, JobOverError)
            self._connection.close()
            return None


def _reason(answer: Message) -> str:
    """Return why a member refuses for now; raise if it does for good."""
    if not answer["again"]:
        raise HandshakeError(f"The job does not let this process in: {answer['why']}")
    return str(answer["why"])


class _Part(NamedTuple):
    """This member's part in an attempt."""

    attempt: int
    party: Party
    following: Future[None]


class Growth:
    """Listens for newcomers on ``port`` (0: a free one; else the first free of the next 64); close it at last.

    All methods are for one thread, the one that trains.
    """

    def __init__(self, options: FabricOptions, *, terms: Mapping[str, Any], port: int = 0) -> None:
        """``terms`` are what newcomers take over."""
        self._options = options
        self._job: JobRecord | None = None
        self._rank = 0
        self._part: _Part | None = None
        self._failed_attempt = 0
        self._address = resolve_address(options.address)
        options.check_exposure(self._address)
        assert options.secret is not None or options.insecure, "whoever joins proves that it has the job's secret"
        sock = _listen(self._address, options, port)
        port = sock.getsockname()[1]
        self.join_address: Address = advertised_endpoint(self._address, port, options)
        self._door = format_endpoint(self._address, port)
        tell(doors=[self._door])
        self._loop = CommunicationLoop("syncline-join")
        self._loop.start()
        self._server = self._loop.call(partial(JoinServer, sock, options, terms), ANSWER_S)

    def adopt(self, options: FabricOptions, terms: Mapping[str, Any]) -> None:
        """Behave as the job does that this rank is about to come into."""
        self._options = options
        self._server.adopt(options, terms)

    def open(self, job: JobRecord, rank: int, *, lines: Sequence[str] = (), why_not: str = "") -> None:
        """Begin an epoch of the job, of which this is ``rank``.

        ``lines`` describe the training, and newcomers must have the same; ``why_not`` refuses all newcomers.
        """
        self._job, self._rank = job, rank
        tell(doors=[self._door, *_other_doors(job, rank)])
        self._leave_attempt()
        self._loop.call(partial(self._server.open, job, rank, lines=lines, why_not=why_not), ANSWER_S)

    def refuse(self, why: str) -> None:
        """Let nobody in, before an epoch was opened."""
        self._loop.call_soon(self._server.refuse, why)

    def note_loss(self, number: int) -> None:
        """Begin no attempt before an epoch without the member of this number, as it is lost; from any thread."""
        self._loop.call_soon(self._server.note_loss, number)

    def flags(self) -> Flags:
        """Return this rank's two numbers for the next commit."""
        return self._server.decide() if self._rank == 0 else NO_FLAGS

    def follow(self, begun: int, decided: int) -> Admitted | None:
        """Do what a commit's sums say; where all switch now, return what to."""
        if decided:
            return self._take(decided)
        if self._part is not None and self._part.attempt != begun:
            self._leave_attempt()
        if begun and self._part is None and begun != self._failed_attempt:
            self._join_attempt(begun)
        return None

    def switched(self) -> None:
        """Let the newcomers know that the members have switched; the first member does."""
        self._loop.call_soon(self._server.switched)

    def close(self, *, is_over: bool = False) -> None:
        """Listen no more; a second call does nothing. ``is_over``: newcomers that wait are told that the job is."""
        if not self._loop.is_running() or self._loop.is_of_parent:
            return
        self._leave_attempt()
        self._loop.run(self._server.close(is_over=is_over), ANSWER_S)
        self._loop.stop()

    def _join_attempt(self, attempt: int) -> None:
        loop = CommunicationLoop("syncline-larger")
        try:
            loop.start()
        except OSError as error:
            # Who leads does not hear from this member, and gives the attempt up; the training goes on as it was.
            self._failed_attempt = attempt
            _log.warning("nobody can come in: this rank cannot open what a larger job needs: %s; see ulimit -n", error)
            return
        party = Party(self._options, loop)
        following = asyncio.run_coroutine_threadsafe(self._follow(attempt, party), loop.clock)
        self._part = _Part(attempt, party, following)

    async def _follow(self, attempt: int, party: Party) -> None:
        assert self._job is not None, "the job can grow"
        connection = await dial_member(
            [self._job.join_addresses[0]],
            self._options,
            own_address=self._address,
            timeout_s=self._options.connect_s,
        )
        try:
            await connection.send("member", attempt=attempt, epoch=self._job.epoch, rank=self._rank)
            await party.follow(connection, is_newcomer=False)
        finally:
            connection.close()

    def _take(self, attempt: int) -> Admitted:
        part, self._part = self._part, None
        assert part is not None, "who leads has heard that this rank is connected"
        assert part.attempt == attempt, "attempts follow each other"

        def take() -> Admitted:
            admitted, part.party.admitted = part.party.admitted, None  # so that it is not dropped with the rest
            assert admitted is not None, "it has said so"
            return admitted

        admitted = part.party.loop.call(take, ANSWER_S)
        part.following.cancel()
        return admitted

    def _leave_attempt(self) -> None:
        """Forget what was connected beside the training, or is on the way."""
        part, self._part = self._part, None
        if part is None:
            return

        async def drop() -> None:
            part.following.cancel()
            await part.party.drop()

        part.party.loop.run(drop(), ANSWER_S)
        part.party.loop.stop()


def _other_doors(job: JobRecord, rank: int) -> list[str]:
    """Return where one member of each other machine lets newcomers in, of some machines if there are many."""
    doors = {job.machines[rank]: ""}
    for machine, address in zip(job.machines, job.join_addresses, strict=True):
        doors.setdefault(machine, format_endpoint(*address))
    return list(doors.values())[1 : 1 + _MOST_DOORS]


def _listen(address: str, options: FabricOptions, port: int) -> socket.socket | SharedListener:
    for number in range(port, port + MAX_PORTS):
        try:
            return open_listener(address, options, port=number)
        except ConfigurationError:
            if not port or number + 1 == port + MAX_PORTS:
                raise
    raise AssertionError("the last port returns or raises")
