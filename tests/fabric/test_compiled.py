"""The compiled part: its checksums are those of everybody, and what is there without it."""

import random
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from syncline.fabric._native import crc32, instruction_sets

HIDDEN = """
import sys
sys.modules["syncline.fabric._native"] = None
"""
"""What lets a program run as if nothing had been compiled."""


@given(data=st.binary(max_size=3000), before=st.integers(0, 0xFFFFFFFF), start=st.integers(0, 64))
def test_checksums_are_those_of_zlib(data, before, start):
    assert crc32(memoryview(data)[start:], before) == zlib.crc32(data[start:], before)


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 79, 1023, 1024, 1279, 1280, 65_536, (1 << 20) + 13])
def test_checksums_of_all_paths(num_bytes):
    data = random.Random(num_bytes).randbytes(num_bytes)
    assert crc32(data) == zlib.crc32(data)


def test_the_instructions_of_the_processor_are_found_whatever_compiled_the_module():
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


def run_without_it(program, *arguments):
    command = [sys.executable, "-c", HIDDEN + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


FABRIC = """
import asyncio
from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp, new_event_loop
try:
    new_event_loop().run_until_complete(
        connect_tcp(FabricOptions(), rank=0, world_size=1, rendezvous=Rendezvous(None, job_id="none"))
    )
except ConfigurationError as error:
    print(error)
"""


def test_without_it_a_fabric_over_tcp_says_what_to_do():
    done = run_without_it(FABRIC)
    assert "pip install --force-reinstall --no-deps ." in done.stdout, done.stderr
    assert "pip brings one" in done.stdout
    assert "Linux, on x86-64 and aarch64" in done.stdout
    assert "import of syncline.fabric._native halted" in done.stdout


MEMORY = """
from concurrent.futures import ThreadPoolExecutor
from syncline.runtime import communicators_in_memory, numpy_reduction
from syncline.topology import Topology
ranks = communicators_in_memory(2, Topology.flat(2), seed=1)
reduction = numpy_reduction("float32")
def add(rank):
    values = bytearray(b"\\0\\0\\x80?" * 100)
    rank.all_reduce(memoryview(values), reduction).wait()
    return bytes(values)
with ThreadPoolExecutor(2) as pool:
    assert set(pool.map(add, ranks)) == {b"\\0\\0\\0@" * 100}
for rank in ranks:
    rank.abort()
"""


def test_without_it_ranks_in_memory_work():
    done = run_without_it(MEMORY)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("--version",), ("plan", "flat-8")])
def test_without_it_commands_that_move_nothing_work(arguments):
    done = run_without_it("from syncline.cli.main import main; main()", *arguments)
    assert not done.returncode, done.stderr
    assert done.stdout
