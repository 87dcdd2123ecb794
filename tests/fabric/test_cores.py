"""The communication thread of each rank has its own share of the machine's cores, unless someone else has decided."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fabric_scenarios import Recorder
from hypothesis import given, strategies as st

from meeting_stores import DictStore
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.shared_host import bind_thread, divide_cores, unrestricted_cores
from syncline.runtime import CommunicationLoop

pytestmark = pytest.mark.skipif(not unrestricted_cores(), reason="this process may not use all cores, so none is bound")


@given(cores=st.sets(st.integers(0, 300), min_size=1, max_size=100), num_places=st.integers(1, 130))
def test_shares_are_even_and_use_every_core(cores, num_places):
    shares = [divide_cores(cores, place=place, num_places=num_places) for place in range(num_places)]
    assert frozenset.union(*shares) == cores
    uses = [sum(core in share for share in shares) for core in cores]
    sizes = [len(share) for share in shares]
    assert max(uses) - min(uses) <= 1
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_shares_are_runs_of_neighbours():
    assert divide_cores(range(8), place=1, num_places=3) == {2, 3, 4}
    assert divide_cores({4, 9}, place=2, num_places=4) == {4}


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def share_of_new_thread(rank, *others):
    def bind():
        for number in range(1, len(others) + 1):
            bind_thread(rank, others[:number])
        return os.sched_getaffinity(0)

    return in_thread(bind)


def test_a_thread_is_bound_anew_for_each_rank_that_is_found():
    cores = unrestricted_cores()
    assert share_of_new_thread(5) == cores
    assert share_of_new_thread(5, 7) == divide_cores(cores, place=0, num_places=2)
    assert share_of_new_thread(5, 7, 1, 1) == divide_cores(cores, place=1, num_places=3)
    assert unrestricted_cores() == cores


def test_a_main_thread_is_left_alone():
    before = os.sched_getaffinity(0)
    assert threading.current_thread() is threading.main_thread()
    bind_thread(0, [1])
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("restricted", [True, False])
def test_a_restricted_process_is_left_alone(monkeypatch, restricted):
    cores = unrestricted_cores()
    if restricted:
        monkeypatch.setattr(os, "cpu_count", lambda: len(cores) + 1)
    expected = cores if restricted else divide_cores(cores, place=1, num_places=2)
    assert share_of_new_thread(1, 0) == expected


def test_a_platform_that_cannot_bind_is_left_alone(monkeypatch):
    cores = unrestricted_cores()
    with monkeypatch.context() as patch:
        patch.delattr(os, "sched_getaffinity")
        in_thread(lambda: bind_thread(1, [0]))
        assert unrestricted_cores() == frozenset()
    assert unrestricted_cores() == cores


def refuse_to_tell(_process):
    raise PermissionError


def test_a_kernel_that_refuses_is_no_failure(monkeypatch):
    asked, cores = [], unrestricted_cores()

    def refuse(_thread, share):
        asked.append(share)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert share_of_new_thread(1, 0) == cores
    monkeypatch.setattr(os, "sched_getaffinity", refuse_to_tell)
    in_thread(lambda: bind_thread(1, [0]))
    assert asked == [divide_cores(cores, place=1, num_places=2)]


async def meet(rank, options, store):
    """Connect, and hear twice from the other rank: what it answers to the offer comes before its second message."""
    rendezvous = Rendezvous(store, job_id=options.job_id)
    fabric = await connect_tcp(options, rank=rank, world_size=2, rendezvous=rendezvous)
    recorder = Recorder()
    fabric.set_listener(recorder)
    fabric.send_control(1 - rank, b"first")
    await recorder.wait_until(lambda: recorder.controls)
    fabric.send_control(1 - rank, b"second")
    await recorder.wait_until(lambda: (1 - rank, b"second") in recorder.controls)
    return fabric, os.sched_getaffinity(0)


def affinity_of_loop(rank, options, store):
    """Return what the thread of a communication loop is bound to once it is connected."""
    loop = CommunicationLoop(f"rank {rank}")
    loop.start()
    try:
        fabric, cores = loop.run(meet(rank, options, store), 20)
        loop.run(fabric.close(), 20)
    finally:
        loop.stop()
    return cores


@pytest.mark.parametrize(
    ("settings", "is_bound"), [({}, True), ({"binds_thread": False}, False), ({"shares_memory": False}, False)]
)
def test_communication_loops_of_one_machine_divide_it(settings, is_bound):
    options, store, cores = FabricOptions(**settings), DictStore(), unrestricted_cores()
    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(lambda rank: affinity_of_loop(rank, options, store), range(2)))
    expected = [divide_cores(cores, place=rank, num_places=2) if is_bound else cores for rank in range(2)]
    assert shares == expected
    assert unrestricted_cores() == cores
