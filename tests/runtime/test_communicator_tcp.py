"""The same over TCP on loopback: results to the bit, errors that name who, and nothing left after a close."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from schedule_oracle import random_topology, replay
from tcp_communicators import close_all, connect_all

from meeting_stores import DictStore
from rank_scripts import run_struck
from syncline.errors import MismatchError, PeerLostError, RendezvousError
from syncline.fabric import FabricOptions
from syncline.priorities.settings import Priorities
from syncline.runtime import CollectiveCall, Communicator, numpy_reduction
from syncline.schedule import Collective, Layout, plan_tree
from syncline.topology import Topology

RANK_PROCESS = Path(__file__).with_name("rank_process.py")

FLOAT32 = numpy_reduction("float32")
NEVER_S = 1e6


def submit(communicators, schedule, layout, buffers, reduction, stream=1):
    return [
        communicator.submit(
            CollectiveCall(
                stream=stream,
                schedule=schedule,
                layout=layout,
                buffer=memoryview(buffer).cast("B"),
                reduction=reduction,
                label=f"bucket {stream}",
                timeout_s=60,
            )
        )
        for communicator, buffer in zip(communicators, buffers, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_give_the_bits_of_their_steps(over_tcp, seed):
    topology = random_topology(seed + 40, max_ranks=5)
    communicators = over_tcp(topology, max_inflight_bytes=200_000)
    works, checks = [], []
    for stream, collective in enumerate(Collective):
        for num_elements in (0, 1, 4001, 150_000):
            schedule = plan_tree(topology, collective)
            layout = Layout.build(schedule, num_elements, 30_000)
            source = np.random.default_rng([seed, stream, num_elements])
            buffers = [source.normal(size=num_elements).astype(np.float32) for _ in range(topology.num_ranks)]
            checks.append((replay(schedule, layout, buffers), buffers))
            works += submit(communicators, schedule, layout, buffers, FLOAT32, stream)
    for work in works:
        work.wait(60)
    for expected, buffers in checks:
        for rank in range(topology.num_ranks):
            assert buffers[rank].tobytes() == expected[rank].tobytes(), f"seed {seed}"


def test_conveniences(over_tcp):
    communicators = over_tcp(Topology.flat(3))
    buffers = [np.arange(900_000, dtype=np.float32) + rank for rank in range(3)]
    expected = np.sum(buffers, axis=0)
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    for name in ("reduce_scatter", "all_gather"):
        works = [getattr(c, name)(view, FLOAT32) for c, view in zip(communicators, views, strict=True)]
        for work in works:
            work.wait(60)
    assert all(np.array_equal(buffer, expected) for buffer in buffers)
    statistics = communicators[0].statistics()
    assert statistics.fabric.sent_bytes == 2 * 2 * 900_000 * 4 // 3
    assert sum(statistics.link_bytes.values()) == 4 * statistics.fabric.sent_bytes  # rank and host, up and down


def test_a_collective_goes_on_the_connection_of_its_class(over_tcp):
    communicators = over_tcp(Topology.flat(3), options=FabricOptions(shares_memory=False))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda communicator: communicator.connection_classes.open(Priorities()), communicators))
    buffers = [np.full(300_000, rank, dtype=np.float32) for rank in range(3)]
    works = [
        communicator.all_reduce(memoryview(buffer).cast("B"), FLOAT32, connection_class=2)
        for communicator, buffer in zip(communicators, buffers, strict=True)
    ]
    for work in works:
        work.wait(60)
    assert all((buffer == 3.0).all() for buffer in buffers)
    for communicator in communicators:
        classes = communicator.statistics().fabric.by_class()
        sent = [classes[number].sent_bytes for number in range(4)]
        assert sent == [0, 0, pytest.approx(1_600_000, abs=100), 0], "but for the rounding of cuts in each slice"


def test_calls_that_differ_fail_on_every_rank(over_tcp):
    communicators = over_tcp(Topology.flat(3), options=FabricOptions(close_s=NEVER_S))
    sizes = [3_000_000, 3_000_000, 3_000_004]
    works = [
        communicator.all_reduce(memoryview(bytearray(size)), numpy_reduction("int8"))
        for communicator, size in zip(communicators, sizes, strict=True)
    ]
    for work in works:
        with pytest.raises(MismatchError, match=r"rank 2 \(host h2\) called all_reduce of 3000004 x int8"):
            work.wait(60)
    assert all(communicator.statistics().fabric.pending_receives == 0 for communicator in communicators)
    close_all(communicators)  # and does not wait for messages that no one will receive: that would take for ever


@pytest.mark.parametrize("num_elements", [100, 1_000_000])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_calls_that_differ_are_found_by_their_messages(over_tcp, num_elements, dtype):
    """The ranks between the two that differ make no call, so only the messages of these two tell of each other."""
    submit_differing(over_tcp(Topology.flat(4)), num_elements, dtype, named=(0, 2))


@pytest.mark.parametrize("num_elements", [100, 1_000_000])
def test_calls_of_a_group_that_differ_are_found_by_their_messages(over_tcp, num_elements):
    members = (4, 2, 0, 1)
    communicators = over_tcp(Topology.flat(5))
    groups = [communicators[rank].open_group(members, streams=range(1, 3)) for rank in members]
    submit_differing(groups, num_elements, "float32", named=(4, 0))
    close_all(groups)


def submit_differing(communicators, num_elements, dtype, *, named):
    """Let the first and the third rank call different things, and no other any; the job knows them as ``named``."""
    schedule = plan_tree(Topology.flat(4), Collective.ALL_REDUCE)
    works = []
    for rank, size in ((0, num_elements), (2, num_elements + 4)):
        layout, buffers = Layout.build(schedule, size, size), [np.zeros(size, dtype)]
        works += submit([communicators[rank]], schedule, layout, buffers, numpy_reduction(dtype), stream=1)
    first, third = (rf"rank {rank} \(host h{rank}\) called " for rank in named)
    for work in works:
        with pytest.raises(MismatchError, match=f"{first}.*, but {third}"):
            work.wait(30)


def test_a_rank_that_breaks_off_is_named(over_tcp):
    communicators = over_tcp(Topology.flat(4))
    works = [c.all_reduce(memoryview(bytearray(8_000_000)), numpy_reduction("int8"), step=9) for c in communicators[:3]]
    communicators[3].abort()
    for work in works:
        with pytest.raises(
            PeerLostError, match=r"rank 3 \(host h3\).* during all_reduce, step 9; ranks .* wait for it"
        ):
            work.wait(60)


def test_ranks_that_close_right_after_their_last_call_spoil_nothing(over_tcp):
    for _ in range(5):
        communicators = over_tcp(Topology.flat(4))

        def finish(communicator):
            work = communicator.all_reduce(memoryview(bytearray(400_000)), numpy_reduction("int8"))
            work.wait(60)
            communicator.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(finish, communicators))


def test_thirty_connections_leave_nothing_behind():
    def num_open():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    def cycle():
        communicators = connect_all(Topology.flat(2))
        for work in [communicator.barrier() for communicator in communicators]:
            work.wait(60)
        close_all(communicators)

    cycle()
    before = num_open()
    for _ in range(30):
        cycle()
    assert all(
        now <= then for now, then in zip(num_open(), before, strict=True)
    )  # other tests may end theirs meanwhile


def test_a_rank_that_does_not_come_leaves_nothing_behind():
    before = threading.active_count()
    with pytest.raises(RendezvousError, match="rank 1 did not come"):
        Communicator.connect(
            rank=0,
            world_size=2,
            topology=Topology.flat(2),
            store=DictStore(),
            options=FabricOptions(connect_s=0.2),
        )
    assert threading.active_count() == before


def test_four_processes_sum(tmp_path):
    lines, _ = run_struck(RANK_PROCESS, tmp_path, 4, -1, "SIGKILL")
    assert [(line["step"], line["error"]) for line in lines] == [(5, "NoneType")] * 4


@pytest.mark.parametrize(
    ("signal_name", "reason"), [("SIGKILL", "its process died or was killed"), ("SIGSTOP", "sent nothing for")]
)
def test_a_process_that_dies_or_freezes_is_named_by_all_others(tmp_path, signal_name, reason):
    """A killed one at once, by the kernel: its silence would not be noticed in this test. How soon: bench-check."""
    lines, _ = run_struck(RANK_PROCESS, tmp_path, 4, 2, signal_name)
    assert len(lines) == 3
    for line in lines:
        assert line["error"] == "PeerLostError", line
        assert "rank 2 (host h2)" in line["text"]
        # Stopped at the start of step 5, it may still owe the others the last word of step 4.
        assert re.search(r"during all_reduce of bucket 0, step [45]", line["text"])
        assert reason in line["text"]


@pytest.mark.parametrize("fails", [False, True])
def test_no_landing_is_kept_after_its_call(over_tcp, fails):
    communicators = over_tcp(Topology.flat(3))
    buffers = [memoryview(bytearray(4 * (100_000 + (fails and rank == 2)))) for rank in range(3)]
    works = [c.all_reduce(buffer, FLOAT32) for c, buffer in zip(communicators, buffers, strict=True)]
    for work in works:
        with pytest.raises(MismatchError) if fails else nullcontext():
            work.wait(60)
    executors = [c._engine._executor for c in communicators]
    assert [(e._executor.num_active_slices, e._executor.inflight_bytes) for e in executors] == [(0, 0)] * 3
    assert [e._pool.used_bytes for e in executors] == [0] * 3
