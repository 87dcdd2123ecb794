"""``syncline bench convergence``: losses of a tiny model in one process, predicted steps, their product, its record."""

import dataclasses
import json
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from syncline.bench.convergence import (
    METHODS,
    NETWORKS,
    REFERENCE,
    ConvergenceRow,
    Learning,
    Method,
    Training,
    add_training,
    best_of_groups,
    choose_methods,
    convergence_tables,
    find_network,
    load_trainings,
)
from syncline.bench.ranks import learning, tasks
from syncline.bench.ranks.local_servers import Server, learn_with_servers
from syncline.cli import bench
from syncline.cli.convergence import MOST_STALE, Plan, StepPredictor, Trainings
from syncline.errors import ConfigurationError, LaunchError
from syncline.topology import Topology

NAMES = {method.name: method for method in METHODS}
THREE_HOSTS = "topology: three\nswitch: core\nchildren:\n  - {host: 'h[0-2]', uplink: 1 Mbit/s}\n"


def tiny_task(rank, num_ranks, seed):
    """Learn the sum of what is seen; each rank sees numbers of its own."""
    torch.manual_seed(seed)

    def draw(step):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * seed + rank))
        return inputs, inputs.sum(1, keepdim=True)

    return tasks.LearningTask(
        model=nn.Linear(8, 1),
        make_optimizer=partial(torch.optim.SGD, lr=0.05),
        draw=draw,
        loss=lambda model, inputs, targets: nn.functional.mse_loss(model(inputs), targets),
        held_out=draw(0),
    )


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(learning, "TASKS", {"gpt": tiny_task})


@pytest.fixture
def three(tmp_path):
    (tmp_path / "three.yaml").write_text(THREE_HOSTS)
    return str(tmp_path / "three.yaml")


def learn(name, network, **options):
    settings = {"num_steps": 8, "every": 2, "target": None, **options}
    return learning.learn("gpt", NAMES[name], network.topology, 0, **settings)


