"""Every variable that counts has an argument, and the argument goes before it."""

from __future__ import annotations

import ast
import io
import math
import re
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from syncline.cli.launcher.job import build_job, choose_host, choose_master
from syncline.cli.launcher.launch import Request, _base_variables, _find_topology
from syncline.cli.launcher.scratch import open_logs, prepare_secret
from syncline.cli.main import _front
from syncline.errors import ConfigurationError
from syncline.members import Elastic
from syncline.pytorch import launchers
from syncline.pytorch.environment import (
    WITHOUT_VARIABLE,
    Arguments,
    BackendOptions,
    Environment,
    read_environment,
    variable_of,
)
from syncline.pytorch.init import init
from syncline.pytorch.secret import choose_secret
from syncline.runtime import Communicator
from syncline.runtime.failures import LOOK
from syncline.topology import Topology
from syncline.variables import behind_limit_s, is_coloured, live_place, process_variables

JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SECRETS = {"SYNCLINE_SECRET": "v" * 32, "SYNCLINE_SECRET_FILE": "{folder}/secret"}
VALUES: dict[str, str] = {
    "RANK": "0",
    "WORLD_SIZE": "5",
    "MASTER_ADDR": "b",
    "MASTER_PORT": "7",
    "TORCHELASTIC_USE_AGENT_STORE": "true",
    "TORCHELASTIC_RUN_ID": "job-of-torchrun",
    "SYNCLINE_TOPOLOGY": "flat-8",
    "SYNCLINE_AUTHENTICATE_FRAMES": "on",
    "SYNCLINE_INTERFACE": "10.0.0.1",
    "SYNCLINE_HOST": "host-of-the-variable",
    "SYNCLINE_TIMEOUT": "11",
    "SYNCLINE_CONNECT_TIMEOUT": "12",
    "SYNCLINE_SILENCE": "13",
    "SYNCLINE_STALL": "14",
    "SYNCLINE_TRACE": "of-the-variable.json",
    "SYNCLINE_SHARED_MEMORY": "off",
    "SYNCLINE_BIND_THREAD": "off",
    "SYNCLINE_CONGESTION": "reno",
    "SYNCLINE_JOIN_PORT": "32",
    "SYNCLINE_ON_PREEMPTION": "leave",
    "SYNCLINE_REPLAN": "off",
    "SYNCLINE_PORTS": "29600-29631",
    "SYNCLINE_ADVERTISE": "10.1.1.1:29700",
    **SECRETS,
}
"""Of each variable that ``init()`` reads by itself, a value that is not the default."""
GIVEN = Arguments(
    topology=Topology.flat(3),
    rank=2,
    world_size=3,
    master="c:8",
    job_id="job-of-the-user",
    secret="a" * 32,
    authenticate_frames=False,
    interface="10.0.0.2",
    host="host-of-the-user",
    timeout_s=21,
    connect_timeout_s=22,
    replan=True,
    ports="29800-29831",
    advertise="10.1.1.2",
    silence_s=23,
    stall_s=24,
    trace="of-the-user.json",
    shared_memory=True,
    bind_thread=True,
    congestion="cubic",
    join_port=33,
    on_preemption="checkpoint",
)
NAMED_OTHERWISE = {
    "RANK": {"rank", "world_size"},
    "WORLD_SIZE": {"rank", "world_size"},
    "MASTER_ADDR": {"master"},
    "MASTER_PORT": {"master"},
    "TORCHELASTIC_USE_AGENT_STORE": {"master"},
    "TORCHELASTIC_RUN_ID": {"job_id"},
    "SYNCLINE_SECRET": {"secret"},
    "SYNCLINE_SECRET_FILE": {"secret"},
}
"""The arguments that go before variables whose names do not tell them."""
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "variables.md"
LAUNCHERS = {
    node.value: "5" if "SIZE" in node.value or "TASKS" in node.value or "NUM" in node.value else "4"
    for node in ast.walk(ast.parse(Path(launchers.__file__).read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in VALUES
    if re.fullmatch(r"[A-Z]+(_[A-Za-z]+)+", node.value)
}
"""Of each variable that only launchers set, a value."""
OF_ELASTIC_JOBS = {"SYNCLINE_JOIN", "SYNCLINE_ELASTIC", "SYNCLINE_MIN_RANKS"}
OF_RUN = {
    "SYNCLINE_BEHIND": "20",
    "SYNCLINE_METRICS": "9470",
    "SYNCLINE_LIVE": "on",
    "SYNCLINE_REPORT": "run.html",
    "SYNCLINE_LOG_DIR": "logs",
    "SYNCLINE_FLIGHT_RECORD": "records",
}
APART = {"SYNCLINE_CHECK_STALE", "NO_COLOR", "FORCE_COLOR", *OF_ELASTIC_JOBS, *OF_RUN}
"""Those with a test of their own."""


def arguments_of(name: str) -> Arguments:
    """The arguments that go before the variable."""
    named = {field.name for field in fields(Arguments) if variable_of(field.name) == name}
    return Arguments(**{key: getattr(GIVEN, key) for key in NAMED_OTHERWISE.get(name, named)})


def without_place(environment: Environment) -> dict[str, Any]:
    return environment._asdict()


def test_every_variable_is_tried_here() -> None:
    explained = set(re.findall(r"^\| `(\w+)`", PAGE.read_text(), re.MULTILINE))
    assert explained == VALUES.keys() | APART
    assert {variable_of(field.name) for field in fields(Arguments) if field.name not in WITHOUT_VARIABLE} <= explained
    assert {"SLURM_PROCID", "OMPI_MCA_orte_ess_jobid", "PMI_ID", "DSTACK_RUN_NAME"} <= LAUNCHERS.keys()
    assert LAUNCHERS.keys().isdisjoint(explained)


@pytest.mark.parametrize("name", VALUES)
def test_an_argument_of_init_goes_before_its_variable(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("f" * 32)
    secret.chmod(0o600)
    said = {name: VALUES[name].format(folder=tmp_path)}
    given = arguments_of(name)
    assert given != Arguments(), f"init() has no argument for {name}"
    alone = read_environment(JOB, given)
    assert read_environment(JOB | said, given) == alone
    by_variable = read_environment(JOB | said)
    assert by_variable != read_environment(JOB), f"{name} changes nothing"
    assert by_variable != alone


@pytest.mark.parametrize("name", LAUNCHERS)
def test_rank_and_size_go_before_whatever_a_launcher_says(name: str) -> None:
    given = Arguments(rank=2, world_size=3, master="c:8")
    assert read_environment({name: LAUNCHERS[name]}, given) == read_environment({}, given)


def test_every_argument_at_once_goes_before_every_variable(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("f" * 32)
    (tmp_path / "secret").chmod(0o600)
    said = {name: value.format(folder=tmp_path) for name, value in (VALUES | LAUNCHERS).items()}
    found = read_environment(said, GIVEN)
    assert found == read_environment({}, GIVEN)
    assert (found.rank, found.world_size, found.master_address, found.master_port) == (2, 3, "c", 8)
    assert (found.fabric.secret, found.fabric.job_id, found.uses_agent_store) == (b"a" * 32, "job-of-the-user", False)
    fabric = found.fabric
    assert (found.timeout_s, fabric.connect_s, fabric.dead_s, fabric.stall_s) == (21, 22, 23, 24)
    assert (found.trace, found.uses_shared_memory, found.fabric.binds_thread) == (Path("of-the-user.json"), True, True)


@pytest.mark.parametrize("given", [Arguments(rank=1), Arguments(world_size=2)])
def test_half_a_place_is_refused_in_place_of_half_a_launchers(given: Arguments) -> None:
    with pytest.raises(ConfigurationError, match="give both"):
        read_environment({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"} | JOB, given)


@pytest.mark.parametrize(("rank", "world_size"), [(3, 3), (-1, 3), (0, 0)])
def test_a_place_that_is_none_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="rank must be from 0 to world_size - 1"):
        read_environment(JOB, Arguments(rank=rank, world_size=world_size))


def test_who_joins_has_no_place_yet_and_who_has_a_place_does_not_join() -> None:
    said = {"SYNCLINE_JOIN": "a:31, [fd00::1]:32"}
    assert read_environment(said).join == (("a", 31), ("fd00::1", 32))
    assert read_environment(JOB | said, Arguments(join="b:33")).join == (("b", 33),)
    found = read_environment(JOB | said)
    assert (found.rank, found.world_size, found.master_address) == (0, 1, None)
    assert read_environment(said | {"SYNCLINE_TOPOLOGY": "flat-8"}).topology is None, "the job knows its tree"
    assert read_environment(said, Arguments(topology="flat-8")).topology == "flat-8"
    assert read_environment(said, Arguments(rank=2, world_size=3, master="c:8")).join == ()
    with pytest.raises(ConfigurationError, match=r"join='b:33' comes into a job that runs.*leave out rank"):
        read_environment({}, Arguments(rank=2, world_size=3, join="b:33"))
    with pytest.raises(ConfigurationError, match="join must be HOST:PORT"):
        read_environment({}, Arguments(join="b"))
    with pytest.raises(ConfigurationError, match="join_port must be from 0 to 65535, not 65536"):
        read_environment({}, Arguments(join_port=65536))


def test_what_distribute_is_told_of_losses_goes_before_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_MIN_RANKS", "3")
    assert Elastic.choose(None) is None
    monkeypatch.setenv("SYNCLINE_ELASTIC", "on")
    assert Elastic.choose(None) == Elastic(min_ranks=3)
    assert Elastic.choose(True) == Elastic()
    assert Elastic.choose(Elastic(min_ranks=2)) == Elastic(min_ranks=2)
    assert Elastic.choose(False) is None
    monkeypatch.setenv("SYNCLINE_MIN_RANKS", "few")
    with pytest.raises(ConfigurationError, match="SYNCLINE_MIN_RANKS must be a whole number, not 'few'"):
        Elastic.choose(None)
    monkeypatch.setenv("SYNCLINE_ELASTIC", "yes")
    with pytest.raises(ConfigurationError, match="SYNCLINE_ELASTIC must be on or off, not 'yes'"):
        Elastic.choose(None)


def test_arguments_of_run_go_before_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology.load("two-racks-5-3")
    first, second, *_ = (host.name for host in topology.hosts)
    assert choose_host(topology, asked=first, environment={"SYNCLINE_HOST": second}) == first
    assert choose_host(topology, asked=None, environment={"SYNCLINE_HOST": second}) == second
    where: dict[str, Any] = {"is_whole": False, "free_port": 1, "host": first}
    assert choose_master(asked="c:8", environment={"MASTER_ADDR": "b", "MASTER_PORT": "7"}, **where) == ("c", 8)
    monkeypatch.setenv("SYNCLINE_TOPOLOGY", "flat-8")
    assert _find_topology(Request(command=(), topology="demo-1-3"))[0].name == "demo-1-3"
    assert _find_topology(Request(command=(), num_ranks=3))[0].num_ranks == 3
    assert _find_topology(Request(command=()))[0].name == "flat-8"


def test_what_run_is_told_of_watching_goes_before_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OF_RUN.items():
        monkeypatch.setenv(name, value)
    told = _base_variables(Request(command=(), behind="30", metrics="9471"))
    assert (told["SYNCLINE_BEHIND"], told["SYNCLINE_METRICS"]) == ("30", "9471")
    assert told["SYNCLINE_FLIGHT_RECORD"] == "records"
    asked = _base_variables(Request(command=(), log_folder=tmp_path))
    assert asked["SYNCLINE_FLIGHT_RECORD"] == str(tmp_path)
    assert behind_limit_s() == 20.0
    for text, limit_s in (("off", math.inf), ("", 60.0)):
        monkeypatch.setenv("SYNCLINE_BEHIND", text)
        assert behind_limit_s() == limit_s
    for text in ("0", "soon"):
        monkeypatch.setenv("SYNCLINE_BEHIND", text)
        with pytest.raises(ConfigurationError, match=f"SYNCLINE_BEHIND must be a positive number of seconds.*{text}"):
            behind_limit_s()
    for text, place in (("on", "on"), ("view.json", "view.json"), ("/tmp/view", "/tmp/view"), ("off", ""), ("", "")):
        monkeypatch.setenv("SYNCLINE_LIVE", text)
        assert live_place() == place
    for text in ("1", "true"):
        monkeypatch.setenv("SYNCLINE_LIVE", text)
        with pytest.raises(ConfigurationError, match=f"SYNCLINE_LIVE must be on, off, or a file .*'{text}'"):
            live_place()
    monkeypatch.chdir(tmp_path)
    job = build_job(Topology.flat(2), command=(), host=None, master=("a", 1), named_as=None)
    assert open_logs(job, tmp_path / "asked", told)[1] == tmp_path / "asked" / "rank-1.log"
    assert open_logs(job, None, told)[0] == tmp_path / "logs" / "rank-0.log"
    assert open_logs(job, None, {}) == {}
    with pytest.raises(ConfigurationError, match=r"--log-dir .*logs cannot be written there: File exists"):
        open_logs(job, tmp_path / "logs" / "rank-0.log", {})


@pytest.mark.parametrize("variable", ["SYNCLINE_BEHIND", "SYNCLINE_LIVE"])
def test_what_is_watched_by_is_checked_before_anything_starts(variable: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{variable} must be .* not 'foo'"):
        read_environment(JOB | {variable: "foo"})


def test_a_fleet_that_cannot_be_made_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would end with SIGABRT while a loop runs."""
    before = threading.active_count()

    def fail(communicator: Communicator) -> None:
        raise ConfigurationError("nobody can be watched")

    monkeypatch.setattr(Communicator, "watch_ranks", fail)
    with pytest.raises(ConfigurationError, match="nobody can be watched"):
        init(rank=0, world_size=1)
    assert threading.active_count() == before


def test_the_remedy_of_late_calls_names_settings_that_exist() -> None:
    names = set(re.findall(r"\w+_s\b", LOOK))
    assert names == {"timeout_s", "stall_s"}
    assert names <= {field.name for field in fields(Arguments)}
    assert hasattr(BackendOptions, "stall_s")


def test_a_secret_file_goes_before_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("f" * 32)
    secret.chmod(0o600)
    monkeypatch.setenv("SYNCLINE_SECRET", "v" * 32)
    assert choose_secret(secret) == b"f" * 32
    assert choose_secret(None) == b"v" * 32
    job: Any = None  # not looked at, where a file is named
    assert prepare_secret(job, asked=secret, environment=process_variables(), folder=tmp_path) == secret


@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR", "NEITHER"])
def test_colour_as_it_is_asked_for(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.setenv(name, "0")  # so that what the front door sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "1")
    stream = io.StringIO()
    assert is_coloured(stream) == (variable == "FORCE_COLOR")
    _front(color=True)
    assert is_coloured(stream)
    _front(color=False)
    assert not is_coloured(stream)
    _front()
    assert not is_coloured(stream)
