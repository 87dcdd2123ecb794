"""Ranks in processes of their own that are killed, stopped and continued."""

import json
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rank_scripts import script_environment

SCRIPT = Path(__file__).with_name("fabric_process.py")
TRAFFIC = {"num_bytes": 300_000, "num_messages": 1 << 40, "num_inflight": 4}


class RankProcess:
    """A rank, and the lines that it prints."""

    def __init__(self, what, rank, world_size, store, options, arguments):
        self.rank = rank
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT), what, str(rank), str(world_size), str(store)),
                *(json.dumps(options), json.dumps(arguments)),
            ],
            stdout=subprocess.PIPE,
            env=script_environment(),
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)
        self._partial = b""
        self.records = []

    def wait_for(self, deadline_s=60.0, **wanted):
        """Return the first record with the wanted values, and when it was read."""
        end_s = time.monotonic() + deadline_s
        while True:
            for record in self.records:
                if all(record.get(key) == value for key, value in wanted.items()):
                    return record
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"rank {self.rank} did not print {wanted} within {deadline_s} s, but {self.records}"
            if self._selector.select(left_s):
                self._read()

    def _read(self):
        data = self.process.stdout.read1()
        assert data or self.process.poll() is None or self.process.wait() == 0, f"rank {self.rank} failed"
        *lines, self._partial = (self._partial + data).split(b"\n")
        self.records.extend(json.loads(line) for line in lines)

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._selector.close()


@pytest.fixture
def start(tmp_path):
    ranks = []

    def start(what, world_size, arguments, **options):
        ranks.extend(RankProcess(what, rank, world_size, tmp_path, options, arguments) for rank in range(world_size))
        return ranks

    yield start
    for rank in ranks:
        rank.end()


def test_a_killed_rank_is_reported_by_all_others_without_a_wait_for_its_silence(start):
    ranks = start("traffic", 3, TRAFFIC, dead_s=600.0)
    for rank in ranks:
        rank.wait_for(event="ready")
        rank.signal(signal.SIGUSR1)
    for rank in ranks:
        rank.wait_for(event="progress")  # they have found out by now that they can read each other's memory
    ranks[1].signal(signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        record = rank.wait_for(event="lost", peer=1)
        assert record["kind"] == "PeerLostError"
        assert record["text"].startswith("rank 1 (host ")
        assert "its process died or was killed" in record["text"]


def test_a_killed_rank_is_reported_at_once_where_no_memory_is_shared_too(start):
    """Its address refuses connections: nobody waits for it to dial again."""
    ranks = start("traffic", 3, TRAFFIC, dead_s=600.0, shares_memory=False)
    for rank in ranks:
        rank.wait_for(event="ready")
    ranks[1].signal(signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        record = rank.wait_for(event="lost", peer=1)
        assert re.search("closed the connection without saying goodbye|was reset by its side", record["text"])
        assert "could not be opened again" not in record["text"]


def silence_s(record):
    """Return the seconds of silence that a record tells."""
    return float(re.search(r"sent nothing for (\d+\.\d+) s", record["text"])[1])


def test_a_stopped_rank_is_declared_dead_and_learns_it_when_it_goes_on(start):
    ranks = start("traffic", 3, TRAFFIC, heartbeat_s=0.2, suspect_s=0.6, dead_s=4.0)
    for rank in ranks:
        rank.wait_for(event="ready")
    ranks[1].signal(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        record = rank.wait_for(event="lost", peer=1)
        assert "rank 1 (host " in record["text"]
        assert silence_s(record) >= 4.0
    ranks[1].signal(signal.SIGCONT)
    for peer in (0, 2):
        record = ranks[1].wait_for(event="lost", peer=peer)
        # whether the other's reason or the reset that follows it is read first, is the kernel's choice
        assert re.search(r"(this rank|rank 1 \(host .*\)) did not run for \d", record["text"])
    ranks[1].wait_for(event="alone")
    assert not [record for record in ranks[0].records if record.get("peer") == 2]


def test_a_rank_that_is_stopped_for_a_while_is_not_evicted(start):
    ranks = start("traffic", 3, TRAFFIC, heartbeat_s=0.2, suspect_s=0.6, dead_s=20.0)
    for rank in ranks:
        rank.wait_for(event="ready")
    ranks[1].signal(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        rank.wait_for(event="trace", name="peer is silent", peer=1)
    ranks[1].signal(signal.SIGCONT)
    for rank in ranks:
        rank.signal(signal.SIGUSR1)
    for rank in ranks:
        rank.wait_for(event="progress")
        assert not [record for record in rank.records if record["event"] == "lost"]


def test_news_of_a_loss_spreads_to_a_rank_that_heard_it_from_no_kernel(start):
    """Rank 0's loop is stopped while rank 1 dies; the others' news and the closed socket wait for it."""
    ranks = start("traffic", 3, TRAFFIC)
    for rank in ranks:
        rank.wait_for(event="ready")
    ranks[0].signal(signal.SIGSTOP)
    ranks[1].signal(signal.SIGKILL)
    ranks[2].wait_for(event="lost", peer=1)
    ranks[0].signal(signal.SIGCONT)
    ranks[0].wait_for(event="lost", peer=1)
    assert not [record for record in ranks[0].records if record.get("peer") == 2]
