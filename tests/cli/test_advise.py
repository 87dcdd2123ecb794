"""``syncline advise``: the order of rules and their figures, against ``plan``, formulas and changed networks."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from made_traces import TOPOLOGY as MADE, make_job, synchronous
from syncline.cli.advice import PAIRS, RING, Advice
from syncline.cli.advise import advise, show
from syncline.cli.plan import compare_planners
from syncline.cli.processors import Processors
from syncline.cli.step_plan import plan_replicas, plan_step
from syncline.errors import ConfigurationError, SynclineError
from syncline.pytorch.model_profile import measure_model, measure_stepping, tell_scatter
from syncline.runtime.plans import Plans
from syncline.schedule import PLANNERS, Collective, CostModel, predict
from syncline.schedule.cost import predicted_slice_bytes
from syncline.schedule.pairs import StageShape, plan_pairs
from syncline.schedule.period import USUAL
from syncline.topology import Topology
from syncline.units import format_duration

MIB = 1 << 20
BUCKETS = (4 * MIB,) * 4
SHIPPED = ["two-racks-5-3", "three-racks-uneven-uplinks", "flat-8", "deep-asymmetric", "two-sites", "demo-1-3"]
HOME = "{{switch: s, children: [{{host: 'h[0-3]', uplink: 1 Gbit/s}}, {{host: home, uplink: {}}}]}}"


def advice_on(topology, *, compute_s, num_bytes=BUCKETS, coding_s=None, **processors):
    network = Topology.load(topology) if isinstance(topology, str) else topology
    forward_s = (compute_s / 3 / len(num_bytes),) * len(num_bytes)
    coding_s, cores = coding_s or {}, Processors(**processors)
    return Advice(
        topology=network, num_bytes=num_bytes, forward_s=forward_s, coding_s_per_byte=coding_s, processors=cores
    )


def with_stages(advice, *, passed_bytes=1000):
    """The same advice for a model whose buckets can be stages."""
    shapes = (
        StageShape(num_bytes=size, forward_share=1 / len(advice.num_bytes), passed_bytes=passed_bytes)
        for size in advice.num_bytes
    )
    return replace(advice, stages=tuple(shapes))


def row_of(advice, name):
    return next(row for row in advice.rows if row.name == name)


def planned_s(topology, num_bytes):
    """What ``plan`` says of each rule that waits for all that it moves."""
    whole = compare_planners(topology, Collective.ALL_REDUCE, num_bytes)
    times_s = {"AllReduce()": whole.winner.prediction.time_s}
    ring, unasked = PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE), CostModel(num_crossings=1)
    times_s[RING] = predict(ring, topology, num_bytes, predicted_slice_bytes(topology), cost=unasked).time_s
    step = plan_step(topology, num_bytes, "balanced").to_json()
    times_s["Sharded()"] = step["planners"][0]["time_s"]
    for cap in step["caps"][1:]:
        portions = f"{cap['cap']:g}" if cap["cap"] else '"fastest"'
        times_s[f"Sharded(portions={portions})"] = cap["time_s"]
    for choice in plan_replicas(topology, num_bytes, "auto").to_json()["choices"][1:]:
        name = f"Sharded(replicate={choice['name'].removeprefix('level ')})"
        times_s[name] = choice["under_backward_s"] + choice["after_step_s"]
    return times_s


@pytest.mark.parametrize("name", SHIPPED)
def test_where_nothing_is_computed_rules_take_what_plan_says_in_that_order(name):
    advice = advice_on(name, compute_s=1e-9)
    expected_s = planned_s(advice.topology, sum(BUCKETS))
    shown = [row.name for row in advice.rows if row.name in expected_s]
    assert {"AllReduce()", "Sharded()", RING} <= set(shown)
    assert shown[-1] == RING
    for each in shown:
        assert row_of(advice, each).step_s == pytest.approx(expected_s[each], rel=1e-5)
    in_order_s = [expected_s[each] for each in shown[:-1]]
    assert all(one <= other * (1 + 1e-5) for one, other in pairwise(in_order_s))
    left_out_s = {expected_s[each] for each in set(expected_s) - set(shown)}  # portions that change nothing
    assert all(any(seconds == pytest.approx(kept, rel=1e-5) for kept in in_order_s) for seconds in left_out_s)


@pytest.mark.parametrize("compute_s", [0.1, 0.8])
@pytest.mark.parametrize("name", SHIPPED)
def test_no_rule_is_faster_than_its_busiest_link_or_its_computing(name, compute_s):
    advice = advice_on(name, compute_s=compute_s)
    assert len(advice.rows) >= 4
    for row in advice.rows:
        rate = advice.topology.node(row.link.child).link.bytes_per_s(row.link.direction) * CostModel().payload_share
        assert row.step_s >= max(compute_s, row.link_bytes / rate) * (1 - 1e-6)


def test_what_is_reduced_hides_under_the_backward_pass_until_the_last_bucket():
    pair = Topology.flat(2, rate=125e6)
    whole_s = planned_s(pair, 2 * MIB)["AllReduce()"]
    compute_s = {"links": whole_s / 2, "computing": 6 * whole_s}  # a bucket's backward pass takes a third of it
    slow, fast = (advice_on(pair, compute_s=each, num_bytes=(MIB, MIB)) for each in compute_s.values())
    assert row_of(slow, "AllReduce()").exposed_s == pytest.approx(whole_s - compute_s["links"] / 3)
    assert row_of(fast, "AllReduce()").exposed_s == pytest.approx(whole_s / 2)
    halves = plan_step(pair, 2 * MIB, "balanced").candidates[0][1]
    expected_s = halves.reduce_scatter.time_s / 2 + halves.all_gather.time_s
    assert row_of(fast, "Sharded()").exposed_s == pytest.approx(expected_s)
    many = advice_on(pair, compute_s=8 * compute_s["computing"], num_bytes=(2 * MIB,) * 8)
    assert row_of(many, "Sharded(overlap_forward=True)").exposed_s < 0.7 * row_of(many, "Sharded()").exposed_s


def in_turn_s(num_bytes, forward_s, reduce_s, gather_s):
    """What a forward pass takes beyond computing, on one pipe: gradients in backward order, then what is gathered."""
    total, now_s = sum(num_bytes), -2 * sum(forward_s)
    carried_s = now_s
    for size, seconds in zip(reversed(num_bytes), reversed(forward_s), strict=True):
        now_s += 2 * seconds
        carried_s = max(carried_s, now_s) + size / total * reduce_s
    passed_s = 0.0
    for size, seconds in zip(num_bytes, forward_s, strict=True):
        carried_s += size / total * gather_s
        passed_s = max(passed_s, carried_s) + seconds
    return passed_s - sum(forward_s)


@pytest.mark.parametrize("compute_s", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("name", ["flat-8", "two-racks-5-3", "demo-1-3"])
def test_what_the_next_forward_pass_waits_for_comes_after_all_gradients(name, compute_s):
    advice = advice_on(name, compute_s=compute_s, num_bytes=(MIB, 2 * MIB, 4 * MIB, 2 * MIB))
    step = plan_step(advice.topology, sum(advice.num_bytes), "balanced").candidates[0][1]
    halves_s = step.reduce_scatter.time_s, step.all_gather.time_s
    in_turn = in_turn_s(advice.num_bytes, advice.forward_s, *halves_s)
    begun_s = Plans(advice.topology, slice_bytes=None).inflight_bytes / sum(advice.num_bytes) * halves_s[1]
    beside_s = sum(halves_s) - step.overlapped_s  # what both halves save where they use links that the other leaves
    exposed_s = row_of(advice, "Sharded(overlap_forward=True)").exposed_s
    assert in_turn - beside_s <= exposed_s <= in_turn + begun_s
    assert exposed_s < row_of(advice, "Sharded()").exposed_s + begun_s


def test_state_and_bytes_are_those_of_a_formula():
    advice = advice_on("flat-8", compute_s=0.1)
    total = sum(BUCKETS)
    for name, share in (("AllReduce()", 1.0), ("Sharded()", 1 / 8)):
        row = row_of(advice, name)
        assert row.memory_bytes == pytest.approx(2 * total * (1 + share))  # parameters, gradients, Adam's two numbers
        assert row.link_bytes == pytest.approx(2 * 7 / 8 * total, rel=1e-6)


def test_the_host_on_a_slow_link_is_the_one_to_leave_out():
    advice = advice_on(Topology.parse(HOME.format("10 Mbit/s")), compute_s=0.25)
    first, second, third = advice.sentences()
    without = advice_on(Topology.flat(4, rate=125e6), compute_s=0.25).best
    assert first.startswith(f"Without home a step takes {format_duration(without.step_s)} in place of")
    times = (4 / without.step_s) / (5 / advice.best.step_s)
    assert f"{times:.1f} times the samples per second, with 4 ranks in place of 5" in first
    round_s = row_of(advice_on(advice.topology, compute_s=1e-9), "AllReduce()").step_s
    local_s = round_s / USUAL
    assert second.startswith(f"LocalSteps(period={USUAL}) moves everything between sites once in {USUAL} steps")
    assert f"one takes {format_duration(local_s)} in" in second
    assert third.startswith("With ")


def test_local_steps_are_named_where_they_are_clearly_faster_than_codes():
    """These hide more than half of what moves under computing."""
    slow, faster = (
        advice_on(Topology.parse(HOME.format(rate)), compute_s=2.0, coding_s={4: 0.0})
        for rate in ("10 Mbit/s", "20 Mbit/s")
    )
    assert all(each.best.name == 'AllReduce(compress="int4")' for each in (slow, faster))
    assert 1.1 < faster.best.step_s / faster.compute_s < slow.best.step_s / slow.compute_s < 2
    assert slow.sentences()[0].startswith("LocalSteps(period=8) ")
    assert not any("LocalSteps" in each for each in faster.sentences())


def test_a_faster_uplink_and_a_larger_batch_are_predicted_as_a_job_that_has_them():
    advice = advice_on(Topology.parse(HOME.format("200 Mbit/s")), compute_s=0.7)
    faster = advice_on(Topology.parse(HOME.format("400 Mbit/s")), compute_s=0.7).best
    larger = advice_on(advice.topology, compute_s=1.4).best
    uplink, batch = (
        next(each for each in advice.sentences() if each.startswith(f"With {what}")) for what in ("the link", "a batch")
    )
    assert "the link above home twice as fast (400 Mbit/s" in uplink
    assert f"a step takes {format_duration(faster.step_s)} in" in uplink
    assert f"it takes {format_duration(larger.step_s)}:" in batch
    assert f"{2 * advice.best.step_s / larger.step_s - 1:.0%} more samples" in batch


def test_links_that_are_alike_are_made_faster_together():
    racks = (
        "{{switch: s, children: [{{switch: a, uplink: {0}, children: [{{host: 'a[0-2]', uplink: 1 Gbit/s}}]}}, "
        "{{switch: b, uplink: {0}, children: [{{host: 'b[0-2]', uplink: 1 Gbit/s}}]}}]}}"
    )
    now, then = (advice_on(Topology.parse(racks.format(rate)), compute_s=0.5) for rate in ("200 Mbit/s", "400 Mbit/s"))
    sentence = next(each for each in now.sentences() if each.startswith("With the link"))
    assert sentence.startswith(f"With the link above {now.best.link.child} and 1 like it twice as fast (400 Mbit/s")
    assert f"a step takes {format_duration(then.best.step_s)} in" in sentence


def test_where_no_change_gains_much_it_says_so():
    now, larger = (advice_on("flat-8", compute_s=seconds, num_bytes=(4 * MIB,) * 8) for seconds in (1.05, 2.1))
    assert now.best.exposed_s > 0.05 * now.best.step_s
    assert 2 * now.best.step_s / larger.best.step_s < 1.03
    assert now.sentences() == ["No change that is predicted gives 3% more samples per second."]


def test_on_a_fast_network_it_does_not_matter_and_nothing_is_coded():
    advice = advice_on(Topology.flat(8, rate=1.25e9), compute_s=0.25, coding_s={8: 0.0, 4: 0.0})
    assert 'AllReduce(compress="int4")' in [row.name for row in advice.rows]
    assert "compress" not in advice.best.name
    (sentence,) = advice.sentences()
    assert sentence.startswith("The network does not matter here: 9")


def test_codes_are_counted_with_their_bits_and_what_coding_costs():
    free, dear = (
        advice_on("two-racks-5-3", compute_s=1e-9, coding_s={8: seconds, 4: seconds}) for seconds in (0.0, 1e-6)
    )
    int8, int4 = (row_of(free, f'AllReduce(compress="int{bits}")') for bits in (8, 4))
    assert int8.link_bytes / int4.link_bytes == pytest.approx(8.125 / 4.125, rel=1e-3)
    assert free.best.name.startswith(("AllReduce(compress=", "Sharded(compress="))
    assert row_of(dear, int8.name).step_s - int8.step_s == pytest.approx(sum(BUCKETS) * 1e-6, rel=1e-6)


@pytest.mark.parametrize("name", SHIPPED)
def test_pairs_are_predicted_for_a_model_of_stages_where_they_can_be_trained(name):
    plain = advice_on(name, compute_s=0.3, num_bytes=(2 * MIB,) * 8)
    advice = with_stages(plain)
    assert PAIRS not in [row.name for row in plain.rows]
    if advice.topology.num_ranks % 2:
        assert advice.rows == plain.rows
        return
    pairs = plan_pairs(advice.topology, advice.stages)
    row = row_of(advice, PAIRS)
    assert row.step_s >= pairs.step_s(0.1, pairs.updates_s, 4) * (1 - 1e-6)
    assert row.step_s >= 0.4  # what is computed, and a third of it again
    assert row.exposed_s == pytest.approx(row.step_s - 0.3)
    assert row.memory_bytes == pytest.approx((2 + 2 * pairs.most_owned) * 2 * 2 * MIB)  # of two stages
    trips_bytes = 8 * MIB * (3 + 2 * 2 * pairs.most_owned)
    assert advice.disk_bytes_per_s == pytest.approx(trips_bytes / row.step_s)
    assert any("two of 8 stages in memory" in note for note in advice.notes())


def test_pairs_are_left_out_where_they_are_refused_and_advised_only_where_they_save_much():
    text = "{switch: s, children: [{host: 'h[0-1]', uplink: 100 Mbit/s, ranks: 2, gateway: one}]}"
    refused = with_stages(advice_on(Topology.parse(text), compute_s=0.1))
    assert PAIRS not in [row.name for row in refused.rows]
    assert refused.disk_bytes_per_s is None
    slow = with_stages(advice_on(Topology.parse(HOME.format("20 Mbit/s").replace("[0-3]", "[0-2]")), compute_s=0.1))
    plain = min(row.step_s for row in slow.rows if row.name != PAIRS)
    assert slow.best.name == PAIRS
    assert plain > 1.5 * slow.best.step_s, "half of the model has nothing to do with that link"
    fast = with_stages(advice_on(Topology.flat(4, rate=1.25e8), compute_s=0.4))
    assert fast.best.name != PAIRS


def test_what_a_pair_passes_takes_its_links():
    light, heavy = (
        row_of(with_stages(advice_on("flat-8", compute_s=0.1), passed_bytes=size), PAIRS) for size in (1, 32 * MIB)
    )
    assert heavy.step_s > light.step_s
    assert heavy.link_bytes - light.link_bytes == pytest.approx(2 * 3 * 32 * MIB, rel=1e-3)  # two batches, three ways


@pytest.mark.parametrize("name", ["flat-8", "two-racks-5-3", "demo-1-3"])
@pytest.mark.parametrize("compute_s", [0.05, 0.24, 0.6])
def test_classes_gain_at_most_what_the_rear_layers_hold_up(name, compute_s):
    advice = advice_on(name, compute_s=compute_s, num_bytes=(MIB,) * 8)
    overlapped = row_of(advice, advice.best.name)
    if advice.classes is None:
        assert "overlap_forward" not in overlapped.name
        return
    begun_s = Plans(advice.topology, slice_bytes=None).inflight_bytes / (8 * MIB) * overlapped.step_s
    assert 0 <= advice.classes.gain * overlapped.step_s <= begun_s
    assert list(advice.classes.classes) == sorted(advice.classes.classes)
    (note,) = advice.notes()
    assert note.startswith(f"{overlapped.name}: ")
    assert ("at most" in note) == (advice.classes.gain >= 0.03)


def test_a_trace_takes_the_place_of_a_model(tmp_path):
    """Two ranks on 80 Mbit/s, whose backward pass of 10 ms is that of one bucket of 1 MiB."""

    def fill(rank, trace, begin_ns):
        trace.about("job", rank=rank, members=[0, 1], topology=None if rank else MADE)
        synchronous(12)(rank, trace, begin_ns)

    make_job(tmp_path / "trace", 2, fill)
    command = [sys.executable, "-m", "syncline", "advise", "--trace", f"{tmp_path}/trace"]

    def ask(*arguments):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    shown = json.loads(ask("--json"))
    assert shown["topology"] == "made"
    assert shown["num_bytes"] == MIB
    assert shown["compute_s"] == pytest.approx(0.010)
    assert shown["traced"]["step_s"] == pytest.approx(0.015)
    assert {"AllReduce()", "Sharded()", RING} <= {rule["name"] for rule in shown["rules"]}
    assert json.loads(ask("flat-8", "--compute", "1 s", "--json"))["compute_s"] == pytest.approx(1)
    told = " ".join(ask().split())
    assert "in the trace a step took 15 ms" in told
    assert "1 MiB of parameters in 1 bucket, 2 ranks" in told
    assert "give one of --model and --trace" in ask("--model", "m:make")
    make_job(tmp_path / "trace", 1, synchronous(12))
    (tmp_path / "trace" / "trace-1.json").unlink()
    assert "name a TOPOLOGY" in ask()


TWO_EACH = "{switch: s, children: [{host: 'h[0-3]', uplink: 1 Gbit/s, ranks: 2}]}"


def test_ranks_that_want_more_cores_than_their_host_has_compute_as_much_longer():
    alone = advice_on(Topology.parse(TWO_EACH), compute_s=0.5)
    for num_cores, times in ((1, 2), (2, 1), (0.5, 4)):
        crowded = advice_on(alone.topology, compute_s=0.5, num_cores=num_cores, computing=1.0)
        longer = advice_on(alone.topology, compute_s=0.5 * times)
        assert crowded.compute_s == 0.5
        for row in crowded.rows:
            assert row.step_s == pytest.approx(row_of(longer, row.name).step_s)
            assert row.exposed_s == pytest.approx(row.step_s - 0.5)
    shared = advice_on(alone.topology, compute_s=0.5, num_cores=2, computing=1.0, is_one_machine=True)
    longer = advice_on(alone.topology, compute_s=0.5 * 8 / 2)
    assert shared.best.step_s == pytest.approx(longer.best.step_s)


def test_what_hosts_send_receive_and_step_takes_their_cores():
    total, moved_s, stepped_s = sum(BUCKETS), 1e-6, 1e-7
    costs = {"num_cores": 2, "moved_s_per_byte": moved_s, "stepped_s_per_byte": stepped_s}
    flat = advice_on(Topology.flat(4, rate=1e12), compute_s=1e-9, **costs)
    sent_s = 2 * 2 * 3 / 4 * total * moved_s / 2  # and received; 3/4 of all, to reduce and to gather
    assert row_of(flat, "AllReduce()").step_s == pytest.approx(sent_s + total * stepped_s, rel=5e-3)
    assert row_of(flat, "Sharded()").step_s == pytest.approx(sent_s + total / 4 * stepped_s, rel=5e-3)
    one = advice_on(flat.topology, compute_s=1e-9, is_one_machine=True, **costs)
    assert row_of(one, "AllReduce()").step_s == pytest.approx(4 * sent_s + 2 * total * stepped_s, rel=5e-3)
    hosts = advice_on(Topology.parse(TWO_EACH), compute_s=1e-9, **costs)
    inside_s = 2 * 2 * total * moved_s / 2
    assert row_of(hosts, "AllReduce()").step_s == pytest.approx(sent_s + inside_s + total * stepped_s, rel=5e-3)


def test_codes_take_the_cores_of_all_who_code():
    coding_s, total = 1e-6, sum(BUCKETS)
    enough, few = (
        advice_on("flat-8", compute_s=0.1, coding_s={8: coding_s}, num_cores=cores, is_one_machine=True)
        for cores in (64, 1)
    )
    name = 'AllReduce(compress="int8")'
    assert row_of(few, name).step_s == pytest.approx(8 * coding_s * total, rel=0.02)
    assert (
        row_of(enough, name).step_s == row_of(advice_on("flat-8", compute_s=0.1, coding_s={8: coding_s}), name).step_s
    )


SLEEPY = """
import time, torch
class Sleepy(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return {"out": [super().forward(x)]}
def make():
    return Sleepy(4, 4), torch.ones(1, 4)
def without_gradient():
    model = Sleepy(4, 4)
    model.forward = lambda x: x * 2
    return model, torch.ones(1, 4)
"""


@pytest.fixture(autouse=True)
def search_path(monkeypatch):
    """What models add to the search path of modules ends with the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_who_computes_keeps_a_core_busy_however_long_its_passes_were_held_up(tmp_path):
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    assert measure_model(f"{tmp_path}/sleepy.py:make").num_busy_cores == 1.0
    assert measure_model(f"{tmp_path}/sleepy.py:without_gradient").num_busy_cores >= 1.0
    assert measure_model(f"{tmp_path}/sleepy.py:make").stages == ()
    assert 0 < measure_stepping() < 1e-6


def test_passes_that_scatter_widely_are_told(capsys):
    tell_scatter([1.0, 1.4, 1.1, 1.2, 9.0])
    assert not capsys.readouterr().err
    tell_scatter([1.0, 1.6, 1.1, 1.8, 9.0])
    assert "forward passes took 1 s to 9 s, so this machine is probably busy" in capsys.readouterr().err


BROKEN = "import torch\nimport {0}\ndef make():\n    return torch.nn.Linear(4, 4), torch.ones(1, 5)\n"


def test_a_module_is_found_where_python_finds_it_and_a_pass_that_fails_is_no_traceback(tmp_path, monkeypatch):
    (tmp_path / "found_beside.py").touch()
    (tmp_path / "found_here.py").write_text(BROKEN.format("found_beside"))
    failed = "the forward pass of '.*found_here.*:make' failed: RuntimeError: "
    with pytest.raises(ConfigurationError, match=failed):
        measure_model(f"{tmp_path}/found_here.py:make")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=failed):
        measure_model("found_here:make")


