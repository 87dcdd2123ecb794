"""Ranks meet through a store that may be full of stale keys."""

import asyncio
import json
import secrets
import threading

import pytest
from torch.distributed import TCPStore

from meeting_stores import DictStore
from syncline.errors import RendezvousError
from syncline.fabric.rendezvous import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_RECORD_BYTES, Member, Rendezvous


def member(rank, port=None, host="h"):
    return Member(rank=rank, host=f"{host}{rank}", address="127.0.0.1", port=port or 5000 + rank)


def meet_all(store, world_size, *, ranks=None, timeout_s=60.0, port=5000, host="h"):
    async def main():
        return await asyncio.gather(
            *(
                Rendezvous(store, job_id="job").meet(
                    member(rank, port + rank, host), world_size=world_size, timeout_s=timeout_s
                )
                for rank in (ranks or range(world_size))
            )
        )

    return asyncio.run(main())


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_agree_on_one_generation(world_size):
    generations = meet_all(DictStore(), world_size)
    assert len(set(generations)) == 1
    assert generations[0].members == tuple(member(rank) for rank in range(world_size))
    assert len(generations[0].job_nonce) == 32
    assert 0 < generations[0].epoch < 1 << 64


def test_each_start_is_a_new_generation_in_the_same_store():
    store = DictStore()
    seen = set()
    for attempt in range(5):
        generations = meet_all(store, 3, port=6000 + 10 * attempt)
        assert len(set(generations)) == 1
        assert generations[0].members[2].port == 6000 + 10 * attempt + 2
        seen.add((generations[0].epoch, generations[0].job_nonce))
    assert len(seen) == 5


class Meeting:
    """Ranks that take turns as the test says: each pause hands the turn back."""

    def __init__(self, store, world_size):
        self.store = store
        self.world_size = world_size
        self.results = {}

    def start(self, rank, port=None, timeout_s=100.0, **settings):
        turn, done = threading.Semaphore(0), threading.Semaphore(0)
        clock = [0.0]

        def pause(pause_s):
            clock[0] += pause_s
            done.release()
            turn.acquire()

        def run():
            turn.acquire()
            rendezvous = Rendezvous(self.store, job_id="job", pause=pause, now_s=lambda: clock[0], **settings)
            try:
                self.results[rank] = rendezvous.meet_blocking(
                    member(rank, port), world_size=self.world_size, timeout_s=timeout_s
                )
            except RendezvousError as error:
                self.results[rank] = error
            done.release()

        thread = threading.Thread(target=run)
        thread.start()

        def step():
            if thread.is_alive() and rank not in self.results:
                turn.release()
                done.acquire()

        return step


def test_a_stale_hello_is_replaced_before_anyone_goes():
    store = DictStore()
    meet_all(store, 3)  # an earlier attempt leaves hello, ack, record and go of every rank
    meeting = Meeting(store, 3)
    zero, one, two = meeting.start(0, 7000), meeting.start(1, 7001), meeting.start(2, 7002)
    for _ in range(4):
        zero()
        one()
    assert not meeting.results, "rank 2 of the earlier attempt does not count"
    while len(meeting.results) < 3:
        two()
        zero()
        one()
    assert len(set(meeting.results.values())) == 1
    assert [other.port for other in meeting.results[0].members] == [7000, 7001, 7002]


def test_a_rank_that_does_not_acknowledge_need_not_be_of_an_earlier_attempt():
    meeting = Meeting(DictStore(), 2)
    zero, one = meeting.start(0, 7000, timeout_s=5.0), meeting.start(1, 7001)
    one()  # says that it is there, and then has no turn any more
    while 0 not in meeting.results:
        zero()
    assert "rank 1 did not acknowledge yet (busy, stopped, or gone with an earlier attempt)" in str(meeting.results[0])
    while 1 not in meeting.results:
        one()


def test_rank_zero_comes_last():
    store = DictStore()
    meet_all(store, 2)
    meeting = Meeting(store, 2)
    zero, one = meeting.start(0, 7000), meeting.start(1, 7001)
    for _ in range(10):
        one()
    assert not meeting.results
    while len(meeting.results) < 2:
        zero()
        one()
    assert meeting.results[0] == meeting.results[1]
    assert meeting.results[0].members[0].port == 7000


