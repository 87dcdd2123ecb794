"""Options are checked when they are made, and a refusal says what to do."""

import platform
import socket

import pytest

from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.fabric.sockets import TcpCounters, open_listening_socket, prepare_connected, resolve_address, tcp_counters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secret": b"short"}, "at least 32 bytes, not 5"),
        ({"heartbeat_s": 0}, "heartbeat_s must be a number above 0, not 0"),
        ({"close_s": -1.0}, "close_s must be a number above 0, not -1.0"),
        ({"chunk_bytes": 100}, "chunk_bytes must be a whole number from 4096"),
        ({"chunk_bytes": 1 << 30}, "chunk_bytes must be a whole number from 4096"),
        ({"grant_window_bytes": 0}, "grant_window_bytes must be a whole number from 1 up"),
        ({"num_classes": 0}, "num_classes must be a whole number from 1 to 16"),
        ({"dscp": (64,)}, "each: a whole number from 0 to 63"),
    ],
)
def test_what_cannot_be_used_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        FabricOptions(**settings)


def test_without_a_secret_only_loopback_is_open():
    FabricOptions().check_exposure("127.0.0.1")
    FabricOptions().check_exposure("::1")
    with pytest.raises(ConfigurationError, match="SYNCLINE_SECRET_FILE"):
        FabricOptions().check_exposure("192.168.1.5")
    with pytest.raises(ConfigurationError, match="no shared secret"):
        FabricOptions().check_exposure("0.0.0.0")
    with pytest.raises(ConfigurationError, match=r"authenticate_frames=True needs a secret.*SYNCLINE_SECRET_FILE"):
        FabricOptions(authenticate_frames=True).check_exposure("127.0.0.1")
    FabricOptions(insecure=True).check_exposure("192.168.1.5")
    FabricOptions(secret=b"s" * 32).check_exposure("192.168.1.5")


def test_addresses_are_literals_interfaces_or_names():
    assert resolve_address(None) == "127.0.0.1"
    assert resolve_address("::1") == "::1"
    assert resolve_address("lo") == "127.0.0.1"
    assert resolve_address("localhost") in {"127.0.0.1", "::1"}
    for name in ("no such thing", "no..host"):
        with pytest.raises(ConfigurationError, match="nor an interface of this machine"):
            resolve_address(name)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1"):
        open_listening_socket("192.0.2.1", FabricOptions(insecure=True))


def test_a_congestion_control_that_the_kernel_lacks_is_refused():
    with pytest.raises(ConfigurationError, match=r"not 'nobodys' .*tcp_available.*modprobe tcp_nobodys"):
        open_listening_socket("127.0.0.1", FabricOptions(congestion="nobodys"))
    open_listening_socket("127.0.0.1", FabricOptions(congestion="reno")).close()


TCP_RTO_MAX_MS = 44


class Refusing(socket.socket):
    """A socket of a user who may not choose some controls."""

    refused = (b"cubic",)

    def setsockopt(self, level, name, value):
        if value in self.refused:
            raise PermissionError(1, "Operation not permitted")
        super().setsockopt(level, name, value)


def congestion_of(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_a_user_who_may_not_choose_cubic_gets_what_heeds_losses_too():
    with socket.create_server(("127.0.0.1", 0)) as listening, Refusing() as sock:
        sock.connect(listening.getsockname())
        prepare_connected(sock, 0, FabricOptions(congestion="cubic"))
        assert congestion_of(sock) == "reno"
        assert tcp_counters(sock).lost_bytes == 0


def test_where_the_kernel_has_no_bbr_what_is_far_is_sent_as_other_slow_routes_are():
    with socket.create_server(("127.0.0.1", 0)) as listening, Refusing() as sock:
        sock.refused = (b"bbr",)
        sock.connect(listening.getsockname())
        prepare_connected(sock, 0, FabricOptions(congestion="bbr"))
        assert congestion_of(sock) == "cubic"


def test_what_a_cut_has_stopped_is_sent_again_several_times_within_the_silence():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as sock,
    ):
        prepare_connected(sock, 0, FabricOptions(dead_s=8.0))
        try:
            assert sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) == 2000
        except OSError:
            assert tuple(map(int, platform.release().split(".")[:2])) < (6, 15), "a newer kernel has it"


def test_only_tcp_counts_what_was_lost():
    one, other = socket.socketpair()
    with one, other:
        assert tcp_counters(one) == TcpCounters()
