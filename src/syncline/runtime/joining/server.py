"""Where newcomers ask to come in: on every member; the first of them leads, and the others say where it is.

Newcomers that are ready are taken in together: as soon as no other one is on its way, at the latest after
:data:`GATHER_S`. An attempt that fails ends for its newcomers with the reason; one that a loss ended begins anew.
Everything here is called on one asyncio loop, if nothing else is said.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

from syncline.errors import TopologyError
from syncline.fabric import FabricOptions
from syncline.fabric.acceptor import Acceptor
from syncline.fabric.handshake import Admission
from syncline.fabric.rendezvous import MAX_NAME_LENGTH
from syncline.fabric.shared_port import SharedListener, name_of
from syncline.fabric.sockets import prepare_connected
from syncline.members.job_record import Address, Attempt, Flags, JobRecord, Newcomer, address_of
from syncline.runtime.joining.connection import JoinConnection, Message, join_terms

VERSION = version("syncline")
MAX_WAITING = 64
GATHER_S = 2.0
NOT_YET = "its job makes no elastic training (yet): its ranks must call distribute(..., elastic=True), or reconfigure()"

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class _Asker:
    """Who is connected here: a newcomer, or a member within an attempt."""

    connection: JoinConnection
    newcomer: Newcomer | None = None
    is_ready: bool = False
    rank: int | None = None
    """Its rank in the larger job, within an attempt."""


class JoinServer:
    """Serves newcomers and members on ``sock``, which listens; ``open`` says that the job can grow."""

    def __init__(self, sock: socket.socket | SharedListener, options: FabricOptions, terms: Mapping[str, Any]) -> None:
        """``terms``: what newcomers are told of the job, and take over."""
        self._options = options
        self._terms = dict(terms)
        self._loop = asyncio.get_running_loop()
        self._job: JobRecord | None = None
        self._rank = 0
        self._lost: set[int] = set()
        """Numbers of members that are lost, while the epoch is one with them."""
        self._lines: tuple[str, ...] = ()
        self._why_not = NOT_YET
        self._askers: list[_Asker] = []
        self._attempt: Attempt | None = None
        self._number = 0
        self._lock = threading.Lock()
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = sock
        self._acceptor = Acceptor(
            sock,
            join_terms(options, is_member=True),
            handshake_s=options.handshake_s,
            is_taken=lambda *_: False,
            on_connection=self._on_connection,
        )

    def open(self, job: JobRecord, rank: int, *, lines: Sequence[str] = (), why_not: str = "") -> None:
        """Begin an epoch; newcomers of an attempt of the one before wait for the next.

        ``lines`` describe the training, and newcomers must have the same; ``why_not`` refuses all.
        """
        if self._attempt is not None:
            self._attempt.is_decided = False  # the commit that would have switched was that of no epoch
        self._abandon("the members of the job changed meanwhile; it is begun anew")
        is_on_another_fabric = self._job is not None and job.epoch != self._job.epoch  # which members have left for it
        self._lost.intersection_update(() if is_on_another_fabric else job.numbers)
        self._job, self._rank, self._lines, self._why_not = job, rank, tuple(lines), why_not
        if isinstance(self._socket, SharedListener):  # who leads is the first of its host's
            terms = join_terms(self._options, is_member=True)
            self._socket.serve(name_of(terms.job, terms.epoch, terms.rank), order=rank)
        if why_not:
            self._refuse([asker for asker in self._askers if asker.newcomer is not None], why_not)
        self._look()

    def note_loss(self, number: int) -> None:
        """Begin no attempt before an epoch without this member; whoever leads without it lets newcomers wait."""
        if self._job is not None and number in self._job.numbers:
            self._lost.add(number)
            self._abandon("a member is lost; it is begun anew without it")

    def refuse(self, why: str) -> None:
        """Let nobody in, for good: the job makes a training that cannot grow."""
        self._why_not = why

    def adopt(self, options: FabricOptions, terms: Mapping[str, Any]) -> None:
        """Behave as the job does that this rank is about to come into."""
        self._options, self._terms = options, dict(terms)

    def decide(self) -> Flags:
        """Return the attempt that is under way, and the same number again if all are connected (0: none).

        From any thread. Once it has returned the second, the attempt is not given up.
        """
        with self._lock:
            attempt = self._attempt
            if attempt is None:
                return 0, 0
            if not attempt.is_told:
                attempt.is_told = True
                self._loop.call_soon_threadsafe(self._announce, attempt)
            attempt.is_decided = attempt.is_connected
            return attempt.number, attempt.number if attempt.is_decided else 0

    def switched(self) -> None:
        """Let the newcomers of the attempt in: the members have switched."""
        assert self._attempt is not None, "someone decided"
        self._attempt = None
        self._cancel_timers()
        for asker in [asker for asker in self._askers if asker.rank is not None]:
            self._askers.remove(asker)
            if asker.newcomer is not None:
                self._tell(asker, "switched", is_last=True)
            else:
                asker.connection.close()

    async def close(self, *, is_over: bool = False) -> None:
        """Release everything; who waits here asks the other members, and if the job ``is_over``, only once."""
        self._cancel_timers()
        if is_over:
            newcomers = [asker for asker in self._askers if asker.newcomer is not None]
            self._askers = [asker for asker in self._askers if asker.newcomer is None]
            told = [self._tell(asker, "over", is_last=True) for asker in newcomers]
            await asyncio.gather(*told, return_exceptions=True)
        tasks = [*self._acceptor.close(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- who asks -----------------------------------------------------------------------------------------------

    def _on_connection(self, admission: Admission, sock: socket.socket) -> None:
        task = self._loop.create_task(self._serve(admission, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, admission: Admission, sock: socket.socket) -> None:
        try:
            prepare_connected(sock, 0, self._options)
            connection = await JoinConnection.over(sock, admission.frame_keys)
        except OSError:  # it has gone again
            sock.close()
            return
        asker: _Asker | None = None
        try:
            async with asyncio.timeout(self._options.handshake_s):
                message = await connection.receive()
            asker = await self._admit(connection, message)
            while asker is not None:
                await self._hear(asker, await connection.receive())
        except (EOFError, TimeoutError, LookupError, ValueError, TypeError) as error:
            if not isinstance(error, EOFError):
                _log.warning("rank %d: what asks to join does not speak as it should: %r", self._rank, error)
        finally:
            connection.close()
            if asker is not None and asker in self._askers:
                self._gone(asker)

    async def _admit(self, connection: JoinConnection, message: Message) -> _Asker | None:
        """Answer the first message; None if that is all."""
        if message["kind"] == "member":
            return await self._admit_member(connection, message)
        if message["kind"] != "join":
            raise ValueError(message["kind"])
        newcomer = Newcomer(
            machine=_name(message["machine"]),
            join_address=address_of(message["join_address"]),
            topology=message["topology"],
        )
        if answer := self._refusal(newcomer, message):
            await connection.send(**answer)
            return None
        assert self._job is not None, "else it was refused"
        asker = _Asker(connection=connection, newcomer=newcomer)
        self._askers.append(asker)
        await connection.send("welcome", terms=self._terms, job=self._job.to_json(), addresses=self._job.join_addresses)
        return asker

    def _refusal(self, newcomer: Newcomer, message: Message) -> dict[str, Any] | None:
        """Return what to answer instead of a welcome, if anything; ``again`` says that it may become true."""
        job, why, again = self._job, "", False
        if message["version"] != VERSION:
            why = f"the job runs Syncline {VERSION}, this process {message['version']}; install the same"
        elif job is None or self._why_not:
            why, again = self._why_not, self._why_not == NOT_YET
        elif newcomer.join_address in self._living_addresses(job) and not message["shares_port"]:
            why = "it is a member of the job already"
        elif not self._lost.issuperset(job.numbers[: self._rank]):
            return {"kind": "elsewhere", "addresses": job.join_addresses}
        elif sum(asker.newcomer is not None for asker in self._askers) >= MAX_WAITING:
            why, again = f"{MAX_WAITING} newcomers are waiting already", True
        else:
            why = _misplaced(job, newcomer)
        return {"kind": "refused", "why": why, "again": again} if why else None

    def _living_addresses(self, job: JobRecord) -> list[Address]:
        members = zip(job.numbers, job.join_addresses, strict=True)
        return [address for number, address in members if number not in self._lost]

    async def _admit_member(self, connection: JoinConnection, message: Message) -> _Asker | None:
        attempt, rank = self._attempt, int(message["rank"])
        if attempt is None or message["attempt"] != attempt.number or message["epoch"] != attempt.job.epoch - 1:
            await connection.send("refused", why="this attempt is over", again=False)
            return None
        asker = _Asker(connection=connection, rank=rank)
        self._askers.append(asker)
        await connection.send("connect", **attempt.plan(rank))
        return asker

    async def _hear(self, asker: _Asker, message: Message) -> None:
        kind, attempt = message["kind"], self._attempt
        if kind == "ready":
            if differing := _first_difference(self._lines, [str(line) for line in message["lines"]]):
                self._refuse([asker], f"its training is another one: {differing}; run the same script")
                return
            asker.is_ready = True
            self._look()
        elif attempt is None or asker.rank is None or message["attempt"] != attempt.number:
            return  # of an attempt that is over
        elif kind == "listening":
            host, address, port = _name(message["host"]), str(message["address"]), int(message["port"])
            if attempt.listens(asker.rank, [host, address, port, bool(message["is_reachable"])]):
                told = attempt.generation()
                for other in [other for other in self._askers if other.rank is not None]:
                    self._tell(other, "generation", **told)
        elif kind == "connected":
            attempt.connected(asker.rank)
        elif kind == "failed":
            self._fail(f"{self._describe(asker)} could not connect: {message['why']}")

    def _gone(self, asker: _Asker) -> None:
        """Begin anew without a newcomer that has gone; or without a member, whose loss the job notices by itself."""
        self._askers.remove(asker)
        if asker.rank is not None and self._attempt is not None:
            self._abandon(f"{self._describe(asker)} is gone")
        self._look()

    # --- attempts -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin an attempt, if there is somebody to be taken in and nobody to be waited for."""
        newcomers = [asker for asker in self._askers if asker.newcomer is not None]
        ready = [asker for asker in newcomers if asker.is_ready]
        if not ready or self._attempt is not None or self._job is None or self._why_not or self._rank or self._lost:
            return
        if len(ready) == len(newcomers):
            self._begin()
        elif not self._timers:
            self._timers.append(self._loop.call_later(GATHER_S, self._begin))

    def _begin(self) -> None:
        self._cancel_timers()
        ready = [asker for asker in self._askers if asker.newcomer is not None and asker.is_ready]
        if self._attempt is not None or self._job is None or self._lost or not ready:
            return
        try:
            job = self._job.grown([asker.newcomer for asker in ready if asker.newcomer is not None])
        except TopologyError as error:
            self._refuse(ready, str(error))
            return
        self._number += 1
        attempt = Attempt(number=self._number, job=job, num_newcomers=len(ready))
        self._attempt = attempt
        for rank, asker in enumerate(ready, self._job.world_size):
            asker.rank = rank

    def _announce(self, attempt: Attempt) -> None:
        """Let newcomers connect, as members do from now on: until a step's end, or a period's, they hear of nothing."""
        if attempt is not self._attempt:
            return
        for asker in self._askers:
            if asker.newcomer is not None and asker.rank is not None:
                self._tell(asker, "connect", **attempt.plan(asker.rank))
        self._timers.append(self._loop.call_later(self._options.connect_s, self._expire, attempt))

    def _expire(self, attempt: Attempt) -> None:
        if attempt is self._attempt and not attempt.is_connected:
            self._fail(f"{attempt.describe_missing()} within {self._options.connect_s:g} s")

    def _fail(self, why: str) -> None:
        """Give an attempt up for good: the old epoch goes on, and its newcomers hear why."""
        newcomers = [asker for asker in self._askers if asker.newcomer is not None and asker.rank is not None]
        if self._abandon(why):
            self._refuse(newcomers, f"the larger job could not be connected: {why}")

    def _abandon(self, why: str) -> bool:
        """Give an attempt up; its newcomers wait for the next one. False if there is none, or it is too late."""
        with self._lock:
            if self._attempt is None or self._attempt.is_decided:
                return False
            self._attempt = None
        self._cancel_timers()
        for asker in [asker for asker in self._askers if asker.rank is not None]:
            asker.rank = None
            if asker.newcomer is not None:
                self._tell(asker, "abandoned", why=why)
            else:
                self._askers.remove(asker)
                asker.connection.close()
        return True

    def _refuse(self, askers: list[_Asker], why: str) -> None:
        for asker in askers:
            self._askers.remove(asker)
            self._tell(asker, "refused", is_last=True, why=why, again=False)

    def _tell(self, asker: _Asker, kind: str, *, is_last: bool = False, **fields: object) -> asyncio.Task[None]:
        """Send without waiting here; the connection is closed after the last message, or where nobody reads it."""

        async def tell() -> None:
            is_sent = False
            try:
                async with asyncio.timeout(self._options.handshake_s):
                    await asker.connection.send(kind, **fields)
                is_sent = True
            finally:
                if is_last or not is_sent:
                    asker.connection.close()

        task = self._loop.create_task(tell())
        self._tasks.add(task)
        task.add_done_callback(self._told)
        return task

    def _told(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody reads there: the connection is closed, and who serves it notices

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _describe(self, asker: _Asker) -> str:
        assert self._attempt is not None, "there is an attempt"
        assert asker.rank is not None, "it takes part"
        job = self._attempt.job
        who = "the newcomer" if asker.newcomer is not None else f"rank {job.numbers[asker.rank]}"
        return f"{who} on {job.machines[asker.rank]}"


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    for own, other in zip_longest(ours, theirs, fillvalue="nothing more"):
        if own != other:
            return f"the job has {own!r}, and it {other!r}"
    return ""


def _misplaced(job: JobRecord, newcomer: Newcomer) -> str:
    """Say why there is no clear place for a newcomer, if there is none; a tree of its own is judged later."""
    try:
        job.grown([replace(newcomer, topology=None)])
    except TopologyError as error:
        return str(error)
    return ""


def _name(value: Any) -> str:
    name = str(value)
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(name)
    return name