STAGES = """
import time, torch
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.03)
        return super().forward(x)
def make():
    layers = torch.nn.Flatten(), torch.nn.Linear(8, 16), torch.nn.ReLU(), Slow(16, 4), torch.nn.Linear(4, 4)
    return torch.nn.Sequential(*layers), torch.ones(5, 2, 4)
def tied():
    model, batch = make()
    model[4].bias = model[3].bias
    return model, batch
class Branches(torch.nn.Sequential):
    def forward(self, x):
        return self[0](x) + self[1](x)
def branches():
    return Branches(torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)), torch.ones(2, 4)
"""


def test_the_modules_of_a_sequence_are_stages_with_those_that_are_not_trained(tmp_path):
    (tmp_path / "stages.py").write_text(STAGES)
    first, second, third = measure_model(f"{tmp_path}/stages.py:make").stages
    assert [stage.num_bytes for stage in (first, second, third)] == [4 * 9 * 16, 4 * 17 * 4, 4 * 5 * 4]
    assert [stage.passed_bytes for stage in (first, second, third)] == [4 * 5 * 16, 4 * 5 * 4, 4 * 5 * 4]
    assert second.forward_share > 0.9
    assert first.forward_share + second.forward_share + third.forward_share == pytest.approx(1)
    assert measure_model(f"{tmp_path}/stages.py:tied").stages == ()
    assert measure_model(f"{tmp_path}/stages.py:branches").stages == (), "its modules do not follow each other"


