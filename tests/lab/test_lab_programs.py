"""What the machine lacks is said in so many words."""

import ipaddress

import pytest

from syncline.errors import LabError
from syncline.lab.programs import (
    Batch,
    check_congestion,
    check_machine,
    check_packet_filters,
    explain_failure,
    namespace_names,
    processes_in,
    routed_networks,
    run_batch,
    run_program,
)


def test_not_root():
    with pytest.raises(LabError, match=r"the lab needs root, .* but the user is 1000; run it with sudo"):
        check_machine(user_id=1000)


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_no_program(missing):
    with pytest.raises(LabError, match=f"needs the program '{missing}', .*; install iproute2"):
        check_machine(user_id=0, find=lambda program: None if program == missing else program)


UNKNOWN_QUEUE = "Error: Specified qdisc kind is unknown."


@pytest.mark.parametrize(
    ("command", "output", "message"),
    [
        ("ip link add name d1 type veth", "Error: Unknown device type.", "virtual Ethernet pairs .*CONFIG_VETH"),
        (
            "ip link add name b0 type bridge",
            "RTNETLINK answers: Operation not supported",
            "lacks bridges .*BRIDGE",
        ),
        ("tc qdisc add dev d1 root handle 1: htb default a", UNKNOWN_QUEUE, "CONFIG_NET_SCH_HTB"),
        ("tc qdisc add dev d1 parent 1:a bfifo limit 5", UNKNOWN_QUEUE, "CONFIG_NET_SCH_FIFO"),
        ("tc qdisc add dev d1 root handle 1: tbf rate 5bit", UNKNOWN_QUEUE, "CONFIG_NET_SCH_TBF"),
        ("tc qdisc add dev d1 parent 1:a pfifo limit 5", UNKNOWN_QUEUE, "the packet queue"),
        ("tc filter add dev d1 u32 match", "Error: TC classifier not found.", "CONFIG_NET_CLS_U32"),
        ("ip netns add x", "Failed to create a new network namespace: Invalid argument", "CONFIG_NET_NS"),
        (
            "ip netns add x",
            "mount --make-shared failed: Operation not permitted",
            "capabilities NET_ADMIN and SYS_ADMIN",
        ),
        ("ip link set dev x up", "Cannot find device", "'ip link set dev x up' failed: Cannot find device"),
        ("ip link", "", "'ip link' failed: no reason given"),
    ],
)
def test_refusals_are_explained(command, output, message):
    with pytest.raises(LabError, match=message):
        raise explain_failure(command, output)


def test_bridges_that_cannot_ask_packet_filters(tmp_path):
    check_packet_filters(tmp_path)
    with pytest.raises(LabError, match=r"packet filters cannot be left on: .*modprobe br_netfilter"):
        check_packet_filters(tmp_path / "bridge")


def test_a_congestion_control_that_the_kernel_lacks(tmp_path):
    available = tmp_path / "available"
    available.write_text("reno cubic\n")
    check_congestion("cubic", available)
    with pytest.raises(LabError, match=r"no congestion control 'bbr', only cubic, reno; .* modprobe tcp_bbr"):
        check_congestion("bbr", available)


def test_the_failed_command_of_a_batch_is_named():
    batch = Batch(program="ip", namespace=None, lines=("link show dev lo", "link show dev nowhere"))
    with pytest.raises(LabError, match="'ip link show dev nowhere' failed: Device \"nowhere\" does not exist"):
        run_batch(batch)
    assert run_batch(Batch(program="ip", namespace=None, lines=())) == ""


def test_a_program_that_is_missing_or_fails():
    with pytest.raises(LabError, match="needs the program 'no-such-program'"):
        run_program("no-such-program")
    with pytest.raises(LabError, match="'ip netns pids no-such-namespace' failed"):
        run_program("ip", "netns", "pids", "no-such-namespace")


def test_what_is_read_from_the_machine():
    assert ipaddress.IPv4Network("127.0.0.0/8") in routed_networks()
    assert isinstance(namespace_names(), tuple)
    assert processes_in(["no-such-namespace"]) == set()
