"""What ranks without a told topology measure of their network, on the fabric in memory."""

import asyncio
import json

import pytest

from syncline.machines.inventory import Inventory
from syncline.machines.measurement import read_machine
from syncline.topology import Topology
from syncline.updates.clustered import probe
from syncline.updates.clustered.grouping import measure_hosts
from syncline.updates.clustered.probe import FIRST_BYTES, LAST_BYTES, PART_S, Probe
from syncline.updates.control import ControlStream
from thread_fleets import run_fleets

TWO_ON_EACH = Topology.parse(
    "switch: core\nchildren:\n" + "".join(f"  - {{host: h{k}, uplink: unlimited, ranks: 2}}\n" for k in range(3))
)


def inventory_of(fleet, wanted: Inventory) -> Inventory:
    streams = fleet.reserve_streams(2)
    control = ControlStream(fleet.communicator, stream=streams[0], timeout_s=fleet.timeout_s)
    return measure_hosts(control, fleet.communicator, wanted, stream=streams[1], read=read_machine)


@pytest.mark.parametrize("topology", [Topology.flat(5), TWO_ON_EACH], ids=["flat", "two ranks on each host"])
def test_every_rank_holds_what_every_host_measured(topology: Topology) -> None:
    inventories = run_fleets(topology, lambda fleet: inventory_of(fleet, Inventory(topology=fleet.topology)), seed=3)
    num_hosts = len(topology.hosts)
    assert (
        len({json.dumps([measurement.as_pairs() for measurement in inventory.network]) for inventory in inventories})
        == 1
    )
    for place, measurement in enumerate(inventories[0].network):
        assert set(measurement.echoes_s) == set(range(num_hosts)) - {place}
        assert set(measurement.rates) == {(place + step) % num_hosts for step in probe.rotation(num_hosts)}
        assert all(value > 0 for value in (*measurement.echoes_s.values(), *measurement.rates.values()))
    assert len({json.dumps(inventory.measured) for inventory in inventories}) == 1
    assert set(inventories[0].measured) == {host.name for host in topology.hosts}


class DeafPort:
    """A port whose messages reach nobody; it counts what is sent."""

    rank = 0

    def __init__(self) -> None:
        self.sent_bytes = 0

    def send(self, peer: int, tag: int, payload: memoryview, **options: object) -> None:
        self.sent_bytes += payload.nbytes

    def receive(self, peer: int, tag: int, destination: memoryview, **options: object) -> None:
        pass


def run_in_virtual_time(part) -> float:
    """Run a coroutine on a loop whose clock jumps to the next timer; return the seconds that it thought went by."""
    loop = asyncio.new_event_loop()
    now_s = [0.0]
    loop.time = lambda: now_s[0]
    select = loop._selector.select

    def jump(timeout: float | None) -> list:
        now_s[0] += timeout or 0.0
        return select(0)

    loop._selector.select = jump
    try:
        loop.run_until_complete(part)
    finally:
        loop.close()
    return now_s[0]


def test_peers_that_do_not_answer_are_waited_for_no_longer_than_the_deadline() -> None:
    port = DeafPort()
    part = Probe(port, (0, 1, 2), stream=1)
    assert run_in_virtual_time(part.echo(0)) == pytest.approx(PART_S, abs=0.01)
    assert run_in_virtual_time(part.send(1, 1)) == pytest.approx(PART_S, abs=0.01)
    assert part.measurement.echoes_s == {}
    assert part.measurement.rates == {1: FIRST_BYTES / PART_S}
    assert port.sent_bytes == FIRST_BYTES + 2


class EchoPort(DeafPort):
    """A port to peers that answer at once."""

    def receive(self, peer: int, tag: int, destination: memoryview, *, on_received, **options: object) -> None:
        asyncio.get_running_loop().call_soon(on_received)


def test_a_fast_peer_gets_no_more_than_so_many_bytes() -> None:
    port = EchoPort()
    part = Probe(port, (0, 1), stream=1)
    run_in_virtual_time(part.send(1, 1))
    assert port.sent_bytes == 2 * LAST_BYTES - FIRST_BYTES


class TimedPort(DeafPort):
    """A port to one peer that answers as fast as a link of ``bytes_per_s`` lets it, after what is in ``held_up_s``."""

    def __init__(self, bytes_per_s: float, held_up_s: list[float]) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self.held_up_s = held_up_s

    def receive(self, peer: int, tag: int, destination: memoryview, *, on_received, **options: object) -> None:
        self.on_received = on_received

    def send(self, peer: int, tag: int, payload: memoryview, **options: object) -> None:
        held_up_s = self.held_up_s.pop(0) if self.held_up_s else 0.0
        asyncio.get_running_loop().call_later(held_up_s + payload.nbytes / self.bytes_per_s, self.on_received)


def test_a_message_that_was_held_up_once_does_not_make_a_link_slow() -> None:
    part = Probe(TimedPort(12.5e6, [0.05]), (0, 1), stream=1)
    run_in_virtual_time(part.send(1, 1))
    assert part.measurement.rates[1] == pytest.approx(12.5e6, rel=0.01)


def test_echoes_that_were_held_up_before_do_not_make_a_link_fast() -> None:
    """Of the 131 ms that 64 KiB take, an echo of 30 ms seemed to be latency until there were faster ones."""
    part = Probe(TimedPort(0.5e6, [0.03, 0.03, 0.03]), (0, 1), stream=1)
    run_in_virtual_time(part.echo(0))
    run_in_virtual_time(part.send(1, 1))
    assert part.measurement.rates[1] == pytest.approx(0.65e6, rel=0.01)
    run_in_virtual_time(part.echo(1))
    assert part.measurement.rates[1] == pytest.approx(0.5e6, rel=0.01)
