"""The commands that limit an interface."""

import dataclasses
import math

import pytest

from syncline.errors import LabError
from syncline.lab.queues import QUEUE_KINDS, QueueSettings, choose_queues, limit_commands


def commands(rate, *, is_host=False, **settings):
    return list(limit_commands("d1", rate, QueueSettings(**settings), is_host=is_host))


def test_one_queue():
    assert commands(25e6) == [
        "qdisc add dev d1 root handle 1: htb default a",
        "class add dev d1 parent 1: classid 1:1 htb rate 200000000bit ceil 200000000bit burst 25000 cburst 25000"
        " quantum 6056",
        "class add dev d1 parent 1:1 classid 1:a htb rate 200000000bit ceil 200000000bit burst 25000 cburst 25000"
        " prio 0 quantum 6056",
        "qdisc add dev d1 parent 1:a handle a0: bfifo limit 500000",
    ]


def test_priorities_have_a_queue_each_and_the_last_takes_what_is_not_marked():
    lines = commands(25e6, dscp_by_priority=(46, 8))
    assert lines[0].endswith("default b")
    assert [line.split(" prio ")[1][0] for line in lines if line.startswith("class add dev d1 parent 1:1 ")] == [
        "0",
        "1",
    ]
    assert [line for line in lines if line.startswith("filter")] == [
        "filter add dev d1 parent 1: protocol ip prio 1 u32 match ip dsfield 0xb8 0xfc flowid 1:a",
        "filter add dev d1 parent 1: protocol ip prio 1 u32 match ip dsfield 0x20 0xfc flowid 1:b",
    ]


def commands_of(kind, rate, *, is_host=False):
    return list(limit_commands("d1", rate, choose_queues(kind), is_host=is_host))


@pytest.mark.parametrize("is_host", [False, True])
def test_a_token_bucket_is_one_queue_with_its_burst(is_host):
    assert commands_of("token-bucket", 25e6, is_host=is_host) == [
        "qdisc add dev d1 root handle 1: tbf rate 200000000bit burst 32768 limit 500000"
    ]


def test_packets_are_counted_in_place_of_bytes():
    assert commands_of("packets", 25e6)[-1] == "qdisc add dev d1 parent 1:a handle a0: pfifo limit 64"
    assert commands_of("packets", 25e6)[:-1] == commands(25e6)[:-1]


@pytest.mark.parametrize(("kind", "num_bytes"), [("default", 500_000), ("short", 128 * 1024), ("long", 5_000_000)])
def test_kinds_differ_in_length(kind, num_bytes):
    assert commands_of(kind, 25e6)[-1].endswith(f"bfifo limit {num_bytes}")


def test_a_kind_that_there_is_not():
    with pytest.raises(LabError, match=r"queues must be of default, .*packets, got 'wide'"):
        choose_queues("wide")


def test_a_token_bucket_has_no_priorities():
    with pytest.raises(LabError, match="a token bucket has one queue, so it has no priorities"):
        dataclasses.replace(QUEUE_KINDS["token-bucket"], dscp_by_priority=(46, 8))


def test_lengths():
    settings = QueueSettings()
    assert settings.queue_bytes(125e6, is_host=False) == 2_500_000
    assert settings.queue_bytes(1e5, is_host=False) == 256 * 1024
    assert settings.queue_bytes(1e5, is_host=True) == 16 * 1024 * 1024
    assert settings.burst_bytes(125e6) == 125_000
    assert settings.burst_bytes(1e5) == 16 * 1024


def test_what_does_not_limit_is_left_alone():
    assert commands(math.inf) == []


@pytest.mark.parametrize("values", [(64,), (-1,), (1, 1), tuple(range(9))])
def test_impossible_priorities(values):
    with pytest.raises(LabError, match="priorities are at most 8 different DSCP values"):
        QueueSettings(dscp_by_priority=values)


def test_too_slow():
    with pytest.raises(LabError, match="too slow to emulate; the lab's slowest is 8 kbit/s"):
        commands(10.0)