def test_a_rank_that_dies_while_others_are_awaited_is_noticed():
    meeting = Meeting(DictStore(), 3)
    zero, one = meeting.start(0, timeout_s=1000.0), meeting.start(1, timeout_s=1000.0)
    for _ in range(40):
        zero()
        one()
    while 0 not in meeting.results:
        zero()
    assert "rank 1 came and then fell silent" in str(meeting.results[0])
    while 1 not in meeting.results:  # it was only slow, and is told that the others went
        one()
    assert str(meeting.results[1]) == str(meeting.results[0])


def test_who_did_not_come_is_named():
    with pytest.raises(
        RendezvousError,
        match=r"rank 0 \(host h0\) waited 0 s for the others: 1 of 3 are here, and ranks 1 and 2 did not",
    ):
        meet_all(DictStore(), 3, ranks=[0], timeout_s=0.05)
    with pytest.raises(RendezvousError, match="waited 0 s for the others: nothing is heard of rank 0"):
        meet_all(DictStore(), 3, ranks=[1], timeout_s=0.05)


def test_rank_0_tells_the_others_who_did_not_come():
    """It alone reads who came; the others wait a little longer than it does."""
    meeting = Meeting(DictStore(), 3)
    rank_0, rank_1 = meeting.start(0, timeout_s=1.0), meeting.start(1, timeout_s=1.0)
    while not {0, 1} <= meeting.results.keys():
        for rank, step in ((0, rank_0), (1, rank_1)):
            if rank not in meeting.results:
                step()
    for rank in (0, 1):
        assert "rank 0 (host h0) waited 1 s for the others: 2 of 3 are here, and rank 2 did not come" in str(
            meeting.results[rank]
        )


def test_who_waits_says_so_after_a_while_and_now_and_then(caplog):
    """Rank 0 says who is not there; the others speak of rank 0, if it is not."""
    meeting = Meeting(DictStore(), 4)
    settings = {"awaited": lambda here: [host for host in ("h0", "h1", "h2", "h3") if host not in here]}
    steps = {rank: meeting.start(rank, timeout_s=23.5, **settings) for rank in (0, 2)}
    while len(meeting.results) < 2:
        for rank in steps.keys() - meeting.results.keys():
            steps[rank]()
    lines = [record.getMessage() for record in caplog.records]
    told = "s for the others: 2 of 4 are here, and ranks 1 and 3 did not come (of h1, h3)"
    assert lines == [f"rank 0 (host h0) has waited {waited_s} {told}" for waited_s in (2, 12, 22)]
    assert told in str(meeting.results[2])
    caplog.clear()
    lone = Meeting(DictStore(), 4)
    steps = {rank: lone.start(rank, timeout_s=11.0) for rank in (1, 2)}
    steps[3] = lone.start(3, timeout_s=11.0, trouble="no such file")
    while len(lone.results) < 3:
        for rank in steps.keys() - lone.results.keys():
            steps[rank]()
    lines = [record.getMessage() for record in caplog.records]
    told = "s for the others: nothing is heard of rank 0"
    assert sorted(lines) == [
        f"rank 1 (host h1) has waited 2 {told}",
        f"rank 2 (host h2) has waited 10 {told}",
        f"rank 3 (host h3) has waited 2 {told}; it has to tell them: no such file",
    ]


def test_different_world_sizes_are_named():
    store = DictStore()
    meet_all(store, 2)
    with pytest.raises(RendezvousError, match="rank 0 has a world size of 2, this rank of 3"):
        meet_all(store, 3, ranks=[1], timeout_s=0.05)


