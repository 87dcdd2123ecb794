"""Compiled transports: grants and checksums as in Python, one job with Python, and what is there without them."""

import itertools
import math
import random
import re
import zlib
from pathlib import Path

import pytest
from fabric_scenarios import gather, run_over_tcp
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigurationError
from syncline.fabric import mesh, transport_sets
from syncline.fabric.grant_window import GrantWindow
from syncline.fabric.grants import GrantScheduler
from syncline.fabric.link_share import LinkShare
from syncline.fabric.protocol import BULK, PeerLeftError
from syncline.fabric.python_peer_transport import PythonTransportSet
from syncline.fabric.transport_sets import NativeTransportSet, is_native
from transports import TRANSPORTS

MIB = 1 << 20
KINDS = [kind for kind in ("python", "native") if kind in TRANSPORTS]


class Twins:
    """A scheduler in Python and a compiled one that hear of the same wishes, arrivals and losses."""

    def __init__(self, seed):
        from syncline.fabric._native import GrantScheduler as CompiledScheduler

        self.source = random.Random(seed)
        self.now_s = 100.0
        sizes = {**self.window_sizes(), "shares": self.shares()}
        self.python = GrantScheduler(**sizes, now=lambda: self.now_s)
        self.compiled = CompiledScheduler(**sizes)
        self.wishes = {}
        self.next_tag = 0

    def window_sizes(self):
        most_bytes = self.source.choice((300, 5000, 100_000))
        learns = self.source.random() < 0.5
        return {
            "window": GrantWindow(
                most_bytes, least_bytes=most_bytes // 4 if learns else None, bytes_per_s=1e5 if learns else math.inf
            ),
            "quantum_bytes": self.source.randrange(20, most_bytes),
            "sender_bytes": {peer: self.source.randrange(1, most_bytes) for peer in range(1, 4)},
        }

    def shares(self):
        outer, inner = (
            LinkShare(
                self.source.randrange(1, 3000),
                most_bytes=self.source.randrange(1, 9000),
                least_bytes=self.source.randrange(1, 400),
                target_s=0.02,
            )
            for _ in range(2)
        )
        return {1: (inner, outer), 2: (inner, outer), 3: (outer,), 4: ()}

    def both(self, name, *args, **kwargs):
        getattr(self.python, name)(*args, **kwargs)
        if name == "arrived":
            kwargs["now_s"] = self.now_s
        getattr(self.compiled, name)(*args, **kwargs)

    def step(self):
        self.now_s += self.source.choice((0.0, 0.001, 0.05))
        choice = self.source.random()
        moving = [key for key, wish in self.wishes.items() if wish["granted"] > wish["arrived"]]
        if choice < 0.4:
            self.wish()
        elif choice < 0.8 and moving:
            self.arrive(self.source.choice(moving))
        elif choice < 0.86 and self.wishes:
            self.forget(self.source.choice(list(self.wishes)))
        elif choice < 0.88:
            self.lose(self.source.randrange(1, 5))
        elif choice < 0.95:
            self.both("lost", self.source.randrange(1, 6), self.source.randrange(0, 5))
        elif choice < 0.97:
            self.both("resize", **self.window_sizes())
        self.compare()

    def wish(self):
        key = (self.source.randrange(1, 5), self.next_tag)
        self.next_tag += 1
        urgency = self.source.choice((0, 1, 5, BULK))
        wish = {"bytes": self.source.randrange(1, 20_000), "urgency": urgency, "granted": 0, "arrived": 0}
        self.wishes[key] = wish
        self.both("wish", *key, num_bytes=wish["bytes"], urgency=urgency)

    def arrive(self, key):
        wish = self.wishes[key]
        amount = self.source.randint(1, wish["granted"] - wish["arrived"])
        wish["arrived"] += amount
        self.both("arrived", key[0], num_bytes=amount, urgency=wish["urgency"])
        if wish["arrived"] == wish["bytes"]:
            del self.wishes[key]

    def forget(self, key):
        wish = self.wishes[key]
        self.both("forget", *key)
        wish["bytes"] = wish["granted"]
        if wish["arrived"] == wish["bytes"]:
            del self.wishes[key]

    def lose(self, peer):
        underway = {}
        for key in [key for key in self.wishes if key[0] == peer]:
            wish = self.wishes.pop(key)
            underway[wish["urgency"]] = underway.get(wish["urgency"], 0) + wish["granted"] - wish["arrived"]
        self.both("forget_peer", peer, underway=underway)

    def compare(self):
        expected = [(grant.peer, grant.tag, grant.limit_bytes) for grant in self.python.grants()]
        assert self.compiled.grants(now_s=self.now_s) == expected
        for peer, tag, limit_bytes in expected:
            self.wishes[peer, tag]["granted"] = limit_bytes
        assert self.compiled.underway_bytes == self.python.underway_bytes
        assert self.compiled.window_bytes == self.python.window_bytes
        assert self.compiled.quantum_bytes == self.python.quantum_bytes
        assert self.compiled.has_wishes == self.python.has_wishes


