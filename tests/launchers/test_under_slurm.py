"""A real slurmctld, and a slurmd for each of two nodes: ``srun`` starts jobs, and nobody tells the ranks anything."""

import json
import os
import re
from pathlib import Path

import pytest
from launched_jobs import RANK_SCRIPT, check_one_job, run_together, what_ranks_said
from slurm_cluster import slurm_cluster

from rank_scripts import forked_python, reserved_port

EXAMPLES = Path(__file__).parents[2] / "examples"
NODES = ("alpha", "beta")
OTHER_ORDER = """
topology: two-nodes
switch: core
children:
  - {host: beta, uplink: 1 Gbit/s, ranks: 2}
  - {host: alpha, uplink: 1 Gbit/s, ranks: 2}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, slurm_is_here):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), NODES) as cluster:
        yield cluster


def srun(folder, *options):
    folder.mkdir()
    return ["srun", "--export=ALL", *options, forked_python(), str(RANK_SCRIPT), str(folder)]


def test_tasks_are_the_ranks_of_one_job(cluster, tmp_path):
    folder = tmp_path / "job"
    run_together([srun(folder, "-n", "4")], [cluster.variables])
    check_one_job(what_ranks_said(folder), 4)


def test_a_newcomer_of_the_same_user_comes_in_though_nobody_was_given_a_secret(cluster, tmp_path):
    """It knows the ports of both ranks, which take them in whatever order; all make an epoch together."""
    os.mkfifo(tmp_path / "asked")
    script = str(Path(__file__).with_name("joining_rank.py"))
    train = [forked_python(), script, str(tmp_path), "all-reduce", "3"]
    with reserved_port() as port:
        members = {"SYNCLINE_ELASTIC": "on", "SYNCLINE_JOIN_PORT": str(port)}
        newcomer = {"SYNCLINE_ELASTIC": "on", "SYNCLINE_JOIN": ",".join(f"127.0.0.1:{port + one}" for one in range(4))}
        run_together(
            [["srun", "--export=ALL", "-n", number, *train] for number in ("2", "1")],
            [cluster.variables | members, cluster.variables | newcomer],
        )
    ended = [json.loads((tmp_path / f"end-{number}.json").read_text()) for number in range(3)]
    assert ended[0]["members"] == [0, 1, 2]
    assert ended[1:] == ended[:1] * 2


def test_the_batch_script_of_the_examples_trains_on_two_nodes(cluster, tmp_path):
    found = {"PATH": f"{Path(forked_python()).parent}:{os.environ['PATH']}"}
    options = ["--wait", "--no-requeue", "--chdir", str(EXAMPLES.parent), "--output", str(tmp_path / "log")]
    script = [str(EXAMPLES / "slurm" / "nanogpt.sh"), str(tmp_path / "run1"), "--steps", "2"]
    run_together([["sbatch", *options, *script]], [cluster.variables | found])
    begun, ended = (tmp_path / "log").read_text().splitlines()
    assert begun == "begins after step 0 of 2"
    assert re.fullmatch(r"step 2: loss \d\.\d+, [\d,]+ tokens/s", ended)
    assert {path.name for path in (tmp_path / "run1").iterdir()} == {"iteration-0000000002"}


def test_two_jobs_at_once_do_not_meet(cluster, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    run_together([srun(folder, "-N", "1", "-n", "2") for folder in folders], [cluster.variables] * 2)
    for folder in folders:
        check_one_job(what_ranks_said(folder), 2)


def test_ranks_are_found_in_the_topology_by_the_names_of_their_nodes(cluster, tmp_path):
    topology, folder = tmp_path / "two-nodes.yaml", tmp_path / "job"
    topology.write_text(OTHER_ORDER)
    run_together(
        [srun(folder, "-N", "2", "-n", "4", "--ntasks-per-node", "2")],
        [cluster.variables | {"SYNCLINE_TOPOLOGY": str(topology)}],
    )
    said = what_ranks_said(folder)
    check_one_job(said, 4)
    assert [rank["node"] for rank in said] == ["alpha", "alpha", "beta", "beta"]
    assert [rank["host"] for rank in said] == ["alpha", "alpha", "beta", "beta"]
