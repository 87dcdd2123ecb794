"""What the environment may say, and what is refused."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import syncline
from syncline.endpoints import own_address
from syncline.errors import ConfigurationError, TopologyError
from syncline.pytorch import connecting
from syncline.pytorch.connecting import is_discoverable, with_address
from syncline.pytorch.environment import Arguments, read_environment
from syncline.pytorch.init import init
from syncline.variables import process_variables

JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_process_alone_needs_nothing() -> None:
    environment = read_environment({})
    assert (environment.rank, environment.world_size, environment.fabric.secret) == (0, 1, None)


def test_what_torchrun_sets() -> None:
    environment = read_environment(
        JOB | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job7", "SYNCLINE_TRACE": "t.json"}
    )
    assert environment.rank == 1
    assert environment.uses_agent_store
    assert environment.fabric.job_id == "job7"
    assert environment.trace == Path("t.json")


def test_shared_memory_can_be_turned_off() -> None:
    assert read_environment({}).uses_shared_memory
    assert not read_environment({"SYNCLINE_SHARED_MEMORY": "off"}).uses_shared_memory


def test_frames_are_authenticated_where_the_variable_or_the_argument_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_environment({}).fabric.authenticate_frames
    assert read_environment({"SYNCLINE_AUTHENTICATE_FRAMES": "on"}).fabric.authenticate_frames
    for name in ("RANK", "WORLD_SIZE", "SYNCLINE_TOPOLOGY", "SYNCLINE_SECRET", "SYNCLINE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SYNCLINE_AUTHENTICATE_FRAMES", "on")
    assert with_address(read_environment(process_variables())).fabric.authenticate_frames
    assert not read_environment(given=Arguments(authenticate_frames=False)).fabric.authenticate_frames
    with pytest.raises(ConfigurationError, match="authenticate_frames=True needs a secret"):
        init(interface="10.0.0.1", insecure=True)


def test_binding_can_be_turned_off() -> None:
    assert read_environment({}).fabric.binds_thread
    assert not read_environment({"SYNCLINE_BIND_THREAD": "off"}).fabric.binds_thread


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "two"}, "RANK must be a whole number"),
        ({"RANK": "2"}, "RANK must be from 0"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"SYNCLINE_BIND_THREAD": "no"}, "SYNCLINE_BIND_THREAD must be on or off, not 'no'"),
        ({"SYNCLINE_AUTHENTICATE_FRAMES": "1"}, "SYNCLINE_AUTHENTICATE_FRAMES must be on or off, not '1'"),
        ({"SYNCLINE_SHARED_MEMORY": "0"}, "SYNCLINE_SHARED_MEMORY must be on or off, not '0'"),
        ({"SYNCLINE_SECRET_FILE": "/does/not/exist"}, "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_environment(JOB | change)


def test_the_secret_comes_from_a_private_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 40 + b"\n")
    secret.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_environment(JOB | {"SYNCLINE_SECRET_FILE": str(secret)})
    secret.chmod(0o600)
    assert read_environment(JOB | {"SYNCLINE_SECRET_FILE": str(secret)}).fabric.secret == b"s" * 40


def test_loopback_needs_no_address() -> None:
    assert own_address("127.0.0.1") is None
    assert own_address("localhost") is None
    assert own_address("::1") == "::1"
    assert own_address(None) is None
    for name in ("no such host!", "no..host"):
        with pytest.raises(ConfigurationError, match="cannot be resolved"):
            own_address(name)


def test_a_master_may_get_its_name_after_this_rank_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first pod of a Job that is scheduled later than the others."""
    resolve, answers = socket.getaddrinfo, ["", "", "127.0.0.1", "127.0.0.1"]

    def answer(name: str, *more: Any, **options: Any) -> Any:
        if answers and (name := answers.pop(0)):
            return resolve(name, *more, **options)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(connecting, "NAME_PAUSE_S", 0.0)
    environment = read_environment(JOB | {"MASTER_ADDR": "digits-workers-0-0.digits"})
    assert with_address(environment).fabric.address == "127.0.0.1"
    environment = environment._replace(fabric=replace(environment.fabric, connect_s=0.01))
    with pytest.raises(ConfigurationError, match=r"MASTER_ADDR 'digits-workers-0-0\.digits' cannot be resolved"):
        with_address(environment)


def test_init_twice_and_nonsense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SYNCLINE_TOPOLOGY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="timeout_s"):
        init(timeout_s=0)
    with pytest.raises(TopologyError, match="demo-1-3"):
        init("demo-1-3")
    with init() as fleet:
        assert (fleet.rank, fleet.world_size) == (0, 1)
        with pytest.raises(ConfigurationError, match="twice"):
            init()
    fleet.close()
    with init():
        pass


def test_the_public_face_loads_torch_late() -> None:
    code = "import sys, syncline; syncline.Topology, dir(syncline); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert all(getattr(syncline, name) is not None for name in syncline.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = syncline.nothing


def test_public_rooms_are_there_when_they_are_first_named() -> None:
    code = (
        "import syncline; syncline.updates.TemporaryServer(), syncline.updates.matrix_cost, syncline.schedule.PLANNERS"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_hosts_that_reach_each_other_over_a_network_are_measured() -> None:
    pair = syncline.Topology.flat_on(["a", "b"])
    assert is_discoverable(pair, "10.0.0.1")
    assert not is_discoverable(pair, "127.0.0.1")
    assert not is_discoverable(pair, None)
    assert not is_discoverable(syncline.Topology.flat_on(["a", "a"]), "10.0.0.1")
