"""A real slurmctld, and a slurmd for each of two nodes: ``srun`` starts jobs, and nobody tells the ranks anything."""

import pytest
from launched_jobs import RANK_SCRIPT, check_one_job, run_together, what_ranks_said
from slurm_cluster import slurm_cluster

from rank_scripts import forked_python

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
