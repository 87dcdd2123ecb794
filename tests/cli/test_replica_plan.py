"""``syncline plan --collective sharded_step --replicate``: its figures are those of what the library would do."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from syncline.cli.step_plan import choice_table, parse_replicate, plan_replicas, plan_step, show_replicas
from syncline.errors import TopologyError
from syncline.schedule.replicas import find_replicas
from syncline.schedule.replicated_step import choose_replicas
from syncline.topology import Topology

NUM_BYTES = 16 << 20
RACKS = Topology.load("two-racks-5-3")
RACK = "{{switch: {0}, uplink: 1 Gbit/s, children: [{{host: '{0}[0-1]', uplink: 1 Gbit/s, ranks: 4}}]}}"
HOSTS = Topology.parse(f"{{switch: top, children: [{RACK.format('a')}, {RACK.format('b')}]}}")


def test_what_auto_chooses_is_what_training_chooses():
    found = plan_replicas(HOSTS, 4 * NUM_BYTES, "auto")
    step = choose_replicas(HOSTS, 4 * NUM_BYTES)
    assert found.chosen == step.replicas == find_replicas(HOSTS, 1)
    (result,) = [result for result in found.results.values() if result.replicas == step.replicas]
    assert (result.within, result.after, result.shares) == (step.within, step.after, step.shares)


def test_none_is_the_plain_step():
    none = plan_replicas(RACKS, NUM_BYTES, "auto").results["none"]
    plain = plan_step(RACKS, NUM_BYTES, "balanced")
    assert none.shares == plain.shares
    assert none.within.time_s + none.after.time_s == plain.candidates[0][1].time_s


def test_each_replica_owns_everything_once():
    for result in plan_replicas(Topology.load("two-sites"), NUM_BYTES, "auto").results.values():
        for ranks in result.replicas:
            assert sum(result.shares[rank] for rank in ranks) == pytest.approx(1.0)


def test_the_table_shows_every_choice_and_what_is_asked_for():
    console = Console(record=True, width=100)
    found = plan_replicas(RACKS, NUM_BYTES, parse_replicate("rack-a, rack-b"))
    show_replicas(found, console)
    names, sizes = (list(column.cells) for column in choice_table(found).columns[:2])
    assert names == ["none", "level 1 (chosen)"]
    assert sizes == ["8", "5, 3"]
    assert "under backward" in console.export_text()


def test_a_level_that_auto_leaves_out_is_marked():
    found = plan_replicas(Topology.load("demo-1-3"), NUM_BYTES, "auto")
    table = choice_table(found)
    assert list(table.columns[0].cells) == ["none (chosen)", "level 1 (not by auto)"]
    assert "auto takes no level with a replica of one rank" in table.caption
    asked = choice_table(plan_replicas(Topology.load("demo-1-3"), NUM_BYTES, 1))
    assert list(asked.columns[0].cells) == ["none", "level 1 (chosen)"]
    assert "auto" not in asked.caption


def test_replicas_that_are_no_level_are_shown_too():
    topology = Topology.parse(
        "{switch: top, children: [{host: a, uplink: 1 Gbit/s, ranks: 2}, {switch: r, uplink: 1 Gbit/s, children: "
        "[{host: b, uplink: 1 Gbit/s, ranks: 2}, {host: c, uplink: 1 Gbit/s, ranks: 3}]}]}"
    )
    found = plan_replicas(topology, NUM_BYTES, "host")
    assert found.chosen == ((0, 1), (2, 3), (4, 5, 6))
    assert list(found.results)[-1] == "as asked"


def test_a_level_has_the_number_by_which_it_is_asked_for():
    topology = Topology.parse(
        "{switch: top, children: [{switch: only, uplink: 1 Gbit/s, children: "
        "[{host: 'h[0-1]', uplink: 1 Gbit/s, ranks: 2}]}]}"
    )
    results = {name: step.replicas for name, step in plan_replicas(topology, NUM_BYTES, "auto").results.items()}
    assert results == {"none": find_replicas(topology, 0), "level 2": find_replicas(topology, 2)}


@pytest.mark.parametrize(
    ("text", "meaning"), [("host", "host"), ("auto", "auto"), ("2", 2), ("rack-a,rack-b", ("rack-a", "rack-b"))]
)
def test_what_is_asked_for(text, meaning):
    assert parse_replicate(text) == meaning


def test_names_that_are_not_there_are_refused():
    with pytest.raises(TopologyError, match="nowhere"):
        plan_replicas(RACKS, NUM_BYTES, parse_replicate("rack-a,nowhere"))


def test_programs_can_read_the_figures_and_spares_are_refused():
    command = [sys.executable, "-m", "syncline", "plan", "two-racks-5-3", "--collective", "sharded_step"]
    command += ["--replicate", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert shown["replicas"] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert [choice["name"] for choice in shown["choices"]] == ["none", "level 1"]
    refused = subprocess.run([*command, "--spares", "1"], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "leave out --spares" in refused.stdout + refused.stderr
