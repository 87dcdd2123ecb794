"""Two torchrun agents, as on two machines, start one job that trains."""

import datetime

import pytest
from launched_jobs import RANK_SCRIPT, check_one_job, run_together, what_ranks_said
from torch.distributed import TCPStore

from rank_scripts import forked_python

RANKS_OF_AN_AGENT = 2
NUM_RANKS = 2 * RANKS_OF_AN_AGENT
TWO_HOSTS = """
topology: two-hosts
switch: core
children:
  - {host: a1, uplink: 1 Gbit/s, ranks: 2}
  - {host: b1, uplink: 1 Gbit/s, ranks: 2}
"""


@pytest.fixture
def meeting_port():
    """A store at which agents meet, on a port of the kernel's choice; otherwise the first agent would serve it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))
    yield store.port
    del store


def agent(port, folder):
    return [
        forked_python(),
        *("-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", str(RANKS_OF_AN_AGENT), "--rdzv-id", "launched"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "is_host=0"),
        *("--local-addr", "127.0.0.1", "--max-restarts", "0"),
        *(str(RANK_SCRIPT), str(folder)),
    ]


def test_two_agents_train_one_model_on_the_topologys_hosts_of_their_names(meeting_port, tmp_path):
    """Which agent's ranks come first, the agents decide among themselves."""
    topology, folder = tmp_path / "two-hosts.yaml", tmp_path / "job"
    topology.write_text(TWO_HOSTS)
    folder.mkdir()
    common = {"SYNCLINE_TOPOLOGY": str(topology), "PYTHON_EXEC": forked_python()}
    hosts = [common | {"SYNCLINE_HOST": name} for name in ("b1", "a1")]
    run_together([agent(meeting_port, folder)] * 2, hosts)
    said = what_ranks_said(folder)
    check_one_job(said, NUM_RANKS)
    assert [rank["host"] for rank in said] == [rank["node"] for rank in said]
    assert {rank["host"] for rank in said} == {"a1", "b1"}