def test_more_cores_are_advised_where_cores_hold_steps_up():
    costs = {"computing": 1.0, "is_one_machine": True}
    now, then = (advice_on("flat-8", compute_s=0.4, num_cores=cores, **costs) for cores in (2, 4))
    assert now.sentences()[0] == (
        f"With 4 cores on the machine a step takes {format_duration(then.best.step_s)} in place of "
        f"{format_duration(now.best.step_s)} ({then.best.name})."
    )
    assert not any("cores" in each for each in advice_on("flat-8", compute_s=0.01, num_cores=2).sentences())


def test_the_table_fits_into_80_columns_and_gateways_leave_out_what_cannot_keep_to_them():
    console = Console(record=True, width=80)
    text = "{switch: s, children: [{host: 'h[0-1]', uplink: 100 Mbit/s, ranks: 2, gateway: one}]}"
    advice = advice_on(Topology.parse(text), compute_s=0.1, coding_s={8: 0.0})
    show(advice, 16, None, console)
    shown = console.export_text()
    assert "…" not in shown
    assert "samples/s" in shown
    narrow = Console(record=True, width=60)
    show(advice, 16, None, narrow)
    cells = re.sub(r"\s", "", narrow.export_text())
    assert "…" not in cells
    assert format_duration(advice.best.step_s).split()[0] in cells
    assert all(word not in shown for word in (RING, "int8"))


