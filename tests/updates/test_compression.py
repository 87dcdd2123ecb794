"""Codes on slow links: against a replay in one process, written from their description; the same bits on all ranks."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from coded_replay import COUNT, TWO_AND_THREE, Replay, gradient_of
from syncline.errors import ConfigurationError, UpdateError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.schedule.replicas import find_replicas
from syncline.topology import Topology
from syncline.updates import AllReduce, LocalSteps, Sharded
from syncline.updates.compression import cells_of, choose_sites, crossing_bytes
from thread_fleets import run_fleets

TOPOLOGIES = {
    "two sites": TWO_AND_THREE,
    "hosts": Topology.flat(3),
    "three sites": Topology.load("three-racks-uneven-uplinks"),
}
BITS = {"int4": 4, "int8": 8, "bf16": 16}


class Weights(nn.Module):
    """A loss whose gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(COUNT, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weights * gradient).sum()


def start(fleet, compress, model=None, rule=AllReduce, **options):
    model = model or Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return distribute(model, optimizer, rule(compress=compress), fleet=fleet, **options)


@pytest.mark.parametrize("compress", BITS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_gradients_are_those_of_the_replay(name: str, compress: str) -> None:
    topology = TOPOLOGIES[name]
    num_ranks, replay = topology.num_ranks, Replay(topology, BITS[compress])
    expected = [replay.mean([gradient_of(rank, step, num_ranks) for rank in range(num_ranks)]) for step in range(3)]

    def body(fleet):
        model, _ = start(fleet, compress)
        found = []
        for step in range(3):
            model(gradient_of(fleet.rank, step, num_ranks)).backward()
            found.append(model.weights.grad.clone())
            model.zero_grad()
        return found

    for found in run_fleets(topology, body):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("rule", [AllReduce, Sharded])
def test_errors_are_in_checkpoints(tmp_path, rule) -> None:
    """Going on from a checkpoint is going on: also what codes lacked."""

    def step(fleet, model, optimizer, number):
        model(gradient_of(fleet.rank, number, fleet.world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(fleet):
        model, optimizer = start(fleet, "int4", rule=rule)
        for number in range(2):
            step(fleet, model, optimizer, number)
        save_checkpoint(tmp_path / "two", model, optimizer)
        step(fleet, model, optimizer, 2)
        return model.weights.detach().clone()

    def go_on(compress):
        def body(fleet):
            model, optimizer = start(fleet, compress, rule=rule)
            load_checkpoint(tmp_path / "two", model, optimizer)
            step(fleet, model, optimizer, 2)
            return model.weights.detach().clone()

        return body

    expected = run_fleets(TWO_AND_THREE, train)
    found = run_fleets(TWO_AND_THREE, go_on("int4"))
    assert all(map(torch.equal, found, expected))
    plain = run_fleets(TWO_AND_THREE, go_on("off"))
    assert not torch.equal(plain[0], expected[0])


@pytest.mark.parametrize(
    ("name", "compress", "options"),
    [
        ("two sites", "int8", {}),
        ("hosts", "int4", {}),
        ("three sites", "bf16", {"align": "parameter"}),
        ("two sites", "int8", {"overlap_forward": True}),
    ],
    ids=str,
)
def test_state_dict_is_exact_and_leaves_the_codes_as_they_are(tmp_path, name, compress, options) -> None:
    topology = TOPOLOGIES[name]

    def train(fleet, is_asked):
        model = nn.Linear(7, 5)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        rule = Sharded(compress=compress, **options)
        model, optimizer = distribute(model, torch.optim.Adam(model.parameters(), lr=0.1), rule, fleet=fleet)
        whole = None
        for number in range(4):
            inputs = torch.linspace(-1, 1, 7) * (1 + fleet.rank + number)
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_asked and number == 2:
                whole = optimizer.state_dict()
                save_checkpoint(tmp_path / "saved", model, optimizer)
        optimizer.synchronize()
        return whole, [one.detach().clone() for one in model.parameters()]

    found = run_fleets(topology, lambda fleet: train(fleet, is_asked=True))
    without = run_fleets(topology, lambda fleet: train(fleet, is_asked=False))
    plain = torch.optim.Adam(nn.Linear(7, 5).parameters())
    load_checkpoint(tmp_path / "saved", (model := nn.Linear(7, 5)), (saved := torch.optim.Adam(model.parameters())))
    for (whole, parameters), (_, expected) in zip(found, without, strict=True):
        plain.load_state_dict(whole)
        for mine, theirs in zip(plain.state.values(), saved.state.values(), strict=True):
            assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert all(map(torch.equal, parameters, expected))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_element_has_one_collector_in_each_site(name: str) -> None:
    topology = TOPOLOGIES[name]
    sites = find_replicas(topology, 1)
    cuts = [COUNT * k // topology.num_ranks for k in range(topology.num_ranks + 1)]
    cells = cells_of([(*pair, rank) for rank, pair in enumerate(pairwise(cuts))], sites)
    assert [cell.start for cell in cells] == [0, *(cell.stop for cell in cells[:-1])]
    assert cells[-1].stop == COUNT
    for cell in cells:
        assert cell.owner in cell.collectors
        assert all(collector in ranks for collector, ranks in zip(cell.collectors, sites, strict=True))
        assert cuts[cell.owner] <= cell.start < cell.stop <= cuts[cell.owner + 1]
    for site, ranks in enumerate(sites):
        foreign = [cell for cell in cells if cell.owner not in ranks]
        of_rank = [sum(cell.stop - cell.start for cell in foreign if cell.collectors[site] == rank) for rank in ranks]
        assert max(of_rank) - min(of_rank) <= 1


def crossing_of(compress: str, topology: Topology, dtype: torch.dtype = torch.float32) -> list:
    def body(fleet):
        _, optimizer = start(fleet, compress, Weights(dtype))
        crossing = optimizer.training.updater.collectives.crossing
        return crossing and crossing.sites

    return run_fleets(topology, body)


def test_auto_codes_between_slow_sites_alone() -> None:
    assert crossing_of("auto", TWO_AND_THREE) == [((0, 1), (2, 3, 4))] * 5
    fast = TWO_AND_THREE.to_yaml().replace("20 Mbit/s", "10 Gbit/s").replace("30 Mbit/s", "10 Gbit/s")
    assert crossing_of("auto", Topology.parse(fast.replace("1 Gbit/s", "10 Gbit/s"))) == [None] * 5
    assert crossing_of("auto", Topology.flat(3)) == [None] * 3
    assert crossing_of("off", TWO_AND_THREE) == [None] * 5


def test_auto_looks_at_who_owns_what() -> None:
    """Codes go straight to the owner; where one of many hosts owns nearly all, its link carries those of all others."""
    slow = Topology.flat(8, rate=2.5e6)
    hosts = [host.name for host in slow.hosts]

    def body(fleet, portions):
        model = Weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = Sharded(compress="auto", portions=portions)
        _, optimizer = distribute(model, optimizer, rule, fleet=fleet)
        return optimizer.training.updater.collectives.crossing is not None

    assert run_fleets(slow, lambda fleet: body(fleet, dict.fromkeys(hosts, 1.0))) == [True] * 8
    one = dict.fromkeys(hosts, 0.01) | {hosts[0]: 1.0}
    assert run_fleets(slow, lambda fleet: body(fleet, one)) == [False] * 8


def test_codes_on_a_link_follow_the_owners_shares() -> None:
    slow = Topology.flat(4, rate=2.5e6)
    sites = find_replicas(slow, 1)
    even = crossing_bytes(slow, sites, 4 << 20, 8)
    assert even == crossing_bytes(slow, sites, 4 << 20, 8, [0.25] * 4)
    assert len(set(even.values())) == 1
    of_one = crossing_bytes(slow, sites, 4 << 20, 8, [1.0, 0.0, 0.0, 0.0])
    assert max(of_one.values()) == pytest.approx(2 * max(even.values()))
    assert choose_sites(slow, 4 << 20, 8, [1.0, 0.0, 0.0, 0.0])[1] > 1.9 * choose_sites(slow, 4 << 20, 8)[1]


def test_other_numbers_than_float32_move_as_they_are() -> None:
    assert crossing_of("int8", TWO_AND_THREE, torch.float64) == [None] * 5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hosts", {}),
        ("three sites", {}),
        ("two sites", {"overlap_forward": True}),
        ("two sites", {"align": "parameter"}),
        ("two sites", {"portions": "fastest"}),
    ],
    ids=str,
)
def test_sharded_parameters_are_equal_and_near_those_of_one_process(name: str, options: dict) -> None:
    """Of the updates only what the last codes lack is missing: at most a step of the codes, in each number."""
    topology, count = TOPOLOGIES[name], 15
    generator = torch.Generator().manual_seed(3)
    wanted = [torch.randn(COUNT, generator=generator) for _ in range(topology.num_ranks)]

    def body(fleet, compress):
        model = Weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = Sharded(compress=compress, bucket_bytes=4096, **options)
        model, optimizer = distribute(model, optimizer, rule, fleet=fleet)
        for _ in range(count):
            (0.5 * (model.weights - wanted[fleet.rank]).square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return model.weights.detach().clone()

    exact, *_ = run_fleets(topology, lambda fleet: body(fleet, "off"))
    far = float((exact - torch.zeros(COUNT)).abs().max())
    for compress, most in (("int4", 0.02), ("int8", 0.002), ("bf16", 0.002)):
        first, *others = run_fleets(topology, lambda fleet, compress=compress: body(fleet, compress))
        assert all(torch.equal(first, other) for other in others)
        assert 0 < float((first - exact).abs().max()) < most * far


@pytest.mark.parametrize("options", [{"fragments": 1, "overlap": False}, {"fragments": 2}, {"parties": 1}], ids=str)
def test_rounds_of_local_steps_are_coded(options: dict) -> None:
    generator = torch.Generator().manual_seed(3)
    wanted = [torch.randn(COUNT, generator=generator) for _ in range(TWO_AND_THREE.num_ranks)]

    def body(fleet, compress):
        model = Weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = LocalSteps(period=4, compress=compress, **options)
        model, optimizer = distribute(model, optimizer, rule, fleet=fleet)
        for _ in range(16):
            (0.5 * (model.weights - wanted[fleet.rank]).square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.end_period()
        return model.weights.detach().clone()

    exact, *_ = run_fleets(TWO_AND_THREE, lambda fleet: body(fleet, "off"))
    first, *others = run_fleets(TWO_AND_THREE, lambda fleet: body(fleet, "int8"))
    assert all(torch.equal(first, other) for other in others)
    assert 0 < float((first - exact).abs().max()) < 0.02 * float(exact.abs().max())


def test_what_sharded_cannot_compress_is_refused() -> None:
    for options in ({"spares": 1}, {"step_in_backward": True}, {"replicate": 1}):
        with pytest.raises(ConfigurationError, match=r'With compress each range has one owner.*say compress="off"'):
            Sharded(compress="int8", **options)
    with pytest.raises(ConfigurationError, match="compress"):
        AllReduce(compress="int2")


def test_elastic_jobs_are_refused() -> None:
    def body(fleet):
        with pytest.raises(UpdateError, match=r"elastic=True does not go with AllReduce\(\), with compress.*\"off\""):
            start(fleet, "int8", elastic=True)

    run_fleets(2, body)
