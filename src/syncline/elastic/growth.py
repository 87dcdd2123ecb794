"""How a member lets newcomers in while it trains: what it tells in the commits of its steps, and what follows of it.

The first member leads. It tells, with two numbers in each commit, which attempt is under way and that it is connected;
so all members begin to connect the larger job's fabric beside the old one, and all switch at the same step's end. The
numbers of the others are 0, and a sum shows the first's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from syncline.elastic.job_record import Address, JobRecord
from syncline.elastic.join_connection import dial_member
from syncline.elastic.join_server import JoinServer
from syncline.elastic.party import Admitted, Party
from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.fabric.sockets import open_listening_socket, resolve_address
from syncline.observe import Trace
from syncline.runtime import CommunicationLoop

_log = logging.getLogger(__name__)

MAX_PORTS = 64
"""Ranks of one host take the next free ports."""
ANSWER_S = 30.0
"""For a loop that does not answer; everything on it has deadlines of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerFabric:
    """What the members switch to; ``loop`` is the fabric's, and is whoever takes it to stop."""

    admitted: Admitted
    loop: CommunicationLoop


@dataclass(slots=True, kw_only=True)
class _Part:
    """This member's part in an attempt."""

    attempt: int
    loop: CommunicationLoop
    party: Future[Party]
    following: Future[None]


class Growth:
    """Listens for newcomers on ``port`` (0: a free one; else the first free of the next 64); close it at last.

    All methods are for one thread, the one that trains.
    """

    def __init__(
        self,
        options: FabricOptions,
        *,
        machine: str,
        terms: Mapping[str, Any],
        port: int = 0,
        trace: Trace | None = None,
    ) -> None:
        """``terms`` are what newcomers take over; ``machine`` is what this rank calls its host."""
        self._options = options
        self._machine = machine
        self._trace = trace
        self._job: JobRecord | None = None
        self._rank = 0
        self._part: _Part | None = None
        self._failed_attempt = 0
        self._address = resolve_address(options.address)
        options.check_exposure(self._address)
        if options.secret is None and not options.insecure:
            raise ConfigurationError(
                "whoever joins proves that it has the job's secret, and there is none: anyone on this machine could; "
                "give FabricOptions(secret=) at least 32 bytes"
            )
        sock = _listen(self._address, options, port)
        self.join_address: Address = (self._address, sock.getsockname()[1])
        self._loop = CommunicationLoop("syncline-join", native=False)
        self._loop.start()

        async def serve() -> JoinServer:
            return JoinServer(sock, options, terms)

        self._server = self._loop.run(serve(), ANSWER_S)

    @property
    def num_refused(self) -> int:
        """How many connections of strangers were refused."""
        return self._server.num_refused

    def adopt(self, options: FabricOptions, terms: Mapping[str, Any]) -> None:
        """Behave as the job does that this rank is about to come into."""
        self._options = options
        self._server.adopt(options, terms)

    def open(self, job: JobRecord, rank: int, *, lines: Sequence[str] = (), why_not: str = "") -> None:
        """Begin an epoch of the job, of which this is ``rank``.

        ``lines`` describe the training, and newcomers must have the same; ``why_not`` refuses all newcomers.
        """
        self._job, self._rank = job, rank
        self._leave_attempt()

        async def open_it() -> None:
            self._server.open(job, rank, lines=lines, why_not=why_not)

        self._loop.run(open_it(), ANSWER_S)

    def refuse(self, why: str) -> None:
        """Let nobody in, before an epoch was opened."""
        self._loop.call_soon(self._server.refuse, why)

    def flags(self) -> tuple[int, int]:
        """Return this rank's two numbers for the next commit."""
        return self._server.decide() if self._rank == 0 else (0, 0)

    def follow(self, begun: int, decided: int) -> LargerFabric | None:
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
        loop = CommunicationLoop("syncline-larger", native=self._options.native)
        try:
            loop.start()
        except OSError as error:
            # Who leads does not hear from this member, and gives the attempt up; the training goes on as it was.
            self._failed_attempt = attempt
            _log.warning("nobody can come in: this rank cannot open what a larger job needs: %s; see ulimit -n", error)
            return
        party: Future[Party] = Future()
        following = asyncio.run_coroutine_threadsafe(self._follow(attempt, party), loop.clock)
        self._part = _Part(attempt=attempt, loop=loop, party=party, following=following)

    async def _follow(self, attempt: int, asked: Future[Party]) -> None:
        assert self._job is not None, "the job can grow"
        connection = await dial_member(
            [self._job.join_addresses[0]],
            self._options,
            own_address=self._address,
            timeout_s=self._options.connect_s,
        )
        try:
            await connection.send("member", attempt=attempt, epoch=self._job.epoch, rank=self._rank)
            party = Party(connection, self._options, self._trace)
            asked.set_result(party)
            await party.follow(is_newcomer=False)
        finally:
            connection.close()

    def _take(self, attempt: int) -> LargerFabric:
        part, self._part = self._part, None
        assert part is not None, "who leads has heard that this rank is connected"
        assert part.attempt == attempt, "attempts follow each other"

        async def take() -> Admitted:
            party = part.party.result()
            admitted, party.admitted = party.admitted, None  # so that it is not dropped with the rest
            assert admitted is not None, "it has said so"
            return admitted

        admitted = part.loop.run(take(), ANSWER_S)
        part.following.cancel()
        return LargerFabric(admitted=admitted, loop=part.loop)

    def _leave_attempt(self) -> None:
        """Forget what was connected beside the training, or is on the way."""
        part, self._part = self._part, None
        if part is None:
            return

        async def drop() -> None:
            part.following.cancel()
            if part.party.done():
                await part.party.result().drop()

        part.loop.run(drop(), ANSWER_S)
        part.loop.stop()


def _listen(address: str, options: FabricOptions, port: int) -> Any:
    for number in range(port, port + MAX_PORTS):
        try:
            return open_listening_socket(address, options, port=number)
        except ConfigurationError:
            if not port or number + 1 == port + MAX_PORTS:
                raise
    raise AssertionError("the last port returns or raises")
