"""How the ranks find each other: a fresh generation for each start, through a store that may hold stale keys.

A store may outlive an attempt (torchrun restarts workers with the same one), so no key is believed because it is there.
Each rank writes a *hello* with a new nonce. Rank 0 publishes a *record*: a random generation, a nonce for the job,
and all hellos, whose nonces show to each rank whether it is the one that is meant. A rank answers with an *ack* of the
generation; if a hello changes meanwhile (a stale one was replaced), rank 0 publishes a new generation. When all
ranks have acknowledged one generation, rank 0 says *go*, and only that generation is used.

Records are JSON, checked field by field; what does not fit is skipped as if it were stale.

Whoever waits says so after a while. Rank 0, which alone reads who is there, says who is not; the others speak of rank 0
where they hear nothing of it: rank 1 at once, and the rest, who may be many, later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from syncline.errors import HandshakeError, RendezvousError, name_ranks

MAX_RECORD_BYTES = 4 << 20
"""The hellos of 10 000 ranks with long names. PyTorch's ``TCPStore`` takes values of up to 8 MiB."""
NONCE_BYTES = 16
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.25
SILENCE_S = 10.0
LINGER_S = 1.0
"""Rank 0 stays for so long after it told why it gives up; the others look four times."""
ANSWER_MARGIN_S = LINGER_S + 1.0
FIRST_LINE_S, LINE_S = 2.0, 10.0
"""When who waits says so first, and how often then."""
MAX_NAME_LENGTH = 255
MAX_TOPOLOGY_LENGTH = 400
_HELLO_FIELDS = {"rank", "host", "address", "port", "nonce"}

_log = logging.getLogger(__name__)


class Member(NamedTuple):
    """Where a rank listens."""

    rank: int
    host: str
    address: str
    port: int
    topology: str = ""
    """What this rank says of its topology, for ranks that compare theirs; empty where nobody does."""
    is_reachable: bool = True
    """Whether ranks of other hosts can dial it."""


class Generation(NamedTuple):
    """One start of a job, on which all ranks agree."""

    epoch: int
    """A random number of 64 bits; connections of another one are refused."""
    job_nonce: bytes
    members: tuple[Member, ...]


class _Hello(NamedTuple):
    member: Member
    nonce: str


class AnyRendezvous(Protocol):
    """How ranks find each other: :class:`Rendezvous` through a store; those that join a running job ask a member."""

    async def meet(self, member: Member, *, world_size: int, timeout_s: float, silence_s: float) -> Generation:
        """Say where this rank listens, and return where all do; ``RendezvousError`` at the deadline."""

    async def watch(self) -> None:
        """After that, until cancelled: raise ``HandshakeError`` if a rank gives up, or is gone."""

    async def give_up(self, reason: str) -> None:
        """Tell the others why this rank does not connect."""

    async def rest(self) -> None:
        """Tell the others that this rank is connected to all of them."""