if "native" in TRANSPORTS:

    @given(seed=st.integers(0, 1 << 32))
    def test_grants_are_the_same(seed):
        twins = Twins(seed)
        for _ in range(120):
            twins.step()

    @given(data=st.binary(max_size=3000), before=st.integers(0, 0xFFFFFFFF), start=st.integers(0, 64))
    def test_checksums_are_those_of_zlib(data, before, start):
        from syncline.fabric._native import crc32

        assert crc32(memoryview(data)[start:], before) == zlib.crc32(data[start:], before)

    @pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 79, 1023, 1024, 1279, 1280, 65_536, MIB + 13])
    def test_checksums_of_all_paths(num_bytes):
        from syncline.fabric._native import crc32

        data = random.Random(num_bytes).randbytes(num_bytes)
        assert crc32(data) == zlib.crc32(data)

    def test_the_instructions_of_the_processor_are_found_whatever_compiled_the_module():
        from syncline.fabric._native import instruction_sets

        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        there = set(flags[1].split()) if flags else set()
        needed = {
            "aes": {"aes"},
            "crc32_folding": {"pclmulqdq", "sse4_1"},
            "wide_crc32_folding": {"pclmulqdq", "sse4_1", "avx512f", "vpclmulqdq"},
            "avx2": {"avx2"},
            "f16c": {"f16c"},
        }
        assert instruction_sets() == {name: names <= there for name, names in needed.items()}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_ranks_of_both_kinds_make_one_job(monkeypatch, first, second):
    kinds = {"python": PythonTransportSet, "native": NativeTransportSet}
    in_turns = itertools.cycle([kinds[first], kinds[second]])

    def open_next(sizes, **_):
        return next(in_turns)(sizes)

    monkeypatch.setattr(mesh, "open_transport_set", open_next)

    async def scenario(fabrics, recorders, mail):
        for tag, num_bytes in enumerate((0, 1, 5000, 16_384, 16_385, 300_000, 3 * MIB)):
            for source, target in ((0, 1), (1, 0)):
                payload = random.Random(num_bytes + source).randbytes(num_bytes)
                await gather(
                    mail.send(source, target, tag, payload), received := mail.receive(target, source, tag, num_bytes)
                )
                assert bytes(received.result()) == payload
        fabrics[0].send_control(1, b"hello")
        await recorders[1].wait_until(lambda: recorders[1].controls)
        assert recorders[1].controls == [(0, b"hello")]
        sent, received = (fabric.statistics() for fabric in fabrics)
        assert sent.sent_bytes == received.received_bytes
        await gather(*(fabric.close() for fabric in fabrics))
        assert all(isinstance(error, PeerLeftError) for recorder in recorders for error in recorder.lost.values())

    run_over_tcp(2, scenario)
    run_over_tcp(2, scenario, shares_memory=True)
    if "native" in KINDS:
        run_over_tcp(2, scenario, secret=b"s" * 32, authenticate_frames=True)


def test_the_variable_is_checked(monkeypatch):
    monkeypatch.setenv(transport_sets.VARIABLE, "yes")
    with pytest.raises(ConfigurationError, match="SYNCLINE_NATIVE must be 0, 1 or empty, not 'yes'"):
        is_native()


def test_without_a_compiler_python_does_it(monkeypatch):
    monkeypatch.setattr(transport_sets, "NativeTransportSet", None)
    monkeypatch.setattr(transport_sets, "_why_not", "no module named _native")
    monkeypatch.setenv(transport_sets.VARIABLE, "1")
    with pytest.raises(
        ConfigurationError, match=r"not installed \(no module named _native\); install a C\+\+ compiler"
    ):
        is_native()
    monkeypatch.delenv(transport_sets.VARIABLE)
    assert not is_native()

    async def scenario(fabrics, recorders, mail):
        executor = object()
        assert all(fabric.open_executor(executor) is executor for fabric in fabrics)
        await gather(mail.send(0, 1, 1, bytes(MIB)), mail.receive(1, 0, 1, MIB))

    run_over_tcp(2, scenario)
