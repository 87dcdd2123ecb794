"""A lab is built, used and removed, whatever happens in between."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.errors import LabError
from syncline.lab import Lab
from syncline.lab.operations import clean, down, execute, status, up
from syncline.lab.programs import run_program
from syncline.lab.records import all_records
from syncline.topology import Topology

SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
TALK_TO_LOOPBACK = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(listener.getsockname(), timeout=60)
print("connected")
"""
LOOK_UP = "import socket, sys; print(*map(socket.gethostbyname, sys.argv[1:]))"
REACH_OUTSIDE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=60)
except OSError as error:
    print(error.strerror)
"""


def python(lab, host, code, *args, **options):
    process = lab.spawn(host, [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, **options)
    return process.communicate(timeout=60)[0]


def wait_until_over(pidfd, timeout_s=60.0):
    assert select.select([pidfd], [], [], timeout_s)[0], "a process outlived its lab"
    os.close(pidfd)


def interfaces():
    return sorted(link["ifname"] for link in json.loads(run_program("ip", "-j", "link", "show")))


def test_commands_find_their_place_and_the_machine_sees_nothing(is_gone):
    before = interfaces()
    with Lab("demo-1-3") as lab:
        assert interfaces() == before
        found = json.loads(python(lab, "h2", SHOW_ENVIRONMENT, env={"MASTER_PORT": "1234", "MINE": "yes"}))
        assert found["SYNCLINE_HOST"] == "h2"
        assert found["GLOO_SOCKET_IFNAME"] == found["SYNCLINE_INTERFACE"] == "eth0"
        assert found["MASTER_ADDR"] == lab.plan.host("h0").address
        assert (found["MASTER_PORT"], found["MINE"]) == ("1234", "yes")
        assert Topology.load(found["SYNCLINE_TOPOLOGY"]) == lab.topology
        assert python(lab, "h2", TALK_TO_LOOPBACK) == "connected\n"
        assert python(lab, "h2", REACH_OUTSIDE, "192.0.2.1") == "Network is unreachable\n"
        assert python(lab, "h2", REACH_OUTSIDE, lab.plan.host("h1").address) == "Connection refused\n"
        addresses = [host.address for host in lab.plan.hosts]
        assert python(lab, "h2", LOOK_UP, "h0", "h3", "localhost", socket.gethostname()).split() == [
            addresses[0], addresses[3], "127.0.0.1", addresses[2],
        ]  # fmt: skip
        lab_id = lab.lab_id
        assert repr(lab) == f"<Lab demo-1-3, up as {lab_id}>"
    assert is_gone(lab_id)
    assert interfaces() == before
    lab.down()
    with pytest.raises(LabError, match="the lab is not up"):
        _ = lab.plan


def test_switches_do_not_ask_the_packet_filters():
    settings = sorted(Path("/proc/sys/net/bridge").glob("bridge-nf-call-*tables"))
    with Lab("demo-1-3") as lab:
        found = [
            run_program("ip", "netns", "exec", lab.plan.switch_namespace, "cat", str(path)).strip() for path in settings
        ]
    assert found == ["0"] * len(settings), "where br_netfilter is not loaded there is nothing to ask"


def test_a_host_alone():
    with Lab(Topology.parse("host: box\nranks: 2\n")) as lab:
        assert python(lab, "box", TALK_TO_LOOPBACK) == "connected\n"
        assert lab.link_bytes() == {}


def test_two_labs_at_once_and_no_second_up(is_gone):
    with Lab(Topology.flat(2)) as one, Lab(Topology.flat(2)) as two:
        assert one.lab_id != two.lab_id
        with pytest.raises(LabError, match="is up already"):
            one.up()
        one_id = one.lab_id
    assert is_gone(one_id)


def test_an_error_removes_everything_and_daemons_die_too(is_gone):
    daemon = "import os, signal; os.setsid(); print(os.getpid(), flush=True); signal.pause()"
    fork = f"import os, sys\nif os.fork() == 0:\n    exec({daemon!r})"
    pidfds = []
    lab = Lab(Topology.flat(2))

    def use():
        with lab:
            process = lab.spawn("h0", [sys.executable, "-c", fork], stdout=subprocess.PIPE, text=True)
            pidfds.append(os.pidfd_open(int(process.stdout.readline())))
            process.stdout.close()
            raise ZeroDivisionError(lab.lab_id)

    with pytest.raises(ZeroDivisionError) as caught:
        use()
    assert is_gone(str(caught.value))
    wait_until_over(pidfds[0])


def test_what_cannot_be_built_leaves_nothing(is_gone):
    before = {record.lab_id for record in all_records()}
    with pytest.raises(LabError, match="too slow to emulate"):
        Lab(Topology.flat(2, rate=1.0)).up()
    assert {record.lab_id for record in all_records()} <= before


HOLD = """
import sys
from syncline.lab import Lab
from syncline.topology import Topology
lab = Lab(Topology.flat(2)).up()
process = lab.spawn("h0", [sys.executable, "-c", "import signal; signal.pause()"])
print(lab.lab_id, process.pid, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder():
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_clean_removes_what_a_killed_run_left(holder, is_gone):
    lab_id, process_id = holder.stdout.readline().split()
    pidfd = os.pidfd_open(int(process_id))
    assert lab_id not in clean()
    assert not is_gone(lab_id)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    [left] = [lab for lab in status(interval_s=0.01) if lab.record.lab_id == lab_id]
    assert left.record.is_abandoned
    assert lab_id in clean()
    assert is_gone(lab_id)
    wait_until_over(pidfd)


def test_a_process_that_ends_removes_its_lab(holder, is_gone):
    lab_id = holder.stdout.readline().split()[0]
    holder.communicate("\n")
    assert holder.returncode == 0
    assert is_gone(lab_id)


def test_a_namespace_without_a_record_is_removed():
    run_program("ip", "netns", "add", "syncline-zzzzzz.h0")
    assert "zzzzzz" in clean()
    assert "zzzzzz" not in clean()


def test_a_kept_lab_stays_until_it_is_taken_down(is_gone):
    lab = up("demo-1-3", priorities=True)
    try:
        lab_id = lab.lab_id
        assert lab_id not in clean()
        code = "import os, sys; sys.exit(5 if os.environ['SYNCLINE_HOST'] == 'h1' else 6)"
        assert execute("h1", [sys.executable, "-c", code], lab_id=lab_id) == 5
        assert execute("h1", ["sh", "-c", "kill -KILL $$"], lab_id=lab_id) == 128 + 9
        [described] = status(lab_id=lab_id, interval_s=0.01)
        record = described.record
        assert (record.owner, record.is_abandoned, record.has_priorities) == (None, False, True)
        assert described.plan.host("h0").address == lab.plan.host("h0").address
        assert len(described.num_bytes) == len(described.bytes_per_s) == 2 * 6
        assert {link.link.bytes_per_s("up") for link in described.plan.links} == {25e6, 125e6}
    finally:
        assert down(lab.lab_id) == lab_id
    assert is_gone(lab_id)
    with pytest.raises(LabError, match="there is no lab"):
        down(lab_id)