class Store(Protocol):
    """A key-value store that all ranks reach; the calls may block and are made in a worker thread.

    What else it raises becomes a :class:`~syncline.errors.RendezvousError`.

    >>> class DictStore(dict):  # where all ranks are in one process
    ...     set = dict.__setitem__
    >>> rendezvous = Rendezvous(DictStore(), job_id="example")
    """

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``, over what was there."""

    def get(self, key: str) -> bytes | None:
        """Return the value that is there now; None if there is none."""


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
            text = self._store.get(f"{self._prefix}/{key}")
        except Exception as error:
            raise _store_failed(error) from error
        if text is None or len(text) > MAX_RECORD_BYTES:
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


class Rendezvous:
    """Meets the other ranks of job ``job_id`` through ``store``, once; :func:`connect_tcp` calls it.

    ``awaited`` says, of the hosts whose ranks are there (one name for each), which hosts have others. ``trouble`` is
    what this rank has come to tell, for its lines while it waits; ``hint``, why others may not reach rank 0.
    """

    def __init__(
        self,
        store: Store,
        *,
        job_id: str,
        pause: Callable[[float], object] = time.sleep,
        now_s: Callable[[], float] = time.monotonic,
        awaited: Callable[[Sequence[str]], Sequence[str]] = lambda _: (),
        trouble: str = "",
        hint: str = "",
    ) -> None:
        self._awaited = awaited
        self._hint = hint
        self._trouble = trouble
        self._records = StoreRecords(store, job_id=job_id)
        self._pause = pause
        self._now_s = now_s
        self._attempt: _Attempt | None = None

    async def meet(
        self, member: Member, *, world_size: int, timeout_s: float, silence_s: float = SILENCE_S
    ) -> Generation:
        """Wait for all ranks without blocking the loop; :class:`RendezvousError` says who did not come, or is gone."""
        stop = threading.Event()

        def meet() -> Generation:
            return self.meet_blocking(
                member, world_size=world_size, timeout_s=timeout_s, silence_s=silence_s, stop=stop
            )

        try:
            async with asyncio.timeout(timeout_s + ANSWER_MARGIN_S):
                return await on_thread(meet, stop)
        except TimeoutError:
            raise RendezvousError(
                f"rank {member.rank} (host {member.host}): the store through which the ranks meet did not answer "
                f"within {timeout_s:.0f} s; check that rank 0's process, or whatever serves MASTER_ADDR and "
                "MASTER_PORT, is running and not stopped"
            ) from None

    async def watch(self) -> None:
        """After the meeting, until cancelled: raise :class:`HandshakeError` if a rank gives up, or is gone.

        Returns if the store is gone: rank 0 may have what it needs.
        """
        stop = threading.Event()
        await on_thread(lambda: self._watch_blocking(stop), stop)

    async def give_up(self, reason: str) -> None:
        """Tell the others why this rank does not connect; returns when they had the time to read it."""
        stop = threading.Event()
        with contextlib.suppress(TimeoutError, RendezvousError):
            async with asyncio.timeout(2 * LINGER_S):
                await on_thread(lambda: self._give_up_blocking(reason), stop)

    async def rest(self) -> None:
        """Tell the others that this rank is connected to all of them."""
        assert self._attempt is not None, "there was a meeting"
        with contextlib.suppress(TimeoutError, RendezvousError):
            async with asyncio.timeout(SILENCE_S):  # whoever does not hear it takes this rank for dead
                await on_thread(self._attempt.presence.rest, threading.Event())

    def meet_blocking(
        self,
        member: Member,
        *,
        world_size: int,
        timeout_s: float,
        silence_s: float = SILENCE_S,
        stop: threading.Event | None = None,
    ) -> Generation:
        """Wait for all ranks."""
        nonce = secrets.token_hex(NONCE_BYTES)
        attempt = _Attempt(
            member=member,
            world_size=world_size,
            nonce=nonce,
            presence=Presence(self._records, member.rank, nonce, silence_s=silence_s, now_s=self._now_s),
            deadline_s=self._now_s() + timeout_s + (0.0 if member.rank == 0 else LINGER_S),  # rank 0 tells them why
            stop=stop or threading.Event(),
        )
        self._attempt = attempt
        self._records.set(f"hello/{member.rank}", {**_member_to_json(member), "nonce": nonce})
        lead = self._lead if member.rank == 0 else self._follow
        pause_s, began_s = FIRST_PAUSE_S, self._now_s()
        line_s = FIRST_LINE_S if member.rank <= 1 or self._trouble else LINE_S
        while True:
            epoch = attempt.epoch
            generation = lead(attempt)
            if generation is not None:
                attempt.presence.vouch(range(world_size))
                return generation
            trouble = self._look(attempt)
            if trouble is not None:
                raise RendezvousError(trouble)
            if attempt.stop.is_set() or self._now_s() >= attempt.deadline_s:
                text = (
                    f"rank {member.rank} (host {member.host}) waited {timeout_s:.0f} s for the others: "
                    f"{attempt.waits_for}; check that all processes of the job run and reach the same store"
                )
                if member.rank == 0 and not attempt.stop.is_set():
                    self._give_up_blocking(text)  # it alone knows who did not come
                raise RendezvousError(text)
            waited_s = self._now_s() - began_s
            if waited_s >= line_s:
                line_s = waited_s + LINE_S
                self._tell_wait(attempt, waited_s)
            if attempt.epoch != epoch:
                pause_s = FIRST_PAUSE_S  # all are there, and answer each other now
            self._pause(pause_s)
            pause_s = min(1.1 * pause_s, LONGEST_PAUSE_S)  # looks again after a tenth of what it has waited

    def _tell_wait(self, attempt: _Attempt, waited_s: float) -> None:
        """Say for whom this rank waits, if nobody else does."""
        member = attempt.member
        if member.rank == 0 or self._trouble or not attempt.presence.is_heard(0):
            text = f"{attempt.waits_for}{self._trouble and f'; it has to tell them: {self._trouble}'}"
            who = f"rank {member.rank} (host {member.host})"
            _log.warning("%s has waited %.0f s for the others: %s", who, waited_s, text)

    def _watch_blocking(self, stop: threading.Event) -> None:
        assert self._attempt is not None, "there was a meeting"
        while not stop.is_set():
            try:
                trouble = self._look(self._attempt)
            except RendezvousError:
                return
            if trouble is not None:
                raise HandshakeError(trouble)
            stop.wait(LONGEST_PAUSE_S)

    def _give_up_blocking(self, reason: str) -> None:
        assert self._attempt is not None, "there was a meeting"
        self._attempt.presence.tell(reason, {rank: hello.nonce for rank, hello in self._attempt.hellos.items()})
        if self._attempt.member.rank == 0:
            self._pause(LINGER_S)  # with this process its store may end

    def _look(self, attempt: _Attempt) -> str | None:
        """Show that this rank is there; return why the job cannot begin, if somebody found out. Rank 0 tells all."""
        watched = attempt.hellos if attempt.member.rank == 0 else (0,)
        gone = attempt.presence.beat(rank for rank in watched if rank != attempt.member.rank)
        trouble = attempt.presence.heard()
        if trouble is None and gone:
            trouble = (
                f"{name_ranks(gone)} came and then fell silent before all were connected: look at the output of "
                f"{'that rank' if len(gone) == 1 else 'those ranks'} (died, killed or stopped)"
            )
        if trouble is not None and attempt.member.rank == 0:
            self._give_up_blocking(trouble)
        return trouble

    def _lead(self, attempt: _Attempt) -> Generation | None:
        """Rank 0: publish who is there whenever it changes; say go when all have acknowledged."""
        unheard = [rank for rank in range(attempt.world_size) if rank not in attempt.hellos]
        missing = [rank for rank in unheard if not self._hear(attempt, rank)]
        if missing:
            hosts = ", ".join(self._awaited([hello.member.host for hello in attempt.sorted_hellos()]))
            here = f"{attempt.world_size - len(missing)} of {attempt.world_size} are here"
            absent = f"{name_ranks(missing)} did not come{hosts and f' (of {hosts})'}"
            attempt.waits_for = f"{here}, and {absent}{self._hint and f'; {self._hint}'}"
            return None
        before = attempt.waiting
        if not attempt.epoch:
            self._publish(attempt)
        attempt.waiting = [
            rank
            for rank in attempt.waiting
            if self._records.get(f"ack/{rank}") != {"epoch": attempt.epoch, "nonce": attempt.hellos[rank].nonce}
        ]
        if attempt.waiting == before:
            for rank in before:
                self._hear(attempt, rank)  # it may have replaced what an earlier attempt left
        if attempt.waiting:
            who = name_ranks(attempt.waiting)
            attempt.waits_for = f"{who} did not acknowledge yet (busy, stopped, or gone with an earlier attempt)"
            return None
        self._records.set("go", {"epoch": attempt.epoch})
        return attempt.generation()

    def _hear(self, attempt: _Attempt, rank: int) -> bool:
        """Take note of a rank's hello; whether there is one."""
        hello = _parse_hello(self._records.get(f"hello/{rank}"), rank)
        if hello is not None and attempt.hellos.get(rank) != hello:
            attempt.hellos[rank] = hello
            attempt.epoch = 0
        return hello is not None

    def _publish(self, attempt: _Attempt) -> None:
        """Write all hellos under a name of their own, then the record that points to them, at which all look often."""
        attempt.waiting = list(range(1, attempt.world_size))
        attempt.epoch = secrets.randbits(64) or 1
        attempt.job_nonce = secrets.token_hex(32)
        hellos = [{**_member_to_json(hello.member), "nonce": hello.nonce} for hello in attempt.sorted_hellos()]
        self._records.set(f"record/{attempt.epoch}", hellos)
        self._records.set(
            "record",
            {"epoch": attempt.epoch, "job_nonce": attempt.job_nonce, "world_size": attempt.world_size},
        )

    def _follow(self, attempt: _Attempt) -> Generation | None:
        """Every other rank: acknowledge the newest record that holds this attempt's nonce; wait for its go."""
        is_heard = attempt.presence.is_heard(0)
        attempt.waits_for = "rank 0 waits for others" if is_heard else "nothing is heard of rank 0"
        record = self._records.get("record")
        if not isinstance(record, dict) or not _is_record(record):
            return None
        if record["world_size"] != attempt.world_size:
            attempt.waits_for = (
                f"rank 0 has a world size of {record['world_size']}, this rank of {attempt.world_size}; "
                "give all ranks the same WORLD_SIZE"
            )
            return None
        if record["epoch"] != attempt.epoch and not self._read_record(attempt, record):
            return None
        attempt.waits_for = "rank 0 did not say go (some rank did not acknowledge yet)"
        if self._records.get("go") != {"epoch": attempt.epoch}:
            return None
        return attempt.generation()

    def _read_record(self, attempt: _Attempt, record: dict[str, Any]) -> bool:
        entries = self._records.get(f"record/{record['epoch']}")
        if not isinstance(entries, list) or len(entries) != attempt.world_size:
            return False
        parsed = ((rank, _parse_hello(entry, rank)) for rank, entry in enumerate(entries))
        hellos = {rank: hello for rank, hello in parsed if hello is not None}
        own = hellos.get(attempt.member.rank)
        if len(hellos) != attempt.world_size or own is None or own.nonce != attempt.nonce:
            return False
        attempt.hellos, attempt.epoch, attempt.job_nonce = hellos, record["epoch"], record["job_nonce"]
        self._records.set(f"ack/{attempt.member.rank}", {"epoch": attempt.epoch, "nonce": attempt.nonce})
        return True


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What one rank knows while it waits."""

    member: Member
    world_size: int
    nonce: str
    presence: Presence
    deadline_s: float
    stop: threading.Event
    epoch: int = 0
    """The generation that was published or acknowledged; 0 if none was."""
    job_nonce: str = ""
    hellos: dict[int, _Hello] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    """Who has not acknowledged it."""
    waits_for: str = "nothing was heard yet"

    def sorted_hellos(self) -> list[_Hello]:
        return [self.hellos[rank] for rank in sorted(self.hellos)]

    def generation(self) -> Generation:
        return Generation(
            epoch=self.epoch,
            job_nonce=bytes.fromhex(self.job_nonce),
            members=tuple(hello.member for hello in self.sorted_hellos()),
        )


def _member_to_json(member: Member) -> dict[str, object]:
    usual = Member._field_defaults
    return {name: value for name, value in member._asdict().items() if name not in usual or value != usual[name]}


def _parse_hello(value: Any, rank: int) -> _Hello | None:
    """Check a hello's schema; None for anything else."""
    if not isinstance(value, dict) or set(value) - {"topology", "is_reachable"} != _HELLO_FIELDS:
        return None
    host, port, nonce, topology = value["host"], value["port"], value["nonce"], value.get("topology", "")
    is_reachable = value.get("is_reachable", True)
    if value["rank"] != rank or not _is_text(host, 1, MAX_NAME_LENGTH) or type(is_reachable) is not bool:
        return None
    if not _is_text(topology, 0, MAX_TOPOLOGY_LENGTH):
        return None
    if type(port) is not int or not 0 < port < 1 << 16 or not _is_hex(nonce, NONCE_BYTES):
        return None
    try:
        address = str(ipaddress.ip_address(value["address"]))
    except ValueError:
        return None
    member = Member(rank=rank, host=host, address=address, port=port, topology=topology, is_reachable=is_reachable)
    return _Hello(member=member, nonce=nonce)


