"""`syncline topology`: draws, and finds what was measured last."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from syncline.cli.topology import app
from syncline.discovery.kept import keep
from syncline.errors import ConfigurationError
from syncline.topology import Topology


def shown(*args: str, **variables: str) -> str:
    result = CliRunner().invoke(app, list(args), env=variables, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_topology_is_drawn_or_written() -> None:
    racks = Topology.load("two-racks-5-3")
    assert shown("show", "two-racks-5-3") == racks.render() + "\n"
    assert Topology.parse(shown("show", "two-racks-5-3", "--yaml")) == racks


def test_without_a_name_it_is_what_was_measured_last(tmp_path: Path) -> None:
    folder = tmp_path / "syncline" / "networks"
    folder.mkdir(parents=True)
    for age, name in enumerate(["flat-8", "two-racks-5-3", "two-sites"]):
        file = folder / f"{name}.yaml"
        file.write_text(Topology.load(name).to_yaml())
        os.utime(file, (100 - age, 100 - age))
    assert shown("show", XDG_CACHE_HOME=str(tmp_path)) == Topology.load("flat-8").render() + "\n"


def test_where_nothing_was_measured_it_says_how() -> None:
    with pytest.raises(ConfigurationError, match=r"no network was measured .*; name a topology, or measure"):
        CliRunner().invoke(app, ["show"], env={"XDG_CACHE_HOME": "/nowhere"}, catch_exceptions=False)
    with pytest.raises(ConfigurationError, match="below HOME, which is not set"):
        CliRunner().invoke(app, ["show"], env={"XDG_CACHE_HOME": None, "HOME": None}, catch_exceptions=False)


def test_a_job_of_one_host_has_nothing_to_measure(tmp_path: Path) -> None:
    target = tmp_path / "net.yaml"
    done = CliRunner().invoke(app, ["measure", "--output", str(target)], catch_exceptions=False)
    assert Topology.parse(target.read_text()).num_ranks == 1
    assert "1 rank" in done.stdout
    assert "nothing was measured" in done.stderr


RACK = "{switch: core, children: [{switch: rack, uplink: 400 Mbit/s, children: [{host: 'h[5-7]', uplink: 1 Gbit/s}]}, "
RACK += "{host: 'h[0-4]', uplink: 1 Gbit/s}]}"


def test_a_file_is_checked_beside_what_was_measured(tmp_path: Path) -> None:
    """The file of two racks says 200 Mbit/s of an uplink that was measured as 400."""
    measured = Topology.parse(RACK)
    keep(tmp_path / "syncline" / "networks", measured)
    (tmp_path / "net.yaml").write_text(Topology.load("two-racks-5-3").to_yaml())
    run = CliRunner().invoke(app, ["check", str(tmp_path / "net.yaml")], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert run.exit_code == 1
    lines = run.stdout.splitlines()
    assert [line for line in lines if "more" in line or "less" in line] == [
        "rack-a up, rack-b down    200 Mbit/s    400 Mbit/s  100% more",
        "rack-a down, rack-b up    200 Mbit/s    400 Mbit/s  100% more",
    ]
    assert shown("check", "two-racks-5-3", "--measured", "two-racks-5-3").count("\n") == len(lines)


def test_of_two_sides_of_a_root_either_link_may_be_what_differs(tmp_path: Path) -> None:
    """One measures what rack-b sends, not which of two links it is that lets less pass."""
    racks = Topology.load("two-racks-5-3").to_yaml()
    rate, slow = "rack-b\n  uplink: 200 Mbit/s", "rack-b\n  uplink: {up: 50 Mbit/s, down: 200 Mbit/s}"
    slower = racks.replace(rate, slow)
    assert slower != racks
    (tmp_path / "net.yaml").write_text(slower)
    args = ["check", "two-racks-5-3", "--measured", str(tmp_path / "net.yaml")]
    lines = CliRunner().invoke(app, args).stdout.splitlines()
    assert [line for line in lines if "less" in line] == [
        "rack-a down, rack-b up    200 Mbit/s     50 Mbit/s  75% less"
    ]
    assert any(line.startswith("h7 up ") for line in lines)


@pytest.mark.parametrize("forms", [("--yaml", "--svg"), ("--mermaid", "--svg")])
def test_a_topology_is_shown_in_one_form(forms: tuple[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="--yaml, --mermaid and --svg exclude each other"):
        shown("show", "flat-8", *forms)


def test_what_was_not_measured_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no network of the hosts of 'flat-8' was measured .*--measured"):
        CliRunner().invoke(app, ["check", "flat-8"], env={"XDG_CACHE_HOME": str(tmp_path)}, catch_exceptions=False)


def test_a_tree_is_imported_with_rates_that_are_given_or_measured(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=a Nodes=h[0-4]\nSwitchName=b Nodes=h[5-7]\nSwitchName=c Switches=a,b\n")
    given = Topology.parse(shown("import", str(file), "--from", "slurm", "--rates", "1 Gbit/s, 10 Gbit/s"))
    assert {name: link.up_bytes_per_s * 8 for name, link in given.links() if name in ("h0", "b")} == {
        "h0": 1e9,
        "b": 1e10,
    }
    keep(tmp_path / "syncline" / "networks", Topology.parse(RACK))
    measured = Topology.parse(shown("import", str(file), "--from", "slurm", XDG_CACHE_HOME=str(tmp_path)))
    rates = {name: link.up_bytes_per_s * 8 for name, link in measured.links()}
    assert (rates["h0"], rates["a"], rates["b"]) == (1e9, 4e8, 4e8)


def test_the_picture_is_a_flowchart() -> None:
    picture = shown("show", "demo-1-3", "--mermaid")
    assert picture.startswith("flowchart TD\n")
    assert picture.count(" ---|") == picture.count('["') - 1


def test_the_picture_for_browsers_has_all_nodes_and_broad_links_where_much_passes() -> None:
    picture = ElementTree.fromstring(shown("show", "two-racks-5-3", "--svg"))
    space = "{http://www.w3.org/2000/svg}"
    told = [text.text for text in picture.iter(f"{space}text")]
    assert {"core", "rack-a", "rack-b", *(f"h{rank}" for rank in range(8))} <= set(told)
    assert told.count("200 Mbit/s") == 2
    assert "1 Gbit/s  rank 7" in told
    widths = sorted(float(way.attrib["stroke-width"]) for way in picture.iter(f"{space}path"))
    assert widths[:2] == [1.5, 1.5]
    assert widths[2:] == [3.8] * 8
    assert len(list(picture.iter(f"{space}rect"))) == 11
