"""``syncline plan --collective sharded_step``: its figures, and what it says of them."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from syncline.cli.step_plan import candidate_table, cap_table, parse_portions, plan_step, share_table, show_step
from syncline.errors import ConfigurationError
from syncline.schedule import plan_sharded_step, predict_sharded_step, sharded_step_bound
from syncline.topology import Topology
from syncline.units import format_duration

NUM_BYTES = 16 << 20


@pytest.mark.parametrize("name", ["deep-asymmetric", "three-racks-uneven-uplinks", "flat-8"])
def test_the_winner_is_what_the_library_plans(name):
    topology = Topology.load(name)
    found, step = plan_step(topology, NUM_BYTES, "balanced"), plan_sharded_step(topology, NUM_BYTES)
    assert found.shares == step.shares
    assert found.candidates[0][1] == predict_sharded_step(step, topology, NUM_BYTES)
    assert found.bound_s == sharded_step_bound(topology, NUM_BYTES) <= found.capped_bound_s * (1 + 1e-6)
    assert min(prediction.time_s for _, prediction in found.candidates) >= found.bound_s


def test_the_tables_show_every_candidate_and_every_host():
    found = plan_step(Topology.load("deep-asymmetric"), NUM_BYTES, "fastest")
    cells = [list(column.cells) for column in candidate_table(found).columns]
    assert [name.split()[0] for name in cells[0]] == [scatter.planner for (scatter, _), _ in found.candidates]
    assert [name for name in cells[0] if "wins" in name] == [cells[0][0]]
    assert float(cells[4][0]) == pytest.approx(found.candidates[0][1].time_s / found.bound_s, abs=0.01)
    hosts = list(share_table(found).columns[0].cells)
    assert hosts[0].startswith("h0")
    assert hosts[-1].endswith(("h8", "(2)"))


def test_what_each_cap_costs_is_shown():
    found = plan_step(Topology.load("demo-1-3"), NUM_BYTES, parse_portions("1.25"))
    assert max(found.shares) <= 1.25 / 4 + 1e-4
    caps = {cap: prediction for cap, (_, prediction) in found.caps}
    assert list(caps) == [1.0, 1.25, 2.0, None]
    assert caps[1.25].time_s == found.candidates[0][1].time_s
    assert caps[1.0].time_s >= caps[1.25].time_s > caps[2.0].time_s
    rows = list(zip(*(column.cells for column in cap_table(found).columns), strict=True))
    assert [row[0] for row in rows] == ["1", "1.25", "2", "fastest"]
    assert rows[1][3] == "31.2%"


@pytest.mark.parametrize("text", ["0.5", "nan", "evenly", "inf"])
def test_portions_that_are_none_are_refused(text):
    with pytest.raises(ConfigurationError, match=f"--portions is balanced, fastest, or .* not '{text}'"):
        parse_portions(text)


def test_a_network_without_rates_is_limited_by_no_link():
    console = Console(record=True, width=200)
    show_step(plan_step(Topology.flat(2), NUM_BYTES, "balanced"), console)
    text = console.export_text()
    assert "limited by no link" in text
    assert "inf" not in text


def test_it_says_when_a_step_in_the_backward_pass_pays():
    console = Console(record=True, width=100)
    found = plan_step(Topology.load("flat-8"), NUM_BYTES, "balanced")
    show_step(found, console)
    assert not found.overlap_pays
    assert "step_in_backward gains little" in console.export_text()


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_shows_whole_figures(width):
    console = Console(record=True, width=width)
    found = plan_step(Topology.load("deep-asymmetric"), NUM_BYTES, "balanced")
    show_step(found, console)
    text = console.export_text()
    assert "…" not in text
    if width == 60:
        assert format_duration(found.candidates[0][1].time_s).split()[0] in text


def test_where_nothing_is_moved_nothing_pays():
    console = Console(record=True, width=100)
    found = plan_step(Topology.flat(1), NUM_BYTES, "balanced")
    show_step(found, console)
    assert not found.overlap_pays
    assert "step_in_backward" not in console.export_text()


def test_programs_can_read_the_figures():
    command = [sys.executable, "-m", "syncline", "plan", "two-racks-5-3", "--collective", "sharded_step"]
    done = subprocess.run([*command, "--portions", "fastest", "--json"], capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert sum(shown["shares"]) == pytest.approx(1)
    first = shown["planners"][0]
    assert first["time_s"] == pytest.approx(first["reduce_scatter_s"] + first["all_gather_s"])
    assert (shown["portions"], shown["winner"]) == ("fastest", first["planner"])


def test_spares_are_shown_with_what_they_keep_and_cost():
    console = Console(record=True, width=100)
    found = plan_step(Topology.load("flat-8"), NUM_BYTES, "balanced", spares=1)
    show_step(found, console)
    assert found.spares.shares == pytest.approx(found.shares)
    text = console.export_text()
    assert "spares in another host: 245.7 ms one after the other, +0.0% of what" in text
    assert "its ranks are spares of" in text
    command = [sys.executable, "-m", "syncline", "plan", "two-sites", "--collective", "sharded_step"]
    done = subprocess.run([*command, "--spares", "1", "--json"], capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)["spares"]
    assert shown["apart"] == "rack"
    assert shown["time_s"] == pytest.approx(shown["reduce_scatter_s"] + shown["all_gather_s"])
