"""Deaths before ranks are connected: noticed in the meeting and after it, by those who wait."""

import asyncio
import socket

import loops
import pytest

from meeting_stores import DictStore
from syncline.errors import HandshakeError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.rendezvous import Member, Presence, StoreRecords

QUICK = {"heartbeat_s": 0.1, "suspect_s": 0.3, "dead_s": 2.0, "handshake_s": 0.3, "connect_s": 600.0}


class Job:
    """Ranks with one clock; each beats when the test says so."""

    def __init__(self, num_ranks, silence_s=10.0):
        self.now_s = 0.0
        self.store = DictStore()
        self.ranks = [self.start(rank, f"nonce{rank}", silence_s) for rank in range(num_ranks)]

    def start(self, rank, nonce, silence_s=10.0):
        records = StoreRecords(self.store, job_id="job")
        return Presence(records, rank, nonce, silence_s=silence_s, now_s=lambda: self.now_s)

    def beat(self, *ranks, seconds=1.0):
        """Let a second pass in which ``ranks`` beat, and rank 0 last; return who is gone to it."""
        self.now_s += seconds
        for rank in ranks:
            self.ranks[rank].beat([0])
        return self.ranks[0].beat(range(1, len(self.ranks)))


def test_who_stops_is_gone_and_who_never_came_is_late():
    job = Job(4)
    for _ in range(3):
        assert job.beat(1, 2) == []
    for _ in range(9):
        assert job.beat(1) == []
    assert job.beat(1) == [2]


def test_a_pulse_that_an_earlier_attempt_left_does_not_count():
    job = Job(2)
    job.start(1, "earlier").beat([0])
    for _ in range(30):
        assert job.beat() == []


def test_who_is_connected_may_stop():
    job = Job(2)
    for _ in range(3):
        job.beat(1)
    job.ranks[1].rest()
    job.beat(1)  # of the thread that watches, which has not ended yet
    for _ in range(30):
        assert job.beat() == []


def test_a_rank_that_was_away_itself_accuses_nobody():
    job = Job(2)
    for _ in range(3):
        job.beat(1)
    assert job.beat(seconds=600.0) == []
    assert job.beat() == []


def test_what_a_rank_says_reaches_all_through_rank_0():
    job, nonces = Job(3), {0: "nonce0", 1: "nonce1", 2: "nonce2"}
    job.ranks[2].tell("the disk is full", nonces)
    assert [rank.heard() for rank in job.ranks] == ["the disk is full", None, None]
    job.ranks[0].tell(job.ranks[0].heard(), nonces)
    assert job.ranks[1].heard() == "the disk is full"
    assert job.start(1, "a later attempt").heard() is None


async def connect(rank, store):
    return await connect_tcp(
        FabricOptions(**QUICK), rank=rank, world_size=2, rendezvous=Rendezvous(store, job_id="syncline")
    )


async def meet_and_die(rank, store):
    """Meet as a rank does, listening, and then be gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        member = Member(rank=rank, host="dead", address="127.0.0.1", port=listening.getsockname()[1])
        await Rendezvous(store, job_id="syncline").meet(member, world_size=2, timeout_s=60.0)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        (1, r"rank 1 came and then fell silent before all were connected"),
        (
            0,
            r"rank 1 cannot connect to rank 0 \(host dead\) .*nobody has listened there .* or it is on another "
            r"machine: set SYNCLINE_INTERFACE there|rank 0 came and then fell",
        ),
    ],
)
def test_a_death_between_meeting_and_connecting_is_noticed(victim, message):
    async def main():
        store = DictStore()
        living, _ = await asyncio.gather(
            connect(1 - victim, store), meet_and_die(victim, store), return_exceptions=True
        )
        return living

    error = loops.run(main())
    assert isinstance(error, HandshakeError)
    with pytest.raises(HandshakeError, match=message):
        raise error
