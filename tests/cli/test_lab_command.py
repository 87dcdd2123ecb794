"""``syncline lab``: how commands reach the lab's functions, and what its table shows. The lab itself is not built."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from syncline.cli import lab
from syncline.lab import operations
from syncline.lab.operations import LabStatus, LinkStatus
from syncline.topology import DirectedLink, Topology


@pytest.fixture
def called(monkeypatch):
    """What the lab's functions were called with."""
    calls = []
    monkeypatch.delenv("SYNCLINE_SECRET", raising=False)
    monkeypatch.delenv("SYNCLINE_SECRET_FILE", raising=False)

    def run(topology, argv, *, priorities, env, report, **others):
        secret = Path(env["SYNCLINE_SECRET_FILE"]) if env else None
        assert others == {"queues": "default", "congestion": None, "packet_filters": False}
        calls.append((topology, argv, priorities, secret and (secret.stat().st_mode & 0o777, len(secret.read_text()))))
        return 3

    def execute(host, argv, *, lab_id):
        calls.append((host, argv, lab_id))
        return 4

    monkeypatch.setattr(operations, "run", run)
    monkeypatch.setattr(operations, "execute", execute)
    return calls


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_a_command_keeps_its_own_options_and_all_hosts_share_a_fresh_secret(called, dashes):
    args = ["run", "--priorities", "flat-8", *dashes, "syncline", "run", "train.py", "--priorities", "--", "x"]
    result = CliRunner().invoke(lab.app, args)
    assert called == [("flat-8", ["syncline", "run", "train.py", "--priorities", "--", "x"], True, (0o600, 64))]
    assert result.exit_code == 3


def test_a_secret_that_the_user_gave_stands(called, monkeypatch):
    monkeypatch.setitem(os.environ, "SYNCLINE_SECRET_FILE", "/mine")
    CliRunner().invoke(lab.app, ["run", "flat-8", "true"])
    assert called == [("flat-8", ["true"], False, None)]


def test_options_reach_the_lab(monkeypatch):
    calls = []
    monkeypatch.setattr(operations, "up", lambda topology, **settings: calls.append((topology, settings)))
    CliRunner().invoke(lab.app, ["up", "flat-8", "--queues", "short", "--congestion", "reno", "--packet-filters"])
    settings = {"priorities": False, "queues": "short", "congestion": "reno", "packet_filters": True}
    assert calls == [("flat-8", settings)]


def test_exec_runs_on_one_host(called):
    assert CliRunner().invoke(lab.app, ["exec", "--lab", "abc", "h1", "--", "ls", "-l"]).exit_code == 4
    assert called == [("h1", ["ls", "-l"], "abc")]


def test_clean_says_what_it_removed(monkeypatch):
    monkeypatch.setattr(operations, "clean", lambda: ("abc", "def"))
    assert "removed abc, def" in CliRunner().invoke(lab.app, ["clean"]).output
    monkeypatch.setattr(operations, "clean", lambda: ())
    assert "nothing was left behind" in CliRunner().invoke(lab.app, ["clean"]).output


def test_no_lab_is_said_with_the_next_step(monkeypatch):
    monkeypatch.setattr(operations, "status", lambda **_: ())
    assert "syncline lab up TOPOLOGY" in CliRunner().invoke(lab.app, ["status"]).output


def test_the_table_has_a_row_for_each_link_with_both_directions():
    status = LabStatus(
        lab_id="abc",
        topology=Topology.flat(1, rate=125e6),
        owner_pid=7,
        is_abandoned=False,
        has_priorities=True,
        addresses={"h0": "10.0.0.1"},
        links=tuple(
            LinkStatus(link=DirectedLink("h0", way), limit_bytes_per_s=125e6, bytes_per_s=rate, num_bytes=num_bytes)
            for way, rate, num_bytes in (("up", 62.5e6, 1 << 20), ("down", 0.0, 3 << 20))
        ),
    )
    table = lab.status_table(status)
    assert table.title == "lab abc: flat-1 (owner 7, priorities)"
    row = [next(iter(column.cells)) for column in table.columns]
    assert row == ["h0", "10.0.0.1", "1 Gbit/s", "500 Mbit/s", "0 bit/s", "1 MiB", "3 MiB"]


def test_the_table_fits_in_80_columns():
    topology = Topology.load("deep-asymmetric")
    links = tuple(
        LinkStatus(
            link=DirectedLink(name, way),
            limit_bytes_per_s=link.bytes_per_s(way),
            bytes_per_s=link.bytes_per_s(way) * 0.9567,
            num_bytes=123_456_789,
        )
        for name, link in topology.links()
        for way in ("up", "down")
        if not name.startswith("rank")
    )
    status = LabStatus(
        lab_id="abc",
        topology=topology,
        owner_pid=None,
        is_abandoned=False,
        has_priorities=False,
        addresses={host.name: "10.99.0.10" for host in topology.hosts},
        links=links,
    )
    written = io.StringIO()
    Console(file=written, width=80).print(lab.status_table(status))
    assert "…" not in written.getvalue()
    rows = [line.split() for line in written.getvalue().splitlines()[4:-1]]
    assert len(rows) == len(links) // 2 + 1, "a line for each link, and one more where the directions differ"
    assert rows[0] == ["h0", "10.99.0.10", "500", "Mbit/s", *["478.4", "Mbit/s"] * 2, *["117.7", "MiB"] * 2]