def test_all_ranks_together_learn_what_one_process_does(tiny, three):
    network, told = find_network(three), {}
    for name in (REFERENCE, "averages, period 8"):
        told[name] = learn(name, network)
    task = tiny_task(0, 3, 0)
    optimizer = task.make_optimizer(task.model.parameters())
    draws = [tiny_task(rank, 3, 0).draw for rank in range(3)]
    for step in range(1, 9):
        parts = [draw(step) for draw in draws]
        task.loss(task.model, *(torch.cat(each) for each in zip(*parts, strict=True))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [step for step, _ in told[REFERENCE].curve] == [2, 4, 6, 8]
    assert told[REFERENCE].curve[-1][1] == pytest.approx(task.loss(task.model, *task.held_out).item(), rel=1e-5)
    assert told["averages, period 8"].curve != told[REFERENCE].curve
    assert sum(told["averages, period 8"].link_bytes.values()) < sum(told[REFERENCE].link_bytes.values()) / 2


def test_a_training_ends_at_its_target_on_all_ranks(tiny, three):
    network = find_network(three)
    target = learn(REFERENCE, network).curve[1][1]
    assert learn("LocalSteps", network, num_steps=100, target=target).curve[-1][0] < 100
    assert len(learn(REFERENCE, network, target=target).curve) == 2


@pytest.mark.parametrize("name", [method.name for method in METHODS if not method.steps_of])
def test_every_method_trains(tiny, three, name):
    assert [step for step, _ in learn(name, find_network(three), num_steps=2).curve] == [2]


def told_by_servers(topology, **arguments):
    told = {"local_steps": 2, "rounds": 1, "rates": (1.0, 1.0), "momenta": (0.0, 0.0), "away": {}, **arguments}
    tasks = [tiny_task(rank, topology.num_ranks, 0) for rank in range(topology.num_ranks)]
    method = Method(name="servers", rule="HALoS", arguments=told, timing="apart")
    return learn_with_servers(tasks, method, topology, num_steps=16, every=2, target=None)


def test_servers_of_one_worker_learn_what_it_learns_alone():
    task, losses = tiny_task(0, 1, 0), []
    optimizer = task.make_optimizer(task.model.parameters())
    for step in range(1, 17):
        task.loss(task.model, *task.draw(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(task.loss(task.model, *task.held_out).item())
    told = told_by_servers(Topology.flat(1, rate=1e9))
    assert [step for step, _ in told.curve] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [loss for _, loss in told.curve] == pytest.approx(losses[1::2], rel=1e-4)


def test_a_server_adds_its_momentum_after_several_differences():
    server, places = Server(torch.zeros(1), rate=0.5, momentum=0.5, every=2), []
    for _ in range(4):
        server.add(torch.ones(1))
        places.append(server.parameters.item())
    assert places == [0.5, 1.5, 2.0, 3.25]


def test_sites_go_on_while_what_they_send_is_on_its_way():
    """A site sends no more before its answer is there, and a slow one less often."""
    pair = Topology.flat(2, rate=1e9)
    near = told_by_servers(pair).link_bytes
    assert near["h1 up"] == near["h1 down"] == near["h0 down"] == 9 * 4 // 2, "nine float32 in two steps"
    far = told_by_servers(pair, away={"h1": 3.0}).link_bytes
    assert far["h1 up"] == pytest.approx(near["h1 up"] / 4, rel=0.3)
    slow = told_by_servers(pair, pace={"h0": 1.0, "h1": 0.5}).link_bytes
    assert slow["h1 up"] == near["h1 up"] // 2


def test_an_error_on_one_rank_ends_all(three, monkeypatch):
    def task(rank, num_ranks, seed):
        made = tiny_task(rank, num_ranks, seed)
        return made if rank else dataclasses.replace(made, make_optimizer=None)

    monkeypatch.setattr(learning, "TASKS", {"gpt": task})
    with pytest.raises(TypeError, match="not callable"):
        learn(REFERENCE, find_network(three))


def test_the_command_records_what_it_made_and_does_not_make_it_again(tiny, three, tmp_path, monkeypatch):
    arguments = ["convergence", three, "--task", "gpt", "--method", "Sharded", "--method", "LocalSteps"]
    arguments += ["--seeds", "2", "--steps", "4", "--record", str(tmp_path / "record")]
    result = CliRunner().invoke(bench.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "gpt on" in result.output
    lines = (tmp_path / "record" / "trainings.jsonl").read_text().splitlines()
    assert len(lines) == 4, "Sharded makes the steps of DDP"
    written = json.loads((tmp_path / "record" / "results.json").read_text())
    assert [row["method"] for row in written["rows"]] == [REFERENCE, "Sharded", "LocalSteps"]
    assert all(len(row["steps"]) == 2 for row in written["rows"])
    assert "load_average" in written["facts"]

    monkeypatch.setattr(learning, "learn", None)
    again = CliRunner().invoke(bench.app, arguments, catch_exceptions=False)
    assert again.exit_code == 0, again.output


def test_an_interrupt_keeps_the_trainings_before(tiny, three, tmp_path, monkeypatch):
    learn_one, made = learning.learn, []

    def interrupted(task, method, *arguments, **options):
        if made:
            raise KeyboardInterrupt
        made.append(method.name)
        return learn_one(task, method, *arguments, **options)

    monkeypatch.setattr(learning, "learn", interrupted)
    arguments = ["convergence", three, "--task", "gpt", "--steps", "4", "--record", str(tmp_path)]
    with pytest.raises(LaunchError, match=f"interrupted; give --record {tmp_path} again to go on"):
        CliRunner().invoke(bench.app, arguments, catch_exceptions=False)
    assert made == [REFERENCE]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [REFERENCE, "AllReduce", "Sharded"]


def test_trainings_survive_their_file(tmp_path):
    told = Learning(num_bytes=8, curve=((1, 2.0), (2, 1.5)), link_bytes={"h0 up": 3})
    training = Training(task="gpt", sites="0 1", method="ddp", seed=1, num_steps=2, every=1, learning=told)
    add_training(tmp_path / "lines", training)
    add_training(tmp_path / "lines", training)
    assert load_trainings(tmp_path / "lines") == [training, training]


def test_steps_to_a_loss_lie_between_judgements_in_proportion():
    told = Learning(num_bytes=8, curve=((4, 3.0), (8, 2.0), (12, 2.5)))
    assert told.steps_to(2.5) == 6
    assert told.steps_to(3.5) == 4
    assert told.steps_to(1.9) is None


def row(method, *steps, **fields):
    values = {"group": method, "step_s": 0.5, "link": "h0 up", "link_bytes": 1024, "most_steps": 100, **fields}
    return ConvergenceRow(task="gpt", network="pair", method=method, steps=steps, **values)


def test_a_mean_has_students_interval_and_none_where_a_seed_is_missing():
    assert row("ddp", 10.0, 20.0, 30.0).mean_s == 10.0
    assert row("ddp", 10.0, 20.0, 30.0).interval_s == pytest.approx(4.303 * 5 / math.sqrt(3), rel=1e-3)
    assert row("ddp", 10.0).interval_s is None
    missing = row("ddp", 10.0, None)
    assert missing.to_dict()["mean_s"] is None
    assert missing.times_s == (5.0, None)


def test_the_best_setting_is_shown_and_bounds_are_told_as_such():
    rows = [
        row("ddp", 64.0, 64.0),
        row("slow", None, 20.0, group="DiLoCo"),
        row("better", 32.0, 32.0, group="DiLoCo"),
        row("stale", 8.0, 8.0, is_stale=True),
    ]
    assert [each.method for each in best_of_groups(rows)] == ["ddp", "better", "stale"]
    (table,) = convergence_tables([*rows, row("missed", None, 20.0)])
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["method"] == ["ddp", "better", "stale", "missed"]
    assert cells["to the loss (s)"] == ["32.0", "16.0", "> 4.0", "> 50.0"]
    assert cells["x ddp"] == ["1.0", "2.0", "", ""]
    assert cells["steps"] == ["64", "32", "> 8", "1 of 2"]
    assert [each.style for each in table.rows] == ["", "green", "", ""]


def predictor(network, num_bytes=1_440_000):
    compute_s = 0.1 * network.slowdown
    return StepPredictor(topology=network.topology, num_bytes=num_bytes, compute_s=compute_s)


def test_steps_are_predicted_from_the_network():
    slow, fast, _, half = map(find_network, NETWORKS)
    told = Learning(num_bytes=0, curve=((1, 1.0),), link_bytes={"site-a up": 4_000_000, "h0 up": 1_000_000})
    steps = {name: predictor(slow).predict(method, told)[0] for name, method in NAMES.items()}
    assert steps["LocalSteps"] == pytest.approx(0.1)
    assert steps[REFERENCE] > steps["Sharded"] > steps["Sharded int8"] > steps["Sharded int4"] > steps["LocalSteps"]
    assert steps["LocalSteps, auto"] == pytest.approx(steps["LocalSteps, sites"])
    assert [predictor(network).period for network in (slow, fast, half)] == [8, 2, 4]
    assert steps["averages, period 8"] == pytest.approx(0.1 + 4 * (steps["averages, period 32"] - 0.1))
    assert steps["Overlapped"] == pytest.approx(4_000_000 * 8 / 20e6 / MOST_STALE, rel=0.1)
    assert steps["Clustered"] == pytest.approx(0.1 + 4_000_000 * 8 / 20e6 + 1_000_000 * 8 / 1e9, rel=0.1)
    assert predictor(fast).predict(NAMES["Sharded"], told)[0] < steps["Sharded"] / 2
    assert predictor(half).predict(NAMES["LocalSteps"], told)[0] == pytest.approx(0.2)
    asked_s = 2 * 1_440_000 * 8 / 1e9 * 1514 / 1448
    assert steps["HALoS 2x2 plain"] == pytest.approx(0.1 + asked_s / 2)
    assert predictor(slow).distances == {"site-a": 0.0, "site-b": pytest.approx(5.76 * 1514 / 1448)}
    assert {slow.sites, fast.sites, half.sites} == {"0,1,2,3 4,5,6,7"}


def test_one_set_of_trainings_serves_networks_with_the_same_sites(tiny, tmp_path):
    networks = tuple(map(find_network, (NETWORKS[0], NETWORKS[3])))
    options = {"tasks": ("gpt",), "networks": networks, "num_seeds": 1, "num_steps": 2, "compute_s": 0.1}
    trainings = Trainings(Plan(methods=choose_methods(["ddp"]), path=tmp_path / "lines", **options))
    trainings.run()
    assert len(load_trainings(tmp_path / "lines")) == 1
    first, second = trainings.rows()
    assert second.step_s - first.step_s == pytest.approx(0.1)


def test_an_automatic_period_is_trained_with_that_of_each_network(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(StepPredictor, "period", property(lambda self: round(20 * self.compute_s)))
    networks = tuple(map(find_network, (NETWORKS[0], NETWORKS[3])))
    options = {"tasks": ("gpt",), "networks": networks, "num_seeds": 1, "num_steps": 4, "compute_s": 0.1}
    trainings = Trainings(Plan(methods=choose_methods(["LocalSteps, auto"]), path=tmp_path / "lines", **options))
    trainings.run()
    made = [training.method for training in load_trainings(tmp_path / "lines")]
    assert made == [REFERENCE, "LocalSteps, auto, 2", "LocalSteps, auto, 4"]
    told = [(row.network, row.method, row.group) for row in trainings.rows() if row.method != REFERENCE]
    assert told == [(networks[0].name, made[1], "LocalSteps, auto"), (networks[1].name, made[2], "LocalSteps, auto")]


def test_a_site_at_half_speed_makes_half_of_the_steps_at_its_own_pace(tiny, tmp_path):
    """Its steps are judged after as many periods as the fast site's, and a step is predicted of that one."""
    networks = tuple(map(find_network, (NETWORKS[0], NETWORKS[3])))
    options = {"tasks": ("gpt",), "networks": networks, "num_seeds": 1, "num_steps": 4, "compute_s": 0.1}
    methods = choose_methods(["LocalSteps, auto", "LocalSteps, own pace"])
    trainings = Trainings(Plan(methods=methods, path=tmp_path / "lines", **options))
    trainings.run()
    rows = {(row.network, row.group): row for row in trainings.rows()}
    slow = {group: row for (network, group), row in rows.items() if network == networks[1].name}
    assert slow["LocalSteps, own pace"].method == "LocalSteps, own pace, 0.5, 1, 2"
    assert slow["LocalSteps, auto"].step_s > 1.9 * slow["LocalSteps, own pace"].step_s
    alike = {group: row for (network, group), row in rows.items() if network == networks[0].name}
    assert alike["LocalSteps, own pace"].steps == alike["LocalSteps, auto"].steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "chess"], r"--task must be of gpt, .*got chess"),
        (["--method", "Adam"], r'--method must be of ddp, AllReduce, Sharded, .*, LocalSteps, "LocalSteps, .*got Adam'),
        (["--compute", "0s"], r"--compute is what a rank computes in a step, more than 0, not '0s'"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_runs(arguments, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        CliRunner().invoke(bench.app, ["convergence", *arguments], catch_exceptions=False)


def test_a_network_of_one_rank_is_refused(tmp_path):
    (tmp_path / "net.yaml").write_text("topology: alone\nswitch: core\nchildren:\n  - {host: h0, uplink: 1 Gbit/s}\n")
    with pytest.raises(ConfigurationError, match=r"has one rank, .* give one of several ranks, with rates, or of"):
        find_network(str(tmp_path / "net.yaml"))


def test_digits_without_scikit_learn_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match="pip install scikit-learn, or say --task gpt"):
        tasks.TASKS["digits-mixed"](0, 2, 0)


@pytest.mark.parametrize("name", ["digits-by-label", "convolution"])
def test_digits_are_divided_among_the_ranks(name):
    made = [tasks.TASKS[name](rank, 4, 0) for rank in range(4)]
    labels = [set(torch.cat([task.draw(step)[1] for step in range(20)]).tolist()) for task in made]
    assert all(len(each) <= 4 for each in labels) == (name == "digits-by-label")
    inputs, targets = made[0].draw(0)
    assert torch.isfinite(made[0].loss(made[0].model, inputs, targets))
