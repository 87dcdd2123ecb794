"""``syncline lab``: how commands reach the lab's functions, and what its table shows. The lab itself is not built."""

import io
import ipaddress
import os
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from syncline.cli import lab
from syncline.errors import ConfigurationError
from syncline.lab import operations
from syncline.lab.operations import LabStatus
from syncline.lab.plan import plan_lab
from syncline.lab.records import LabRecord
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


@pytest.mark.parametrize(
    ("args", "place"),
    [(["run", "flat-8", "--queues", "short", "--", "true"], "TOPOLOGY"), (["exec", "h1", "--lab", "a", "ls"], "HOST")],
)
def test_an_option_behind_the_topology_is_not_taken_for_the_command(called, args, place):
    with pytest.raises(
        ConfigurationError, match=f"^'{args[2]}' stands where COMMAND begins; options go before {place}"
    ):
        CliRunner().invoke(lab.app, args, catch_exceptions=False)
    assert not called


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


def status_of(topology, carried, rates, *, owner=None, has_priorities=False):
    """A lab whose links carry so much in each direction."""
    network = ipaddress.IPv4Network("10.99.0.0/16")
    record = LabRecord(
        lab_id="abc",
        folder=Path("/nowhere"),
        network=network,
        owner=owner,
        has_priorities=has_priorities,
        congestion=None,
    )
    plan = plan_lab(topology, lab_id="abc", network=network)
    return LabStatus(record=record, plan=plan, num_bytes=carried, bytes_per_s=rates)


def test_the_table_has_a_row_for_each_link_with_both_directions():
    up, down = DirectedLink("h0", "up"), DirectedLink("h0", "down")
    owner = (os.getpid(), psutil.Process().create_time())
    carried, rates = {up: 1 << 20, down: 3 << 20}, {up: 62.5e6, down: 0.0}
    status = status_of(Topology.flat(1, rate=125e6), carried, rates, owner=owner, has_priorities=True)
    table = lab.status_table(status)
    assert table.title == f"lab abc: flat-1 (owner {os.getpid()}, priorities)"
    row = [next(iter(column.cells)) for column in table.columns]
    assert row == ["h0", status.plan.host("h0").address, "1 Gbit/s", "500 Mbit/s", "0 bit/s", "1 MiB", "3 MiB"]


def test_a_lab_that_is_broken_or_whose_owner_is_dead_has_a_title_alone():
    table = lab.status_table(status_of(Topology.load("flat-8"), {}, {}, owner=(os.getpid(), 1.0)))
    assert table.title == "lab abc: flat-8 (abandoned: syncline lab clean)"
    assert not table.rows


def test_the_table_fits_in_80_columns():
    topology = Topology.load("deep-asymmetric")
    links = {
        DirectedLink(name, way): link.bytes_per_s(way) * 0.9567
        for name, link in topology.links()
        for way in ("up", "down")
        if not name.startswith("rank")
    }
    status = status_of(topology, dict.fromkeys(links, 123_456_789), links)
    written = io.StringIO()
    Console(file=written, width=80).print(lab.status_table(status))
    assert "…" not in written.getvalue()
    rows = [line.split() for line in written.getvalue().splitlines()[4:-1]]
    assert len(rows) == len(links) // 2 + 1, "a line for each link, and one more where the directions differ"
    named = {row[0]: row for row in rows}
    address = status.plan.host("h0").address
    assert named["h0"] == ["h0", address, "500", "Mbit/s", *["478.4", "Mbit/s"] * 2, *["117.7", "MiB"] * 2]
