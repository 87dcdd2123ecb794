"""A job as users start it, on loopback: a whole cluster is killed, then the server of another one."""

import json
import subprocess
import sys
from pathlib import Path

from clustered_deaths import WHOLE_CLUSTER

from rank_scripts import script_environment

CLUSTERS = [[0, 1], [2, 3], [4, 5]]
SCRIPT = Path(__file__).parent / "clustered_deaths.py"


def test_a_whole_cluster_and_then_a_server_die_and_the_others_go_on(tmp_path: Path) -> None:
    network = tmp_path / "net.yaml"
    hosts = [
        f"  - {{host: h{rank}, uplink: 1 Gbit/s, features: {{kind: {kind}}}}}\n"
        for kind, ranks in zip("abc", CLUSTERS, strict=True)
        for rank in ranks
    ]
    network.write_text("switch: core\nchildren:\n" + "".join(hosts))
    command = [sys.executable, "-m", "syncline.cli.main", "run", "--keep-going", "--topology", str(network), SCRIPT]
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    assert len(found) == 3, done.stdout + done.stderr
    first = found[0]
    (victim,) = {0, 1} - {one["rank"] for one in found}
    assert first["clusters"] == CLUSTERS
    assert {one["rank"] for one in found} == {1 - victim, 4, 5}
    assert sorted(first["dead"]) == sorted({*WHOLE_CLUSTER, victim})
    assert [one["servers"][:2] for one in found] == [[1 - victim, None]] * 3
    assert [one["num_replaced"] for one in found if one["rank"] == 1 - victim] == [1]
    assert first["weights"] == [1 / 3, 0.0, 2 / 3]
    assert len({one["digest"] for one in found}) == 1, "parameters are averaged at the end of a term"
    longest_s = max(one["longest_gap_s"] for one in found)
    assert longest_s < 5.0, f"{longest_s:.1f} s without a step"
