"""What grants do for an urgent message where two senders converge, in a model of the links (no clock, no sockets)."""

import statistics

import pytest
from incast_model import Clock, Incast

from syncline.fabric import FabricOptions
from syncline.fabric._native import GrantScheduler
from syncline.fabric.sizing import fit_grants, fit_options
from syncline.topology import Topology

MIB = 1 << 20
DELAY_S = 0.0003
BULK, URGENT = 9, 0
NUM_BULK = 30


def incast(rate, *, delay_s=DELAY_S, late_s=0.0, is_strict=False):
    topology = Topology.flat(3, rate=rate)
    options, clock = FabricOptions(num_classes=4), Clock()
    scheduler = GrantScheduler(**fit_grants(options, rank=0, world_size=3, topology=topology))
    chunk_bytes = fit_options(options, rank=1, world_size=3, topology=topology)[0].chunk_bytes
    return Incast(
        scheduler,
        bytes_per_s=rate,
        chunk_bytes=chunk_bytes,
        delay_s=delay_s,
        late_s=late_s,
        clock=clock,
        is_strict=is_strict,
    )


def seconds(rate, num_bytes, *, begins_s=None, urgency=URGENT, is_strict=False):
    """Let a message begin on the idle link, or under bulk at ``begins_s``; return how long it takes."""
    model = incast(rate, is_strict=is_strict)
    most_window_bytes = model.scheduler.window_bytes
    if begins_s is not None:
        for _ in range(NUM_BULK):
            model.wish(1, MIB, BULK)
            model.wish(2, MIB, BULK)
        model.clock.run(lambda: model.clock.now_s > begins_s)
    started_s = model.clock.now_s
    took_s = model.wait(model.wish(1, num_bytes, urgency)) - started_s
    assert model.most_underway < 2.5 * most_window_bytes
    return took_s


def ratio(rate, num_bytes, **settings):
    """Return the median over moments at which the message may begin, over its time on the idle link."""
    moments = [0.3 + 0.0017 * number for number in range(9)]
    return statistics.median(seconds(rate, num_bytes, begins_s=moment, **settings) for moment in moments) / seconds(
        rate, num_bytes
    )


@pytest.mark.parametrize(("rate", "num_bytes"), [(25e6, MIB), (125e6, 5 * MIB)])
def test_an_urgent_message_hardly_waits_where_grants_order_the_senders(rate, num_bytes):
    assert ratio(rate, num_bytes) < 1.15


def test_a_switch_that_honours_priorities_lets_it_overtake_what_is_under_way():
    assert ratio(25e6, MIB, is_strict=True) < 1.07


def test_without_urgency_it_waits_for_everything_before_it():
    assert ratio(25e6, MIB, urgency=BULK) > 10


def busy_share(model, num_bulk=NUM_BULK):
    tags = [model.wish(peer, MIB, BULK) for _ in range(num_bulk) for peer in (1, 2)]
    ended_s = max(model.wait(tag) for tag in tags)
    return model.bottleneck.busy_s / ended_s


@pytest.mark.parametrize("rate", [25e6, 125e6])
def test_the_window_keeps_the_link_busy(rate):
    assert busy_share(incast(rate)) > 0.97


def test_the_window_is_small_where_hosts_answer_quickly():
    model = incast(25e6)
    assert busy_share(model) > 0.97
    assert model.scheduler.window_bytes == 50_000, "2 ms, where 5 ms are the most"


def test_the_window_stays_larger_where_hosts_are_slow_to_answer():
    model = incast(25e6, delay_s=0.002, late_s=0.005)
    assert busy_share(model) > 0.9
    assert model.scheduler.window_bytes > 60_000


def test_the_link_stays_busy_when_an_urgent_message_ends():
    model = incast(25e6)
    bulk = [model.wish(2, MIB, BULK) for _ in range(4)]
    urgent = [model.wish(1, MIB, URGENT) for _ in range(4)]
    ended_s = max(model.wait(tag) for tag in (*urgent, *bulk))
    assert model.bottleneck.busy_s / ended_s > 0.97