GARBAGE = [
    b"",
    b"not json",
    b"\x80\x04pickle",
    b"[]",
    b"null",
    b"7",
    b'{"epoch": 1}',
    b"[" * 100_000,
    json.dumps({"epoch": 1, "job_nonce": "zz" * 32, "world_size": 2}).encode(),
    json.dumps({"epoch": True, "job_nonce": "aa" * 32, "world_size": 2}).encode(),
    json.dumps({"epoch": 1, "job_nonce": "aa" * 32, "world_size": 2, "more": 1}).encode(),
    json.dumps({"epoch": 1, "job_nonce": "aa" * 32, "world_size": 2}).encode(),
    json.dumps(
        [{"rank": rank, "host": "h", "address": "::1", "port": 5, "nonce": "a" * 32} for rank in (1, 0)]
    ).encode(),
    b" " * (MAX_RECORD_BYTES + 1),
    json.dumps({"rank": 1, "host": "", "address": "127.0.0.1", "port": 5, "nonce": "a" * 32}).encode(),
    json.dumps({"rank": 1, "host": "h", "address": "example.org", "port": 5, "nonce": "a" * 32}).encode(),
    json.dumps({"rank": 1, "host": "h", "address": "127.0.0.1", "port": 70000, "nonce": "a" * 32}).encode(),
    json.dumps({"rank": 1, "host": "h", "address": "127.0.0.1", "port": 5, "nonce": 5}).encode(),
    json.dumps({"rank": 1, "host": "h", "address": "127.0.0.1", "port": 5, "nonce": "a" * 32}).encode(),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_the_store_is_as_good_as_nothing(garbage):
    store = DictStore()
    for key in ("hello/1", "record", "record/1", "ack/1", "go"):
        store.set(f"syncline/job/{key}", garbage)
    assert len(set(meet_all(store, 2))) == 1


@pytest.mark.parametrize(
    ("ranks", "waits_for"),
    [
        ((0,), "nothing is heard of rank 0"),
        ((1, 0), "nothing is heard of rank 0"),
        ((0, 2), "nothing is heard of rank 0"),
        ((0, 1, 2), "nothing is heard of rank 0"),
        ((0, 1), "rank 0 did not say go"),
    ],
)
def test_hellos_are_believed_if_they_are_those_of_all_ranks(monkeypatch, ranks, waits_for):
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "aa" * num_bytes)
    store = DictStore()
    hello = {"host": "h", "address": "::1", "port": 5, "nonce": "aa" * 16}
    record = {"epoch": 1, "job_nonce": "aa" * 32, "world_size": 2}
    store.set("syncline/job/record", json.dumps(record).encode())
    store.set("syncline/job/record/1", json.dumps([{"rank": rank, **hello} for rank in ranks]).encode())
    meeting = Meeting(store, 2)
    step = meeting.start(1, timeout_s=1.0)
    while not meeting.results:
        step()
    assert waits_for in str(meeting.results[1])


def test_a_store_of_pytorch_takes_the_largest_record():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("record", bytes(MAX_RECORD_BYTES))
    assert len(store.get("record")) == MAX_RECORD_BYTES


def test_a_failing_store_is_named():
    class Broken(DictStore):
        def get(self, key):
            raise RuntimeError("connection reset")

    with pytest.raises(RendezvousError, match=r"the store through which the ranks meet failed .*connection reset"):
        meet_all(Broken(), 2)


def test_giving_up_ends_the_thread():
    before = set(threading.enumerate())  # what other tests of this process have left is not its own

    async def main():
        task = asyncio.create_task(Rendezvous(DictStore(), job_id="job").meet(member(0), world_size=2, timeout_s=60.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert set(threading.enumerate()) <= before


def test_pauses_that_grew_while_a_rank_was_awaited_are_short_again_once_it_is_there():
    store, pauses, nonce = DictStore(), [], "ab" * 16

    def tell(key, value):
        store.set(f"syncline/job/{key}", json.dumps(value).encode())

    def pause(pause_s):
        pauses.append(pause_s)
        if len(pauses) == 40:
            tell("hello/1", {"rank": 1, "host": "h1", "address": "127.0.0.1", "port": 5001, "nonce": nonce})
        if len(pauses) == 41:
            tell("ack/1", {"epoch": json.loads(store.values["syncline/job/record"])["epoch"], "nonce": nonce})

    rendezvous = Rendezvous(store, job_id="job", pause=pause, now_s=lambda: 0.0)
    assert rendezvous.meet_blocking(member(0), world_size=2, timeout_s=1.0).members[1].port == 5001
    assert pauses[39:] == [LONGEST_PAUSE_S, FIRST_PAUSE_S]
