"""Which ranks start here, where they meet, and what each of them is told."""

from pathlib import Path

import pytest

from syncline.cli.launcher.environment import rank_environment
from syncline.cli.launcher.job import build_job, choose_host, choose_master, parse_master, place_ranks
from syncline.cli.launcher.scratch import check_place, merge_trace_parts, own_target, prepare_secret, trace_parts
from syncline.cli.launcher.terminal import labels
from syncline.errors import ConfigurationError
from syncline.topology import Topology

TWO_HOSTS = """
topology: two-hosts
switch: core
children:
  - {host: a1, uplink: 1 Gbit/s, ranks: 2}
  - {host: b1, uplink: 1 Gbit/s, ranks: 3}
"""


@pytest.fixture
def topology():
    return Topology.parse(TWO_HOSTS, source="two-hosts.yaml")


def job_of(topology, host=None, master=("127.0.0.1", 29500), named_as="two-hosts.yaml"):
    return build_job(topology, command=("true",), host=host, master=master, named_as=named_as)


@pytest.mark.parametrize(
    ("asked", "variable", "machine", "expected"),
    [
        ("b1", "a1", "a1", "b1"),
        (None, "a1", "b1", "a1"),
        (None, None, "b1.example.org", "b1"),
        (None, None, "laptop", None),
    ],
)
def test_the_first_source_that_names_a_host_decides(topology, asked, variable, machine, expected):
    environment = {"SYNCLINE_HOST": variable} if variable else {}
    assert choose_host(topology, asked=asked, environment=environment, machine=machine) == expected


def test_an_unknown_host_is_named_with_those_that_exist(topology):
    with pytest.raises(ConfigurationError, match=r"--host must name a host .* got 'c1'; its hosts are a1, b1"):
        choose_host(topology, asked="c1", environment={})
    with pytest.raises(ConfigurationError, match=r"SYNCLINE_HOST must name"):
        choose_host(topology, asked=None, environment={"SYNCLINE_HOST": "c1"})


def test_a_host_starts_its_own_ranks_and_one_machine_can_start_all(topology):
    assert [(p.rank, p.local_rank, p.host) for p in place_ranks(topology, "b1")] == [
        (2, 0, "b1"),
        (3, 1, "b1"),
        (4, 2, "b1"),
    ]
    assert [(p.rank, p.local_rank) for p in place_ranks(topology, None)] == [(k, k) for k in range(5)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a1:4000", ("a1", 4000)),
        ("a1", ("a1", 29500)),
        ("[fe80::1]:7", ("fe80::1", 7)),
        ("[::1]", ("::1", 29500)),
        ("::1", ("::1", 29500)),
    ],
)
def test_master_is_a_host_and_perhaps_a_port(text, expected):
    assert parse_master(text) == expected


@pytest.mark.parametrize("text", ["a1:", "a1:0", "a1:65536", "a1:x", ":29500", ""])
def test_a_master_that_cannot_be_is_refused(text):
    with pytest.raises(ConfigurationError, match="--master must be HOST:PORT"):
        parse_master(text)


def test_where_the_ranks_meet():
    def choose(**changes):
        said = {"asked": None, "environment": {}, "is_whole": True, "free_port": 5000, "host": "a1"}
        return choose_master(**(said | changes))

    assert choose() == ("127.0.0.1", 5000)
    assert choose(asked="c:1") == ("c", 1)
    assert choose(environment={"MASTER_ADDR": "stale"}) == ("127.0.0.1", 5000)
    assert choose(environment={"MASTER_ADDR": "c"}, is_whole=False) == ("c", 29500)
    assert choose(environment={"MASTER_ADDR": "c", "MASTER_PORT": "7"}, is_whole=False) == ("c", 7)
    with pytest.raises(ConfigurationError, match=r"host .a1. starts only some of the job.s ranks.*--master HOST:PORT"):
        choose(is_whole=False)


