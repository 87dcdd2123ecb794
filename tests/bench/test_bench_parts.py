"""The parts of ``syncline bench`` that need no ranks: orders, tasks, groups, table and record."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from syncline.bench.ranks.training import build_model
from syncline.bench.record import collect_facts, has_matplotlib, write_record
from syncline.bench.rows import COMPUTE_ALONE, Row, bench_table, group_rows, load_rows, save_rows
from syncline.bench.running import in_order, interleaved
from syncline.bench.task import TRAINING_PEERS, ModelShape, Pace, Tally, Task, choose_peers
from syncline.cli import bench
from syncline.cli.bench import stolen_share
from syncline.errors import ConfigurationError, LaunchError
from syncline.topology import Topology


def row(method, *seconds, order="topology", **fields):
    values = {"subject": "training step", "size_bytes": 1 << 20, "bound_s": 0.5, **fields}
    return Row(order=order, method=method, times_s=seconds, **values)


ROWS = [
    row(COMPUTE_ALONE, 0.25),
    row("Syncline Sharded", 1.0, 0.5, 3.0, link_bytes={"rack-a up": 7 << 20, "h0 up": 8 << 20}),
    row("DDP", 2.0, 3.0, 4.0),
    row("DDP", 9.0, order="interleaved"),
]


def test_ranks_are_dealt_from_the_racks_in_turns():
    assert interleaved(Topology.load("two-racks-5-3").root) == [0, 5, 1, 6, 2, 7, 3, 4]
    assert interleaved(Topology.flat(3).root) == [0, 1, 2]


@pytest.mark.parametrize(
    "name", ["two-racks-5-3", "three-racks-uneven-uplinks", "flat-8", "deep-asymmetric", "two-sites", "demo-1-3"]
)
def test_an_order_reaches_the_ranks_in_a_file(name):
    topology = in_order(Topology.load(name), "interleaved")
    assert Topology.parse(topology.to_yaml()).digest == topology.digest
    assert in_order(topology, "topology") is topology


def test_a_task_survives_its_file(tmp_path):
    task = Task(experiment="collectives", sizes_bytes=(4, 8), peers=("gloo",), planners=("ring",))
    task.save(tmp_path / "task.json")
    assert Task.load(tmp_path / "task.json") == task


def test_the_model_has_the_parameters_of_the_published_figures():
    model = build_model(ModelShape())
    assert sum(one.numel() for one in model.parameters()) == 8 * (256 * 1024 + 1024 + 1024 * 256 + 256) == 4_204_544


def test_peers_are_all_or_named_or_none():
    assert choose_peers("training", ()) == TRAINING_PEERS
    assert choose_peers("training", ("fsdp2", "ddp", "fsdp2")) == ("fsdp2", "ddp")
    assert choose_peers("collectives", ("none",)) == ()
    with pytest.raises(ConfigurationError, match="must be of gloo for collectives, or none alone, got ddp"):
        choose_peers("collectives", ("ddp",))


def test_a_task_that_measures_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="at least"):
        Task(experiment="collectives", sizes_bytes=(3,))


def run_at(pace, elapsed_s):
    tally, num_rounds = Tally(pace), 0
    while tally.wants_more:
        tally.add(elapsed_s / 2, elapsed_s=elapsed_s)
        num_rounds += 1
    return num_rounds - len(tally.seconds), tally.seconds


def test_a_fast_method_gets_all_rounds_and_a_slow_one_three():
    pace = Pace(num_rounds=5, num_warm_ups=2)
    assert run_at(pace, 1.0) == (2, [0.5] * 5)
    assert run_at(pace, 12.0) == (2, [6.0] * 3)
    assert run_at(pace, 16.0) == (1, [8.0] * 3)
    assert run_at(Pace(num_rounds=2, num_warm_ups=0), 1000.0) == (0, [500.0] * 2)


def test_rows_of_one_order_are_compared_with_the_first_of_ours(tmp_path):
    save_rows(tmp_path / "rows.json", ROWS)
    assert load_rows(tmp_path / "rows.json") == ROWS
    near, far = group_rows(ROWS)
    assert [each.method for each in near.rows] == [COMPUTE_ALONE, "Syncline Sharded", "DDP"]
    assert near.reference.method == "Syncline Sharded"
    assert [near.ratio(each) for each in near.rows] == [None, 1.0, 3.0]
    assert [each.times_bound for each in near.rows] == [None, 2.0, 6.0]
    assert near.title == "training step, 1 MiB, ranks in topology order"
    assert far.title == "training step, 1 MiB, ranks in interleaved order"
    assert "16 MB" in group_rows([row("DDP", 1.0, size_bytes=16_000_000)])[0].title


def test_the_table_leaves_out_columns_that_say_nothing():
    table = bench_table(group_rows(ROWS)[0])
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["median"] == ["0.250", "1.000", "3.000"]
    assert cells["x Syncline"] == ["-", "1.00", "3.00"]
    assert cells["busiest link"] == ["-", "rack-a up 7 MiB", "-"]
    assert "predicted" not in cells


def test_what_other_machines_took_is_counted(monkeypatch):
    times = SimpleNamespace()
    monkeypatch.setattr("psutil.cpu_times_percent", lambda: times)
    assert stolen_share() == 0.0
    times.steal = 50.0
    assert stolen_share() == pytest.approx(0.5)


def test_a_record_says_what_was_run_and_draws_it(tmp_path):
    facts = collect_facts(["syncline", "bench", "training", "flat-8"], [Topology.load("flat-8")], network="in the lab")
    left_out = write_record(tmp_path / "new", ROWS, facts, "the table")
    found = json.loads((tmp_path / "new" / "results.json").read_text())
    assert found["facts"]["command"] == "syncline bench training flat-8"
    assert {"processor", "kernel", "torch", "load_average"} <= found["facts"].keys()
    assert found["rows"][1]["median_s"] == 1.0
    assert "the table" in (tmp_path / "new" / "table.txt").read_text()
    if has_matplotlib():
        assert left_out == ()
        assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("status", [130, 1])
def test_rows_that_came_before_a_run_broke_are_recorded(status, tmp_path, monkeypatch):
    def launch(command, _topology):
        save_rows(Path(command[-1]), ROWS[1:3])
        return 0 if orders.pop() == "topology" else status

    monkeypatch.setattr(bench, "_launch", launch)
    orders = ["interleaved", "topology"]
    task = Task(experiment="training")
    what = "was interrupted" if status == 130 else "ended with status 1"
    with pytest.raises(LaunchError, match=rf"in interleaved order {what}.* what was measured before is recorded"):
        bench.measure(task, [Topology.load("flat-8")], bench.Settings(loopback=True, record=tmp_path))
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [each["method"] for each in rows] == ["Syncline Sharded", "DDP"] * 2


def test_without_matplotlib_the_record_has_no_picture_and_the_user_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("syncline.bench.record.has_matplotlib", lambda: False)
    (note,) = write_record(tmp_path, ROWS, {}, "")
    assert "pip install 'syncline[report]'" in note
    assert not (tmp_path / "plot.png").exists()
