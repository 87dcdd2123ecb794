"""How newcomers come into a job, without a training: members that make commits of nothing, over loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from syncline.errors import HandshakeError
from syncline.fabric import FabricOptions
from syncline.members.job_record import JobRecord
from syncline.runtime import CommunicationLoop, Communicator
from syncline.runtime.joining import Admitted, Entry, Growth, server
from syncline.topology import Topology

OPTIONS = FabricOptions(job_id="growing", secret=b"s" * 32, connect_s=20.0)
PATIENCE_S = 60.0
LINES = ("rule AllReduce()", "parameter weight: (2, 3)")


@dataclass
class Members:
    """The members of a job in one process."""

    growths: list[Growth]
    job: JobRecord

    def commit(self) -> list[Admitted | None]:
        """Make the commit of a step: all see the same sums."""
        sums = [sum(numbers) for numbers in zip(*(growth.flags() for growth in self.growths), strict=True)]
        return [growth.follow(*sums) for growth in self.growths]

    def commit_until_they_switch(self) -> list[Admitted]:
        """Make steps until newcomers are in."""
        deadline = threading.Event()
        for _ in range(int(PATIENCE_S / 0.01)):
            larger = [one for one in self.commit() if one is not None]
            if larger:
                assert len(larger) == len(self.growths)
                self.growths[0].switched()
                return larger
            deadline.wait(0.01)  # a step
        raise AssertionError("nobody came in")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [growth.join_address for growth in self.growths]


@contextlib.contextmanager
def members(number: int, *, is_open: bool = True, why_not: str = "") -> Iterator[Members]:
    with contextlib.ExitStack() as stack:
        growths = []
        for _ in range(number):
            growths.append(Growth(OPTIONS, terms={"timeout_s": 7.0}))
            stack.callback(growths[-1].close)
        job = JobRecord.first(
            Topology.flat(number), machines=["box"] * number, join_addresses=[each.join_address for each in growths]
        )
        if is_open:
            for rank, growth in enumerate(growths):
                growth.open(job, rank, lines=LINES, why_not=why_not)
        yield Members(growths, job)


@contextlib.contextmanager
def newcomer(asked: tuple[str, int], options: FabricOptions = OPTIONS, machine: str = "box") -> Iterator[Entry]:
    loop = CommunicationLoop("newcomer")
    loop.start()
    entry = Entry(
        loop=loop,
        options=options,
        own_address="127.0.0.1",
        machine=machine,
        join_address=("127.0.0.1", 1 + threading.get_ident() % 60000),
        addresses=[asked],
    )
    try:
        yield entry
    finally:
        entry.close()
        loop.stop()


def come(asked: tuple[str, int], gather: threading.Barrier, then: threading.Event) -> Admitted:
    """Come in, take part in one barrier of the larger job, and leave."""
    with newcomer(asked) as entry:
        entry.ask()
        gather.wait(PATIENCE_S)
        admitted = entry.enter(LINES, PATIENCE_S)
        talk(admitted)
        then.wait(PATIENCE_S)
        return admitted


def talk(admitted: Admitted) -> None:
    communicator = Communicator(admitted.loop, admitted.fabric, admitted.job.topology, timeout_s=PATIENCE_S)
    communicator.barrier().wait()
    communicator.close()


def everybody_talks(larger: list[Admitted], comers: list[Future[Admitted]], then: threading.Event) -> list[Admitted]:
    with ThreadPoolExecutor(len(larger)) as pool:
        for talked in [pool.submit(talk, one) for one in larger]:
            talked.result(PATIENCE_S)
    then.set()
    for one in larger:
        one.loop.stop()
    return [comer.result(PATIENCE_S) for comer in comers]


@pytest.fixture(autouse=True)
def _gathering_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GATHER_S", PATIENCE_S)


def test_newcomers_come_in_by_any_member_at_the_end_of_one_step() -> None:
    with members(2) as job, ThreadPoolExecutor(2) as pool:
        then, gather = threading.Event(), threading.Barrier(2)
        comers = [pool.submit(come, address, gather, then) for address in job.addresses]
        larger = job.commit_until_they_switch()
        admitted = everybody_talks(larger, comers, then)
    assert [one.rank for one in larger] == [0, 1]
    assert sorted(one.rank for one in admitted) == [2, 3]
    assert {one.job.numbers for one in admitted} == {(0, 1, 2, 3)}
    assert {one.job.epoch for one in admitted} == {1}
    assert admitted[0].job == larger[0].job


def test_a_newcomer_that_goes_before_the_switch_is_not_waited_for() -> None:
    with members(2) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        comer = pool.submit(come, job.addresses[0], threading.Barrier(1), then)
        with newcomer(job.addresses[0]) as other:
            other.ask()  # never ready: the one that is waits for it
        larger = job.commit_until_they_switch()
        (admitted,) = everybody_talks(larger, [comer], then)
    assert admitted.job.world_size == 3


def test_a_job_whose_members_change_begins_anew_with_those_that_wait() -> None:
    with members(3) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        comer = pool.submit(come, job.addresses[1], threading.Barrier(1), then)
        while not job.growths[0].flags()[0]:
            then.wait(0.01)
        job.commit()  # they begin to connect, and then the last member is lost
        smaller = job.job.without([2])
        for rank, growth in enumerate(job.growths[:2]):
            growth.open(smaller, rank, lines=LINES)
        larger = Members(job.growths[:2], smaller).commit_until_they_switch()
        (admitted,) = everybody_talks(larger, [comer], then)
    assert admitted.job.numbers == (0, 1, 3)
    assert admitted.job.epoch == 2


def test_when_the_leader_is_lost_the_next_one_takes_in_who_waited_there() -> None:
    with members(2) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        comer = pool.submit(come, job.addresses[0], threading.Barrier(1), then)
        while not job.growths[0].flags()[0]:
            then.wait(0.01)
        job.growths[0].close()
        smaller = job.job.without([0])
        job.growths[1].open(smaller, 0, lines=LINES)
        larger = Members(job.growths[1:], smaller).commit_until_they_switch()
        (admitted,) = everybody_talks(larger, [comer], then)
    assert admitted.job.numbers == (1, 2)
    assert admitted.job.places == (1, 0), "the place of who was lost is free"


def test_while_the_leader_is_lost_the_next_one_lets_newcomers_wait() -> None:
    """Until all members know of the loss alike, which may take as long as a period."""
    with members(3) as job, ThreadPoolExecutor(1) as pool:
        then, welcomed = threading.Event(), threading.Barrier(2)
        job.growths[0].close()
        for growth in job.growths[1:]:
            growth.note_loss(0)
        comer = pool.submit(come, job.addresses[2], welcomed, then)
        welcomed.wait(PATIENCE_S)
        smaller = job.job.without([0], epoch=0)
        for rank, growth in enumerate(job.growths[1:]):
            growth.open(smaller, rank, lines=LINES)
        larger = Members(job.growths[1:], smaller).commit_until_they_switch()
        (admitted,) = everybody_talks(larger, [comer], then)
    assert admitted.job.numbers == (1, 2, 3)


def test_nobody_is_connected_while_a_member_is_lost() -> None:
    with members(2) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        job.growths[0].note_loss(1)
        comer = pool.submit(come, job.addresses[0], threading.Barrier(1), then)
        server = job.growths[0]._server
        until(lambda: any(asker.is_ready for asker in server._askers))
        assert job.growths[0].flags() == (0, 0)
        smaller = job.job.without([1], epoch=0)
        job.growths[0].open(smaller, 0, lines=LINES)
        larger = Members(job.growths[:1], smaller).commit_until_they_switch()
        everybody_talks(larger, [comer], then)


def test_who_has_left_for_the_larger_fabric_is_not_lost_there() -> None:
    """Members switch one after another, and each sees the others leave the fabric before."""
    with members(2) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        job.growths[0].note_loss(1)
        switched = replace(job.job, epoch=1)
        for rank, growth in enumerate(job.growths):
            growth.open(switched, rank, lines=LINES)
        comer = pool.submit(come, job.addresses[0], threading.Barrier(1), then)
        larger = Members(job.growths, switched).commit_until_they_switch()
        everybody_talks(larger, [comer], then)


def test_who_listens_where_a_lost_member_did_may_wait() -> None:
    """As a rank does that the launcher starts again, with the same port."""
    with members(2) as job, newcomer(job.addresses[0]) as entry:
        entry.join_address = job.addresses[1]
        job.growths[0].note_loss(1)
        assert entry.ask() == {"timeout_s": 7.0}, "it is told what it is to take over"


def test_an_attempt_has_its_time_from_when_the_members_hear_of_it() -> None:
    """They do at a step's end, or a period's, which may be later than any deadline of a connection."""
    with members(1) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        comer = pool.submit(come, job.addresses[0], threading.Barrier(1), then)
        server = job.growths[0]._server
        until(lambda: server._attempt is not None)
        assert not server._timers
        larger = job.commit_until_they_switch()
        everybody_talks(larger, [comer], then)


def test_who_waits_when_all_members_have_ended_well_hears_of_it_at_once() -> None:
    with members(2) as job, newcomer(job.addresses[1]) as entry:
        entry.ask()
        for growth in job.growths:
            growth.close(is_over=True)
        with pytest.raises(EOFError):
            entry.enter(LINES, PATIENCE_S)


def test_who_is_told_that_the_job_is_over_asks_those_that_go_on() -> None:
    with members(2) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        comer = pool.submit(come, job.addresses[0], threading.Barrier(1), then)
        until(lambda: bool(job.growths[0].flags()[0]))
        job.growths[0].close(is_over=True)
        smaller = job.job.without([0])
        job.growths[1].open(smaller, 0, lines=LINES)
        larger = Members(job.growths[1:], smaller).commit_until_they_switch()
        (admitted,) = everybody_talks(larger, [comer], then)
    assert admitted.job.numbers == (1, 2)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def refuses(entry: Entry, reason: str) -> None:
    with pytest.raises(HandshakeError, match=reason):
        entry.ask()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"job_id": "another"}, "the job ids differ"),
        ({"secret": b"t" * 32}, "the shared secrets differ"),
        ({"secret": None}, "the shared secrets differ"),
    ],
)
def test_strangers_are_refused_with_the_reason(change: dict[str, object], told: str) -> None:
    with members(1) as job:
        with newcomer(job.addresses[0], replace(OPTIONS, **change)) as entry:
            refuses(entry, told)
        until(lambda: job.growths[0]._server._acceptor.num_refused == 1)


def test_a_job_that_does_not_grow_says_why() -> None:
    with members(1, why_not="its rule divides the state") as job, newcomer(job.addresses[0]) as entry:
        refuses(entry, "its rule divides the state")


def test_one_that_makes_no_elastic_training_is_asked_until_the_deadline() -> None:
    with members(1, is_open=False) as job, newcomer(job.addresses[0], replace(OPTIONS, connect_s=0.5)) as entry:
        refuses(entry, r"within 0.5 s: .* no elastic training \(yet\)")


def test_another_training_is_refused_before_anything_is_connected() -> None:
    with members(1) as job, newcomer(job.addresses[0]) as entry:
        entry.ask()
        with pytest.raises(
            HandshakeError, match=r"the job has 'parameter weight: \(2, 3\)', and it 'parameter weight: \(2"
        ):
            entry.enter([LINES[0], "parameter weight: (2, 4)"], PATIENCE_S)
        assert job.commit() == [None]


def test_when_a_second_training_begins_who_waits_is_refused() -> None:
    with members(1) as job, newcomer(job.addresses[0]) as entry:
        entry.ask()
        job.growths[0].open(job.job, 0, why_not="it trains several models")
        with pytest.raises(HandshakeError, match="it trains several models"):
            entry.enter(LINES, PATIENCE_S)


def test_a_member_is_not_taken_in_again() -> None:
    with members(1) as job, newcomer(job.addresses[0]) as entry:
        entry.join_address = job.addresses[0]
        refuses(entry, "a member of the job already")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.runtime.joining.growth.VERSION", "0.0.0")
    with members(1) as job, newcomer(job.addresses[0]) as entry:
        refuses(entry, r"this process 0\.0\.0; install the same")


def test_who_accepts_and_says_nothing_is_no_member() -> None:
    options = replace(OPTIONS, connect_s=0.5, handshake_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf, newcomer(deaf.getsockname(), options) as entry:
        refuses(entry, r"No member .*no answer within 0.3 s.*fleet.join_address")


def test_a_scanner_and_garbage_do_no_harm() -> None:
    with members(1) as job, ThreadPoolExecutor(1) as pool:
        then = threading.Event()
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(300)):
            with socket.create_connection(job.addresses[0]) as scanner:
                scanner.sendall(text)
        comer = pool.submit(come, job.addresses[0], threading.Barrier(1), then)
        larger = job.commit_until_they_switch()
        everybody_talks(larger, [comer], then)


def test_an_attempt_that_fails_ends_for_its_newcomer_and_not_for_the_job() -> None:
    options = replace(OPTIONS, connect_s=3.0)
    with members(2) as job, ThreadPoolExecutor(1) as pool:
        for growth in job.growths:
            growth._server._options = options  # the leader's deadline
        with newcomer(job.addresses[0]) as entry:
            entry.ask()
            entering = pool.submit(entry.enter, LINES, PATIENCE_S)
            while not job.growths[0].flags()[0]:
                threading.Event().wait(0.01)
            # only the first member hears of the attempt, so the second does not come
            numbers = job.growths[0].flags()
            assert job.growths[0].follow(*numbers) is None
            with pytest.raises(HandshakeError, match=r"rank 1 of the larger job did not come within 3 s"):
                entering.result(PATIENCE_S)
        assert job.growths[0].flags() == (0, 0)
        assert job.commit() == [None, None]


def test_ranks_of_a_host_take_the_next_ports() -> None:
    first = Growth(OPTIONS, terms={})
    port = first.join_address[1]
    second = Growth(OPTIONS, terms={}, port=port)
    try:
        assert port < second.join_address[1] < port + 64
    finally:
        second.close()
        first.close()


def test_a_member_that_has_no_file_left_goes_on_without_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(loop: CommunicationLoop) -> None:
        started.append(loop)
        raise OSError(24, "Too many open files")

    with members(2) as job:
        growth = job.growths[1]
        monkeypatch.setattr(CommunicationLoop, "start", start)
        for attempt, num_tries in ((1, 1), (1, 1), (0, 1), (2, 2), (2, 2)):
            assert growth.follow(attempt, 0) is None
            assert len(started) == num_tries
