"""The parts between protocol and fabric: vectors, messages as bytes, executors, the servers' network."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from memory_ports import WAIT_S, Ports
from syncline.errors import ConfigurationError
from syncline.fabric.slice_executor import first_tag
from syncline.machines.clustering import Inventory
from syncline.schedule import Collective, Layout, choose
from syncline.topology import Topology
from syncline.updates.clustered.driver import mean_of
from syncline.updates.clustered.grouping import check_clusters, group
from syncline.updates.clustered.messages import Agreed, Contribution, Join, ToldMessage, decode, encode
from syncline.updates.clustered.outer_rounds import ServersCall
from syncline.updates.flat import VectorShape, combine
from syncline.updates.messaging import HEAD_BYTES, Mailbox, MessageStream

SHAPE = VectorShape(parts=((torch.float32, 5), (torch.bfloat16, 3), (torch.float64, 0), (torch.float32, 2)))


def vector_of(value: float):
    vector = SHAPE.zeros()
    for part in vector.parts:
        part.fill_(value)
    return vector


def test_a_vector_is_one_piece_of_memory_with_aligned_parts() -> None:
    vector = vector_of(2.0)
    assert vector.memory.nbytes == SHAPE.num_bytes == 3 * 64
    assert [part.tolist() for part in vector.parts] == [[2.0] * 5, [2.0] * 3, [], [2.0] * 2]
    copy = vector.copy().add(vector, factor=0.5).scale(2.0)
    assert copy.parts[0].tolist() == [6.0] * 5
    assert vector.parts[0].tolist() == [2.0] * 5
    assert vector.dot(copy) == 12 * 8


def test_halves_are_summed_in_single_precision() -> None:
    vectors = [vector_of(1.0), *[vector_of(2**-9)] * 8]
    assert combine(vectors, [1.0] * 9).parts[1].tolist() == [1 + 2**-6] * 3


def test_the_mean_is_weighted_by_samples_and_leaves_out_who_has_no_gradient() -> None:
    given = {
        2: Contribution(term=0, index=0, samples=3.0, payload=vector_of(1.0)),
        0: Contribution(term=0, index=0, samples=1.0, payload=vector_of(5.0)),
        1: Contribution(term=0, index=0, samples=0.0, payload=None),
    }
    mean = mean_of(given)
    assert mean is not None
    assert mean.parts[0].tolist() == [2.0] * 5
    assert mean_of({1: given[1]}) is None


def make_mailbox(port, on_message) -> Mailbox[ToldMessage]:
    stream = MessageStream(port, 9, urgency=0)
    return Mailbox(stream, stream, decode=partial(decode, shape=SHAPE), on_message=on_message, on_lost=lambda *_: None)


def test_messages_arrive_whole_and_in_order() -> None:
    big = Agreed(term=1, index=2, samples=tuple(float(k) for k in range(1000)))
    messages = [
        Join(term=0, index=-1),
        Contribution(term=0, index=0, samples=2.0, payload=vector_of(3.0)),
        big,
        Agreed(term=1, index=3, samples=(2.0,), payload=vector_of(4.0)),
        Join(term=2, index=3),
    ]
    heard: list[tuple[int, ToldMessage]] = []
    done = threading.Event()

    def on_message(peer: int, told: ToldMessage) -> None:
        heard.append((peer, told))
        boxes[1].listen(peer)
        if len(heard) == len(messages):
            done.set()

    with Ports(2, seed=5) as ports:
        boxes = [make_mailbox(port, on_message) for port in ports]

        def begin() -> None:
            boxes[1].listen_to_all()
            for message in messages:
                boxes[0].send(1, *encode(message, (1,), SHAPE))

        ports[0].call_soon(begin)
        assert done.wait(WAIT_S)
    assert [message for _, (message, _) in heard] == messages
    assert heard[1][1][0].payload.parts[0].tolist() == [3.0] * 5
    assert heard[2][1] == (big, {1})
    assert boxes[0].sent_bytes[1] > 5 * HEAD_BYTES + 2 * SHAPE.num_bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_elements", [1, 7, 1000])
def test_a_call_sums_among_some_of_the_ranks(seed: int, num_elements: int) -> None:
    ranks = (4, 1, 3)
    schedule = choose(Topology.flat(5, rate=1e8).restricted(ranks), Collective.ALL_REDUCE, 1 << 12)
    tensors = {rank: torch.arange(num_elements, dtype=torch.float64) * (rank + 1) for rank in ranks}
    done = [threading.Event() for _ in ranks]
    with Ports(5, seed=seed) as ports:
        for place, rank in enumerate(ranks):
            layout = Layout.build(schedule, num_elements, 300)
            parts, tag = [(tensors[rank], layout)], first_tag(9, 1, 16)
            ended = done[place].set
            make = partial(ServersCall, ports[rank], ranks, schedule, parts, tag=tag, on_done=ended)
            ports[rank].call_soon(ports[rank].call(make, WAIT_S).start)
        assert all(event.wait(WAIT_S) for event in done)
    for tensor in tensors.values():
        torch.testing.assert_close(tensor, torch.arange(num_elements, dtype=torch.float64) * (5 + 2 + 4))


def test_a_call_that_is_given_up_does_not_end_and_gives_its_receives_back() -> None:
    ranks = (0, 1)
    schedule = choose(Topology.flat(2, rate=1e8), Collective.ALL_REDUCE, 64)
    tensor = torch.ones(8)
    ended = threading.Event()
    with Ports(2) as ports:
        layout = Layout.build(schedule, 8, 8)
        parts, tag = [(tensor, layout)], first_tag(9, 1, 16)
        call = ports[0].call(partial(ServersCall, ports[0], ranks, schedule, parts, tag=tag, on_done=ended.set), WAIT_S)
        passed = threading.Event()
        for action in (call.start, call.abandon, call.forget, passed.set):
            ports[0].call_soon(action)
        assert passed.wait(WAIT_S)
        assert not ended.is_set()
        assert tensor.tolist() == [1.0] * 8
        assert "0 receives" in repr(ports[0])


def test_what_the_file_says_goes_before_what_was_measured() -> None:
    topology = Topology.parse(
        "switch: core\nchildren:\n"
        + "".join(
            f"  - {{host: h{k}, uplink: 1 Gbit/s, ranks: 2, features: {{cpu_hz: {1e9 if k < 2 else 3e9}}}}}\n"
            for k in range(4)
        )
    )
    measured = {f"h{k}": {"cpu_hz": 2e9, "memory_bytes": 8e9} for k in range(4)}
    inventory = Inventory(topology=topology, measured=measured, use=["cpu_hz"])
    assert group(inventory) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert group(replace(inventory, use=["memory_bytes"])) == (tuple(range(8)),)
    assert len(group(inventory, clusters=3)) == 3


@pytest.mark.parametrize("clusters", [((0, 1),), ((0, 1), (1, 2)), ((0, 1, 2), ()), ((0, 1), (2, 3))])
def test_written_clusters_name_each_rank_once(clusters) -> None:
    with pytest.raises(ConfigurationError, match="once"):
        check_clusters(clusters, 3)
    assert check_clusters(((2,), (1, 0)), 3) == ((0, 1), (2,))