def test_programs_can_read_the_figures(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(512, 512), torch.randn(4, 512)\n"
    )
    command = [sys.executable, "-m", "syncline", "advise", "two-racks-5-3", "--model"]
    command += [f"{tmp_path}/model.py:make", "--compute", "0.25s", "--batch", "32", "--json"]
    command += ["--cores", "3", "--one-machine", "--gpus"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert shown["compute_s"] == pytest.approx(0.25)
    assert shown["num_bytes"] == 4 * (512 * 512 + 512)
    assert shown["processors"]["num_cores"] == 3
    assert shown["processors"]["is_one_machine"]
    assert 0 < shown["processors"]["moved_s_per_byte"] < 1e-6
    assert shown["processors"]["stepped_s_per_byte"] == shown["processors"]["computing"] == 0
    first = shown["rules"][0]
    assert first["samples_per_s"] == pytest.approx(8 * 32 / first["step_s"])
    assert {"AllReduce()", "Sharded()", RING} <= {rule["name"] for rule in shown["rules"]}


CORES = {"cores": None, "one_machine": False, "gpus": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "no-such-network"}, "no-such-network"),
        ({"compute": "soon"}, "'soon' is not a duration"),
        ({"compute": "0 s"}, "more than 0, not '0 s'"),
        ({"model": "nowhere"}, "--model is MODULE:FUNCTION"),
        ({"model": None}, "give one of --model and --trace"),
        ({"topology": None}, "name a TOPOLOGY"),
    ],
)
def test_what_cannot_be_advised_on_is_refused_with_a_reason(arguments, message):
    with pytest.raises(SynclineError, match=message):
        advise(**{"topology": "flat-8", "model": "m:make"} | CORES | arguments)


@pytest.mark.parametrize("tree", ["{host: a, uplink: 1 Gbit/s}", "{host: 'a[0-1]', uplink: unlimited}"])
def test_a_network_of_which_nothing_can_be_predicted_is_refused(tree, tmp_path):
    path = tmp_path / "net.yaml"
    path.write_text(f"{{switch: s, children: [{tree}]}}")
    with pytest.raises(ConfigurationError, match="nothing can be predicted"):
        advise(topology=str(path), model="m:make", **CORES)
