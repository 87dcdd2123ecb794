import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline.cli.cluster import app
from syncline.errors import ConfigurationError

runner = CliRunner()


def test_table_clusters_silhouettes_and_why() -> None:
    result = runner.invoke(app, ["two-sites"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in (
        "site",
        "uplink_bytes_per_s",
        "1 Gbit/s",
        "mean 10 ms",
        "to h0 h1 h2 ...",
        "+0.50",
        "silhouette",
        "k = 2 has the highest silhouette (1.000)",
    ):
        assert text in result.output
    assert "cluster 0: hosts h0, h1, h2, h3 (ranks 0, 1, 2, 3)" in result.output


def test_features_of_the_file_count_where_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(
        "switch: core\nchildren:\n"
        + "".join(
            f"  - {{host: h{k}, uplink: 1 Gbit/s, features: {{gpu: {'old' if k % 2 else 'new'}}}}}\n" for k in range(6)
        )
    )
    alike = json.loads(runner.invoke(app, [str(path), "--json"]).output)
    assert (len(alike["clusters"]), alike["reason"]) == (1, "k = 1, since all hosts are alike")
    by_gpu = [str(path), "--json", "--feature", "gpu"]
    record = json.loads(runner.invoke(app, by_gpu).output)
    assert record["ranks"] == [[0, 2, 4], [1, 3, 5]]
    asked = json.loads(runner.invoke(app, [*by_gpu, "--clusters", "3"]).output)
    assert len(asked["clusters"]) == 3


def test_a_narrow_terminal_shows_whole_names(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    written = "cpu_hz: 3 GHz, memory_bytes: 8 GiB, disk_bytes_per_s: 1 GB/s, gpu: none, gpu_memory_bytes: 0 B"
    path.write_text(f"switch: core\nchildren:\n  - {{host: 'h[0-2]', uplink: 1 Gbit/s, features: {{{written}}}}}\n")
    named = [word for pair in written.split(", ") for word in ("--feature", pair.split(":")[0])]
    output = runner.invoke(app, [str(path), *named], env={"COLUMNS": "80"}).output
    assert "┃ cluster ┃" in output
    assert "…" not in output


def test_this_machine() -> None:
    result = runner.invoke(app, ["--here"])
    assert result.output.startswith("features: {cpu_hz:") or "memory_bytes:" in result.output
    told = json.loads(runner.invoke(app, ["--here", "--json"]).output)
    assert all(value > 0 for value in told["features"].values())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["two-sites", "--here"],
        ["two-sites", "--feature", "moon"],
    ],
)
def test_a_wrong_call_is_explained(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert isinstance(result.exception, ConfigurationError)


def test_answers_without_torch() -> None:
    probe = "import sys, syncline.cli.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