def test_a_rank_is_told_what_torchrun_tells_and_more(topology):
    job = job_of(topology, host="b1", master=("10.0.0.1", 4000))
    environment = rank_environment(
        job, job.processes[1], base={"PATH": "/bin", "RANK": "99"}, num_cores=8, trace_file=Path("/t/trace.json")
    )
    assert environment == {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4000",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "SYNCLINE_HOST": "b1",
        "SYNCLINE_TOPOLOGY": "two-hosts.yaml",
        "SYNCLINE_TRACE": "/t/trace.json",
    }


def test_threads_are_shared_out_unless_the_user_said_how_many(topology):
    job = job_of(topology)
    few = rank_environment(job, job.processes[0], base={}, num_cores=2)
    assert few["OMP_NUM_THREADS"] == "1"
    said = rank_environment(job, job.processes[0], base={"OMP_NUM_THREADS": "7"}, num_cores=2)
    assert said["OMP_NUM_THREADS"] == "7"


def test_a_flat_job_clears_what_an_outer_job_left(topology):
    job = job_of(Topology.flat(2), named_as=None)
    base = {"SYNCLINE_TOPOLOGY": "old", "SYNCLINE_HOST": "old", "SYNCLINE_TRACE": "old"}
    environment = rank_environment(job, job.processes[0], base=base, num_cores=2)
    assert not {name for name in environment if name.startswith("SYNCLINE_")}


def test_a_fresh_secret_is_private_and_a_given_one_stands(topology, tmp_path):
    whole, part = job_of(topology), job_of(topology, host="a1")
    path = prepare_secret(whole, asked=None, environment={}, folder=tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32
    assert prepare_secret(whole, asked=None, environment={"SYNCLINE_SECRET": "x"}, folder=tmp_path) is None
    assert prepare_secret(part, asked=None, environment={}, folder=tmp_path) is None
    (tmp_path / "mine").write_text("s" * 32)
    (tmp_path / "mine").chmod(0o600)
    assert prepare_secret(part, asked=tmp_path / "mine", environment={}, folder=tmp_path) == tmp_path / "mine"


def test_labels_name_the_host_where_it_is_not_plain():
    topology = Topology.parse(TWO_HOSTS, source="two-hosts.yaml")
    assert labels(job_of(topology))[4] == "[b1:4]"
    assert labels(job_of(topology, host="b1"))[4] == "[b1:4]"
    assert labels(job_of(topology, host="b1"), is_in_lab=True)[4] == "[4]"
    assert labels(job_of(Topology.flat(2), named_as=None))[1] == "[1]"


def test_each_host_writes_a_trace_of_its_own(topology):
    assert own_target(job_of(topology), Path("t/x.json"), None) == Path("t/x.json")
    assert own_target(job_of(topology, host="a1"), Path("t/x.json"), "a1") == Path("t/x.a1.json")


def test_a_secret_file_that_is_missing_or_open_to_others_is_refused_before_any_rank_starts(topology, tmp_path):
    part, path = job_of(topology, host="a1"), tmp_path / "mine"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        prepare_secret(part, asked=path, environment={}, folder=tmp_path)
    path.write_text("s" * 32)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        prepare_secret(part, asked=path, environment={}, folder=tmp_path)


def test_a_trace_that_cannot_be_written_is_refused_before_any_rank_starts(tmp_path):
    check_place(tmp_path / "trace.json", "--trace")
    for path, why in ((tmp_path / "none" / "trace.json", "there is no folder"), (tmp_path, "this is a folder")):
        with pytest.raises(ConfigurationError, match=why):
            check_place(path, "--trace")
    assert not list(tmp_path.iterdir())


def test_what_ranks_could_not_write_on_a_full_disk_is_no_trace(tmp_path):
    parts = trace_parts(job_of(Topology.flat(2)), tmp_path / "trace.json")
    parts[0].touch()
    assert merge_trace_parts(parts, tmp_path / "trace.json") == 0
    assert not list(tmp_path.iterdir())
