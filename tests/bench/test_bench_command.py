"""``syncline bench`` from the command line to the record: on loopback, and in the lab (root)."""

import json
import os

import pytest
from typer.testing import CliRunner

from syncline.bench.record import has_matplotlib
from syncline.cli import bench
from syncline.errors import ConfigurationError
from syncline.lab.records import all_records

TWO_HOSTS = "topology: pair\nswitch: core\nchildren:\n  - {host: 'h[0-1]', uplink: 1 Gbit/s}\n"


def run_bench(*arguments):
    result = CliRunner().invoke(bench.app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def methods(rows):
    return [row["method"] for row in rows]


def test_training_on_loopback_runs_every_method_and_says_that_rates_are_not_emulated(tmp_path):
    topology, record = tmp_path / "pair.yaml", tmp_path / "record"
    topology.write_text(TWO_HOSTS)
    shape = ["--blocks", 1, "--width", 8, "--batch", 2]
    options = ["--loopback", "--order", "topology", "--rounds", 1, "--warm-ups", 0, "--record", record]
    output = run_bench("training", topology, *shape, *options)
    assert "not emulated" in output
    assert "Syncline Sharded" in output
    rows = json.loads((record / "results.json").read_text())["rows"]
    ours = ["compute alone", "Syncline Sharded", "Syncline Sharded, overlap_forward", "Syncline AllReduce"]
    peers = ["DDP", "DDP on syncline", "DDP + ZeroRedundancyOptimizer", "DDP + ZeRO on syncline"]
    peers += ["FSDP2", "FSDP2 on syncline", "PostLocalSGD, period 4"]
    assert methods(rows) == [*ours, *peers]
    assert all(row["median_s"] > 0 and row["times_bound"] is None and not row["link_bytes"] for row in rows)
    assert (record / "plot.png").exists() == has_matplotlib()


def test_collectives_in_the_lab_stand_beside_the_bound_and_the_bytes_of_the_links(tmp_path):
    if os.geteuid() != 0:
        pytest.fail("the lab makes network namespaces and needs root; run with sudo (it is never skipped)")
    options = ["--order", "interleaved", "--rounds", 2, "--warm-ups", 1, "--planners", "ring", "--record", tmp_path]
    options += ["--queues", "long", "--congestion", "reno"]
    run_bench("collectives", "demo-1-3", "--bytes", "256KiB", *options)
    assert not any(record.owner and record.owner[0] == os.getpid() for record in all_records()), "a lab was left"
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["facts"]["network"] == "in the lab, queues long, congestion reno"
    rows = record["rows"]
    assert methods(rows) == ["Syncline", "Syncline ring", "gloo"]
    assert {row["order"] for row in rows} == {"interleaved"}
    for row in rows:
        assert row["bound_s"] == pytest.approx(256 * 1024 * 8 / 200e6 * 1514 / 1448)
        assert len(row["times_s"]) == 2
        assert row["topology"] == "demo-1-3"
        assert row["sent_bytes"] >= 4 * 2 * 256 * 1024 * 3 / 4  # each rank sends its part and gathers it
        assert row["link_bytes"]["rack-a up"] >= 256 * 1024  # whoever reduces, the sum of each rack must leave it
    assert rows[0]["predicted_s"] > rows[0]["bound_s"]
    assert rows[2]["predicted_s"] is None


def test_what_only_the_lab_has_is_refused_on_loopback():
    with pytest.raises(ConfigurationError, match="--queues, --congestion and --packet-filters are the lab's"):
        run_bench("collectives", "flat-8", "--loopback", "--queues", "short")


def test_a_planner_that_does_not_all_reduce_is_refused_before_anything_runs():
    with pytest.raises(ConfigurationError, match=r"--planners must be of tree, .*got binomial"):
        run_bench("collectives", "flat-8", "--planners", "binomial")
