"""The small parts: placement, messages, sums."""

from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st

from syncline.errors import ConfigurationError
from syncline.topology import Topology
from syncline.updates.messaging import LeftBehind, decode_record, encode_record
from syncline.updates.overlapped.link import BucketLayout, Feed, add_mean, average, correction
from syncline.updates.overlapped.placement import capacity_bytes_per_s, place_shards, server_ranks
from syncline.updates.overlapped.server import End, Hello, Push, Reply, ReplyAverage
from syncline.updates.overlapped.server_client import Answer, Note, Question
from syncline.updates.overlapped.worker import Use

SLOW_RANK = """
topology: one slow link
switch: top
children:
  - {host: "a[0-2]", uplink: 4 Gbit/s}
  - {host: b, uplink: 1 Gbit/s}
"""


def test_shards_are_spread_by_what_links_carry() -> None:
    topology = Topology.parse(SLOW_RANK)
    placed = place_shards(topology, range(4), [100] * 26)
    counts = [placed.count(rank) for rank in range(4)]
    assert counts == [8, 8, 8, 2]
    assert capacity_bytes_per_s(topology, 3) == 1e9 / 8


def test_shards_are_spread_evenly_where_nothing_is_known() -> None:
    placed = place_shards(Topology.flat(3), range(3), [50, 100, 100, 50, 100])
    assert sorted(
        sum(size for rank, size in zip(placed, [50, 100, 100, 50, 100], strict=True) if rank == k) for k in range(3)
    ) == [100, 150, 150]


TWO_SITES = """
topology: two sites
switch: top
children:
  - switch: a
    uplink: 20 Mbit/s
    children: [{host: "a[0-3]", uplink: 1 Gbit/s}]
  - switch: b
    uplink: 20 Mbit/s
    children: [{host: "b[0-3]", uplink: 1 Gbit/s}]
"""


def test_shards_lie_on_both_sides_of_a_slow_link() -> None:
    topology = Topology.parse(TWO_SITES)
    assert place_shards(topology, range(8), [100] * 4) == (0, 4, 1, 5)
    assert place_shards(topology, range(8), [100, 150, 450, 400]) == (1, 5, 0, 4), "by size"


def test_servers_are_shared_or_dedicated() -> None:
    assert server_ranks("shared", 3) == (0, 1, 2)
    assert server_ranks("dedicated:2", 5) == (3, 4)
    for servers in ("dedicated:5", "dedicated:0", "dedicated:x", "mine"):
        with pytest.raises(ConfigurationError, match="dedicated"):
            server_ranks(servers, 5)


numbers = st.integers(0, 2**32 - 1)
LAYOUT = BucketLayout(
    index=0, stream=1, connection_class=0, num_elements=4, dtype=torch.bfloat16, world_size=3, server=0, relay_of={}
)


@given(st.sampled_from([Push, End, Hello]), numbers, numbers, numbers, st.floats(0, 1e12))
def test_messages_to_servers_go_round(kind, period: int, round_number: int, iteration: int, weight: float) -> None:
    known = {"round_number": round_number, "weight": weight}
    fields = {name: value for name, value in known.items() if name in kind.__slots__}
    record = kind(worker=2, period=period, iteration=iteration, **fields)
    message = LAYOUT.make_up()
    message.values.fill_(3.0)
    message.write(record)
    assert message.read() == record
    assert message.values.tolist() == [3.0] * 4
    assert len(message.memory) % 64 == 8


@given(numbers, st.lists(numbers, min_size=3, max_size=3).map(tuple))
def test_messages_from_servers_go_round(accepted: int, dropped: tuple) -> None:
    message = LAYOUT.make_down()
    for record in (
        ReplyAverage(worker=1, period=2**32, iteration=2**40, dropped=dropped, told=(0, 2**16, 2**16, 0, 1, 2)),
        Reply(worker=1, period=3, closed=9, clock=11, accepted=accepted),
    ):
        message.write(record)
        assert message.read() == record
    assert message.values.dtype == torch.float32


@pytest.mark.parametrize("note", [LeftBehind(rank=3), Question(), Answer(ranks=(0, 4))])
def test_notes_go_round(note: Note) -> None:
    assert decode_record(encode_record(note), get_args(Note), "a test") == (note, {})


def test_means_are_weighted_and_in_a_fixed_order() -> None:
    cumulative = torch.ones(2)
    add_mean(cumulative, [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])], [3.0, 1.0])
    assert cumulative.tolist() == [3.0, 4.0]
    add_mean(cumulative, [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])], [0.0, 0.0])
    assert cumulative.tolist() == [6.0, 8.0]


def test_an_average_of_equal_values_is_that_value() -> None:
    value = torch.randn(1000)
    for weights in ([1.0], [1.0, 3.0, 7.0]):
        out = torch.empty(1000)
        average([value] * len(weights), weights, out=out)
        assert torch.equal(out, value)


def test_a_correction_is_what_is_new_less_what_is_own() -> None:
    newest, base, own = (torch.tensor([value]) for value in (7.0, 4.0, 1.0))
    assert correction(newest, base, subtract=own).item() == 2.0
    assert correction(newest, None).item() == 7.0
    assert newest.item() == 7.0


def used(*, run_length: int, replaces: bool) -> Use:
    return Use(closed=1, subtract=None, replaces=replaces, run_length=run_length)


def test_a_correction_for_several_iterations_is_fed_over_as_many_steps() -> None:
    feed = Feed()
    fed = []
    for step in range(6):
        gradient = torch.tensor([10.0])
        if step == 1:
            feed.take(gradient, torch.tensor([8.0]), used(run_length=4, replaces=False), None)
        if step == 2:
            feed.take(gradient, torch.tensor([100.0]), used(run_length=1, replaces=False), None)
        feed.finish(gradient)
        fed.append(gradient.item())
    assert fed == [10.0, 12.0, 112.0, 12.0, 12.0, 10.0]


def test_what_replaces_the_gradient_is_not_spread() -> None:
    feed, gradient = Feed(), torch.tensor([10.0])
    feed.take(gradient, torch.tensor([8.0]), used(run_length=1, replaces=True), None)
    feed.finish(gradient)
    assert gradient.item() == 8.0