def _is_record(record: dict[str, Any]) -> bool:
    if set(record) != {"epoch", "job_nonce", "world_size"}:
        return False
    counts = (record["epoch"], record["world_size"])
    return (
        all(type(count) is int and count > 0 for count in counts)
        and record["epoch"] < 1 << 64
        and _is_hex(record["job_nonce"], 32)
    )


def _is_text(value: object, least: int, most: int) -> bool:
    """Whether errors and logs may show it."""
    return isinstance(value, str) and least <= len(value) <= most and value.isprintable()


def _is_hex(value: object, num_bytes: int) -> bool:
    return isinstance(value, str) and len(value) == 2 * num_bytes and set(value) <= set("0123456789abcdef")


BEAT_S = 0.5
MAX_TEXT = 4000


class Presence:
    """Who is still there while ranks meet and connect, and what those that gave up said; through the store alone.

    Before ranks are connected, nothing else tells that one of them died. Each writes a number that grows, its *pulse*:
    rank 0 looks at the pulses of all, the others at rank 0's. One that moved before and then stands for too long is
    gone; one that never moved may be a key that an earlier attempt left behind, or a rank that is late. Whoever gives
    up tells rank 0, and rank 0 tells all, in keys that hold the nonce of whom they are for, so that no later attempt
    reads them.
    """

    def __init__(
        self, records: StoreRecords, rank: int, nonce: str, *, silence_s: float, now_s: Callable[[], float]
    ) -> None:
        self._records = records
        self._rank = rank
        self._nonce = nonce
        self._silence_s = silence_s
        self._now_s = now_s
        self._writing = threading.Lock()
        self._rests = False
        self._num_beats = 0
        self._beat_s = float("-inf")
        self._pulses: dict[int, object] = {}
        self._moved_s: dict[int, float] = {}

    def beat(self, watched: Iterable[int]) -> list[int]:
        """Let the pulse go on, and return those of ``watched`` that are gone; call it often."""
        now_s = self._now_s()
        if now_s - self._beat_s < min(BEAT_S, self._silence_s / 10):
            return []
        slept_s = now_s - self._beat_s - self._silence_s / 2
        if 0 < slept_s < float("inf"):  # this rank itself was away, and that does not count against the others
            self._moved_s = dict.fromkeys(self._moved_s, now_s)
        self._beat_s = now_s
        self._num_beats += 1
        with self._writing:  # another thread may let this rank rest, and the last word is that
            if not self._rests:
                self._records.set(f"pulse/{self._rank}", [self._nonce, self._num_beats])
        return [rank for rank in watched if self._is_gone(rank, now_s)]

    def vouch(self, ranks: Iterable[int]) -> None:
        """Take these for ranks of this attempt, which were there a moment ago, though their pulses did not move yet."""
        for rank in ranks:
            self._moved_s.setdefault(rank, self._now_s())

    def is_heard(self, rank: int) -> bool:
        """Whether the pulse of a rank that is watched has moved."""
        return rank in self._moved_s

    def rest(self) -> None:
        """Let nobody expect the pulse to go on: this rank is connected to all others, which now see for themselves."""
        with self._writing:
            self._rests = True
            self._records.set(f"pulse/{self._rank}", [self._nonce, -1])

    def heard(self) -> str | None:
        """Return why some rank gave up, if one did."""
        text = self._records.get(f"failed/{self._nonce}")
        return text[:MAX_TEXT] if isinstance(text, str) else None

    def tell(self, text: str, nonces: Mapping[int, str]) -> None:
        """Say why this rank gives up: to all of ``nonces`` if it is rank 0, else to rank 0, which passes it on."""
        for rank, nonce in nonces.items():
            if rank != self._rank and (self._rank == 0 or rank == 0):
                self._records.set(f"failed/{nonce}", text[:MAX_TEXT])

    def _is_gone(self, rank: int, now_s: float) -> bool:
        pulse = self._records.get(f"pulse/{rank}")
        if isinstance(pulse, list) and pulse[-1:] == [-1]:
            self._moved_s.pop(rank, None)
            return False
        if rank not in self._pulses:
            self._pulses[rank] = pulse
            return False
        if pulse != self._pulses[rank]:
            self._pulses[rank] = pulse
            self._moved_s[rank] = now_s
        return now_s - self._moved_s.get(rank, now_s) >= self._silence_s


T = TypeVar("T")

STOP_S = 1.0
"""How long a thread that was told to stop is waited for."""


async def on_thread(function: Callable[[], T], stop: threading.Event) -> T:
    """Run ``function`` on a thread of its own and return what it returns; ``stop`` is set when that is not wanted."""
    thread, outcome = begin_on_thread(function, "syncline-rendezvous")
    try:
        return await asyncio.wrap_future(outcome)
    finally:
        stop.set()
        thread.join(STOP_S)


def begin_on_thread(function: Callable[[], T], name: str) -> tuple[threading.Thread, Future[T]]:
    """Run ``function`` on a thread of that name; return the thread, and what becomes of it.

    An executor's threads are joined when the interpreter ends; one that hangs in a foreign call would keep the process
    alive.
    """
    outcome: Future[T] = Future()

    def main() -> None:
        with contextlib.suppress(InvalidStateError):  # nobody wants it any more
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

    thread = threading.Thread(target=main, name=name, daemon=True)
    thread.start()
    return thread, outcome
