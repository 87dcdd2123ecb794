"""A job as users start it, on loopback: a whole cluster is killed, then the server of another one."""

import json
from pathlib import Path

from rank_scripts import run_python

CLUSTERS = [[0, 1], [2, 3], [4, 5]]
SCRIPT = Path(__file__).parent / "clustered_deaths.py"


def lose_a_cluster_and_a_server(folder):
    """Run the job; return what each of its three survivors printed."""
    network = folder / "net.yaml"
    hosts = [
        f"  - {{host: h{rank}, uplink: 1 Gbit/s, features: {{kind: {kind}}}}}\n"
        for kind, ranks in zip("abc", CLUSTERS, strict=True)
        for rank in ranks
    ]
    network.write_text("switch: core\nchildren:\n" + "".join(hosts))
    done = run_python("-m", "syncline", "run", "--keep-going", "--topology", network, SCRIPT)
    assert done.returncode == 0, done.stdout
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    assert len(found) == 3, done.stdout
    return found
