"""``syncline plan``: the numbers that it prints, against formulas; not how they are laid out."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from syncline.cli.plan import MAX_ROWS, compare_planners, link_bytes_table, planner_table, show
from syncline.cli.step_plan import plan_replicas, plan_step
from syncline.errors import ConfigurationError, ScheduleError
from syncline.schedule import Collective, choose, plan_sharded_step
from syncline.topology import DirectedLink, Topology

NUM_BYTES = 8 * 9 * 5 * 3 * 1024


def result_of(comparison, planner):
    return next(result for result in comparison.results if result.planner == planner)


def cells_of(table):
    return list(zip(*(list(column.cells) for column in table.columns), strict=True))


def test_tree_and_ring_put_twice_seven_eighths_on_each_link_of_a_flat_network():
    comparison = compare_planners(Topology.load("flat-8"), Collective.ALL_REDUCE, NUM_BYTES)
    for planner in ("tree", "ring"):
        amounts = result_of(comparison, planner).link_bytes
        hosts = [amounts[DirectedLink(f"h{k}", way)] for k in range(8) for way in ("up", "down")]
        assert hosts == [2 * 7 * NUM_BYTES // 8] * 16


def test_an_uplink_of_two_racks_carries_the_data_once_by_tree_and_nearly_twice_by_ring():
    comparison = compare_planners(Topology.load("two-racks-5-3"), Collective.ALL_REDUCE, NUM_BYTES)
    rack = DirectedLink("rack-a", "up")
    assert result_of(comparison, "tree").link_bytes[rack] == NUM_BYTES
    assert result_of(comparison, "ring").link_bytes[rack] == pytest.approx(2 * 7 / 8 * NUM_BYTES, rel=1e-3)
    assert comparison.bound_s == pytest.approx(NUM_BYTES / 25e6)


@pytest.mark.parametrize(
    "name", ["two-racks-5-3", "three-racks-uneven-uplinks", "flat-8", "deep-asymmetric", "demo-1-3"]
)
@pytest.mark.parametrize("collective", list(Collective))
def test_the_winner_is_what_the_library_would_choose(name, collective):
    topology = Topology.load(name)
    comparison = compare_planners(topology, collective, 64 << 20)
    assert comparison.winner.planner == choose(topology, collective, 64 << 20).planner
    assert all(result.ratio >= 0.999 for result in comparison.results)


def test_only_planners_that_know_the_collective_are_compared():
    broadcast = compare_planners(Topology.flat(4, rate=1e8), Collective.BROADCAST, NUM_BYTES, root=2)
    assert "binomial" in {result.planner for result in broadcast.results}
    all_reduce = compare_planners(Topology.flat(4, rate=1e8), Collective.ALL_REDUCE, NUM_BYTES)
    assert "binomial" not in {result.planner for result in all_reduce.results}


def test_a_root_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="--root must be a rank from 0 to 3, got 4"):
        compare_planners(Topology.flat(4), Collective.BROADCAST, NUM_BYTES, root=4)


def test_the_tables_show_the_figures_and_mark_the_winner():
    comparison = compare_planners(Topology.load("two-racks-5-3"), Collective.ALL_REDUCE, 64 << 20)
    rows = {row[0].split()[0]: row for row in cells_of(planner_table(comparison))}
    tree = result_of(comparison, "tree")
    assert rows["tree"][2:4] == (f"{tree.prediction.time_s / comparison.bound_s:.2f}", str(tree.num_steps))
    assert [name for name, row in rows.items() if "wins" in row[0]] == [comparison.winner.planner]
    links = {row[0].strip(): row for row in cells_of(link_bytes_table(comparison))}
    assert set(links) == {"rack-a", "rack-b", *(f"h{k}" for k in range(8))}
    assert links["rack-a"][1:3] == ("200 Mbit/s", "64.0")


def test_a_large_network_is_shown_from_the_top():
    racks = "".join(
        f"  - {{switch: r{k}, uplink: 1 Gbit/s, children: [{{host: 'r{k}h[0-29]', uplink: 1 Gbit/s}}]}}\n"
        for k in range(2)
    )
    topology = Topology.parse(f"topology: large\nswitch: core\nchildren:\n{racks}", source="large.yaml")
    table = link_bytes_table(compare_planners(topology, Collective.BROADCAST, NUM_BYTES))
    assert [row[0] for row in cells_of(table)] == ["r0", "r1"]
    assert len(topology.hosts) > MAX_ROWS
    assert table.caption == "... and 60 more links: --json has them all"


def test_programs_can_read_the_figures():
    command = [sys.executable, "-m", "syncline", "plan", "two-racks-5-3", "--bytes", "64MiB", "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert shown["num_bytes"] == 64 << 20
    assert shown["bound_s"] == pytest.approx((64 << 20) / 25e6)
    tree = next(planner for planner in shown["planners"] if planner["planner"] == "tree")
    assert tree["link_bytes"]["rack-a"]["up"] == 64 << 20
    assert tree["ratio"] == pytest.approx(tree["time_s"] / shown["bound_s"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("no-such-network",), "no-such-network"),
        (("flat-8", "--bytes", "64 bytes?"), "64 bytes?"),
        (("flat-8", "--portions", "1.5"), "--portions 1.5 is said of a sharded step, not of all_reduce; add --coll"),
        (("flat-8", "--spares", "1"), "--spares 1 is said of a sharded step, not of all_reduce; add --collective sh"),
        (("flat-8", "--replicate", "host"), "--replicate host is said of a sharded step, not of all_reduce; add"),
        (("flat-8", "--root", "1"), "--root 1 is said of a broadcast, not of all_reduce; add --collective broadcast"),
        (
            ("flat-8", "--collective", "sharded_step", "--target", "rank_order"),
            "--target rank_order is said of an all-reduce and its halves, not of sharded_step; add --collective all_re",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(args, message):
    command = [sys.executable, "-m", "syncline", "plan", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_planners_that_cannot_keep_to_gateways_are_left_out():
    hosts = "[{host: 'h[0-2]', uplink: 1 Gbit/s, ranks: 3, gateway: GATEWAY}]"
    one, auto = (
        Topology.parse(f"{{switch: s, children: {hosts.replace('GATEWAY', each)}}}") for each in ("one", "auto")
    )
    comparison = compare_planners(one, Collective.ALL_REDUCE, NUM_BYTES)
    assert [result.planner for result in comparison.results] == ["tree", "weighted_tree"]
    assert compare_planners(auto, Collective.ALL_REDUCE, NUM_BYTES).topology.gateways == {}
    assert compare_planners(auto, Collective.ALL_REDUCE, 64 << 10).topology.gateways == one.gateways


def test_more_ranks_than_a_job_may_have_are_planned_in_outline_and_it_is_said_how_they_are_verified():
    rack = "{switch: rNUMBER, uplink: 10 Gbit/s, children: [{host: 'rNUMBERh[0-59]', uplink: 1 Gbit/s, ranks: 8}]}"
    racks = ", ".join(rack.replace("NUMBER", str(number)) for number in range(10))
    topology = Topology.parse(f"{{switch: core, children: [{racks}]}}")
    found = compare_planners(topology, Collective.ALL_REDUCE, NUM_BYTES)
    assert [result.planner for result in found.results] == ["tree", "weighted_tree"]
    assert found.left_out == {"ring": 256, "recursive_doubling": 4096}
    assert all(result.proof == "by symmetry: 1 of 4,800 ranks stands for the others" for result in found.results)
    assert found.bound_s <= found.winner.prediction.time_s
    step = plan_step(topology, NUM_BYTES, "balanced")
    assert "of 4,800 ranks stand" in step.proof
    assert max(step.shares) <= 1.26 / 4800
    assert step.bound_s <= step.candidates[0][1].time_s
    console = Console(record=True, width=100)
    show(found, console)
    text = console.export_text()
    assert "recursive_doubling is not considered beyond 4,096 ranks" in text
    assert "tree is verified by symmetry" in text
    for plan in (
        lambda: compare_planners(topology, Collective.BROADCAST, NUM_BYTES),
        lambda: compare_planners(topology, Collective.ALL_REDUCE, NUM_BYTES, target="rank_order"),
        lambda: plan_step(topology, NUM_BYTES, "balanced", spares=1),
        lambda: plan_replicas(topology, NUM_BYTES, "auto"),
        lambda: plan_sharded_step(topology, NUM_BYTES),
    ):
        with pytest.raises(ScheduleError, match=r"4800 ranks, .* at most 4096; .*`syncline plan` alone goes beyond"):
            plan()


def test_a_small_network_is_verified_whole():
    comparison = compare_planners(Topology.load("two-racks-5-3"), Collective.ALL_REDUCE, NUM_BYTES)
    assert {result.proof for result in comparison.results} == {"whole: all ranks, and all data"}
    assert not comparison.left_out
