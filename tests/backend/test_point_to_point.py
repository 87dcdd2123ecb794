"""Send and receive: order, tags, anyone, sizes that differ, deadlines, and ranks that leave."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from thread_groups import run_groups

import syncline
from syncline.backend.creation import SynclineProcessGroup as Group
from syncline.errors import ConfigurationError, DeadlineError, FabricError, MismatchError, PeerLostError
from syncline.fabric.frames import CONTROL_CLASS, MEMORY_CLASS
from syncline.runtime.shared_memory.opening import can_share

Run = Callable[..., list[Any]]
SIZES = (0, 1, 100, 3_000, 50_000, 400_000)
"""In the head itself, fetched before somebody asks, and sent when somebody does."""


@pytest.fixture(params=[True, False], ids=["in shared memory", "over sockets"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return :func:`run_groups`, for groups whose ranks share memory, and for those that do not."""
    return partial(run_groups, options=syncline.BackendOptions(shared_memory=request.param))


def on_each(*bodies: Callable[[Group], object]) -> Callable[[Group], object]:
    return lambda group: bodies[group.rank()](group)


def test_messages_of_every_size_arrive_by_tag_whoever_comes_first(run: Run) -> None:
    def send(group: Group) -> None:
        works = [group.send([torch.full((size,), float(tag))], 1, tag) for tag, size in enumerate(SIZES)]
        group.barrier().wait()
        works += [group.send([torch.full((size,), -1.0)], 1, tag) for tag, size in enumerate(SIZES)]
        for work in works:
            assert work.wait()

    def receive(group: Group) -> None:
        group.barrier().wait()
        for value in (None, -1.0):
            for tag, size in reversed(tuple(enumerate(SIZES))):
                tensor = torch.zeros(size)
                assert group.recv([tensor], 0, tag).wait()
                assert tensor.tolist() == [tag if value is None else value] * size

    run(2, on_each(send, receive))


def test_a_receive_into_every_other_number_and_of_another_type_is_put_in_place(run: Run) -> None:
    def send(group: Group) -> None:
        group.send([torch.arange(10, dtype=torch.int16)[::2]], 1, 0).wait()

    def receive(group: Group) -> None:
        whole = torch.zeros(10, dtype=torch.int16)
        work = group.recv([whole[1::2]], 0, 0)
        work.get_future().wait()
        assert whole.tolist() == [0, 0, 0, 2, 0, 4, 0, 6, 0, 8]

    run(2, on_each(send, receive))


def test_conjugates_and_negatives_are_what_they_stand_for(run: Run) -> None:
    """Their memory holds other numbers."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])

    def send(group: Group) -> None:
        group.send([numbers.conj()], 1, 0).wait()
        group.send([numbers.conj().imag], 1, 0).wait()

    def receive(group: Group) -> None:
        into, part = torch.zeros(2, dtype=numbers.dtype), torch.zeros(2)
        group.recv([into.conj()], 0, 0).wait()
        assert torch.equal(into, numbers)
        group.recv([part], 0, 0).wait()
        assert part.tolist() == [-2.0, 4.0]

    run(2, on_each(send, receive))


def test_what_cannot_be_sent_is_refused_and_the_next_message_arrives(run: Run) -> None:
    def send(group: Group) -> None:
        with pytest.raises(ConfigurationError, match=r"send moves dense tensors, not sparse_coo.*to_dense"):
            group.send([torch.ones(3).to_sparse()], 1, 0)
        group.send([torch.ones(3)], 1, 0).wait()

    def receive(group: Group) -> None:
        with pytest.raises(ConfigurationError, match=r"recv moves dense tensors"):
            group.recv([torch.ones(3).to_sparse()], 0, 0)
        group.recv([torch.zeros(3)], 0, 0).wait()

    run(2, on_each(send, receive))


def test_a_receive_from_anyone_says_from_whom_it_was(run: Run) -> None:
    def send(group: Group) -> None:
        group.send([torch.tensor([group.rank()])], 0, 3).wait()

    def receive(group: Group) -> None:
        sources = set()
        for _ in range(2):
            tensor = torch.tensor([-1])
            work = group.recv_anysource([tensor], 3)
            work.wait()
            assert work.source_rank() == work._source_rank() == tensor.item()
            sources.add(tensor.item())
        assert sources == {1, 2}

    run(3, on_each(receive, send, send))


@pytest.mark.parametrize("size", [1, 3_000, 400_000])
def test_sizes_that_differ_are_an_error_and_the_next_message_arrives(size: int, run: Run) -> None:
    def send(group: Group) -> None:
        work = group.send([torch.zeros(size)], 1, 0)
        if size == SIZES[-1]:
            with pytest.raises(MismatchError, match=f"rank 0 sent {4 * size} bytes with tag 0"):
                work.wait()
        else:
            work.wait()
        group.send([torch.ones(size)], 1, 0).wait()

    def receive(group: Group) -> None:
        with pytest.raises(MismatchError, match=rf"rank 1 received 8 bytes .* rank 0 \(host h0\).* {4 * size} bytes"):
            group.recv([torch.zeros(2)], 0, 0).wait()
        tensor = torch.zeros(size)
        group.recv([tensor], 0, 0).wait()
        assert tensor.sum() == size

    run(2, on_each(send, receive))


def test_a_message_that_does_not_come_and_one_that_nobody_takes_end_at_the_timeout(run: Run) -> None:
    is_over = threading.Barrier(2)

    def send(group: Group) -> None:
        with pytest.raises(DeadlineError, match=r"rank 1 \(host h1\) did not take the 1600000 bytes .* tag 4"):
            group.send([torch.zeros(400_000)], 1, 4).wait()
        is_over.wait(60)

    def receive(group: Group) -> None:
        tensor = torch.zeros(3)
        with pytest.raises(DeadlineError, match=r"rank 0 \(host h0\) sent nothing with tag 9"):
            group.recv([tensor], 0, 9).wait()
        with pytest.raises(DeadlineError, match="no rank sent"):
            group.recv_anysource([tensor], 9).wait()
        is_over.wait(60)

    run(2, on_each(send, receive), timeout_s=0.5)


def test_what_a_rank_sent_before_it_left_is_received_and_nothing_after_that(run: Run) -> None:
    has_left = threading.Event()

    def send(group: Group) -> None:
        for size in (10, 3_000):
            group.send([torch.full((size,), 7.0)], 1, 0).wait()
        group.shutdown()
        has_left.set()

    def receive(group: Group) -> None:
        early = group.recv([torch.zeros(5)], 0, 1)
        assert has_left.wait(60)
        for size in (10, 3_000):
            tensor = torch.zeros(size)
            group.recv([tensor], 0, 0).wait()
            assert tensor.tolist() == [7.0] * size
        for work in (early, group.recv([torch.zeros(5)], 0, 0), group.recv_anysource([torch.zeros(5)], 0)):
            with pytest.raises(PeerLostError, match=r"rank 0 \(host h0\)"):
                work.wait()

    run(2, on_each(send, receive))


def test_a_first_receive_gets_what_was_sent_by_a_rank_that_has_left_meanwhile(run: Run) -> None:
    has_left = threading.Event()

    def send(group: Group) -> None:
        group.send([torch.full((10,), 7.0)], 1, 0).wait()
        group.shutdown()
        has_left.set()

    def receive(group: Group) -> None:
        assert has_left.wait(60)
        with pytest.raises(PeerLostError):  # now this rank knows
            group.barrier().wait()
        is_asked, tensor = threading.Event(), torch.zeros(10)
        group.state.communicator.open_port("test").call_soon(is_asked.wait)  # so that all below comes to it at once
        work = group.recv([tensor], 0, 0)
        is_asked.set()
        work.wait()
        assert tensor.tolist() == [7.0] * 10

    run(2, on_each(send, receive))


def test_the_loss_of_a_rank_ends_messages_with_it_and_from_anyone(run: Run) -> None:
    is_posted = threading.Barrier(3)

    def die(group: Group) -> None:
        is_posted.wait(60)
        group.abort()

    def wait(group: Group) -> None:
        works = [group.recv([torch.zeros(5)], 0, 1), group.recv_anysource([torch.zeros(5)], 1)]
        works.append(group.send([torch.zeros(400_000)], 0, 1))
        futures = [work.get_future() for work in works]
        is_posted.wait(60)
        for work, future in zip(works, futures, strict=True):
            with pytest.raises(PeerLostError, match=r"rank 0 \(host h0\)"):
                work.wait()
            with pytest.raises(RuntimeError, match=r"PeerLostError: rank 0 \(host h0\)"):
                future.wait()
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), PeerLostError)

    run(3, on_each(die, wait, wait))


def test_only_the_other_ranks_exchange_messages(run: Run) -> None:
    def body(group: Group) -> None:
        for peer in (group.rank(), 2, -1):
            with pytest.raises(ConfigurationError, match="other ranks of its group of 2"):
                group.send([torch.zeros(1)], peer, 0)
            with pytest.raises(ConfigurationError, match="other ranks of its group of 2"):
                group.recv([torch.zeros(1)], peer, 0)
        with pytest.raises(ConfigurationError, match="send takes one tensor"):
            group.send([torch.zeros(1)] * 2, 1 - group.rank(), 0)

    run(2, body)


@pytest.mark.parametrize("size", [100, 3_000, 400_000, 2_000_000])
def test_a_tensor_may_change_as_soon_as_it_is_sent(size: int, run: Run) -> None:
    def send(group: Group) -> None:
        tensor = torch.zeros(size)
        for number in range(30):
            group.send([tensor.fill_(number)], 1, 0).wait()
            tensor.fill_(-1)

    def receive(group: Group) -> None:
        tensor = torch.zeros(size)
        for number in range(30):
            group.recv([tensor], 0, 0).wait()
            assert (tensor == number).all()

    run(2, on_each(send, receive))


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_all_sizes_arrive_in_the_order_in_which_they_were_sent(seed: int, run: Run) -> None:
    """Small ones would overtake large ones, which go another way."""
    plan = random.Random(seed)
    sizes = [plan.choice(SIZES) for _ in range(40)]
    waits = [plan.random() < 0.5 for _ in sizes]

    def send(group: Group) -> None:
        works = [group.send([torch.full((size,), float(number))], 1, 0) for number, size in enumerate(sizes)]
        for work in works:
            work.wait()

    def receive(group: Group) -> None:
        tensors = [torch.zeros(size) for size in sizes]
        works = []
        for tensor, is_awaited in zip(tensors, waits, strict=True):
            works.append(group.recv([tensor], 0, 0))
            if is_awaited:
                works[-1].wait()
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            assert (tensor == number).all()

    run(2, on_each(send, receive))


def test_messages_that_nobody_asks_for_do_not_hold_up_one_behind_them(run: Run) -> None:
    num_messages, size = 120, 16_000  # 7.7 MB: more than may lie with a receiver, or in an inbox

    def send(group: Group) -> None:
        works = [group.send([torch.full((size,), float(tag))], 1, tag) for tag in range(num_messages)]
        for work in works:
            work.wait()

    def receive(group: Group) -> None:
        for tag in reversed(range(num_messages)):
            tensor = torch.zeros(size)
            group.recv([tensor], 0, tag).wait()
            assert (tensor == tag).all()

    run(2, on_each(send, receive))


def test_each_of_several_threads_receives_what_it_asked_for(run: Run) -> None:
    num_threads, num_messages = 4, 50

    def send(group: Group) -> None:
        for number in range(num_messages):
            for tag in range(num_threads):
                group.send([torch.tensor([number, tag])], 1, tag).wait()

    def receive(group: Group) -> None:
        found: dict[int, list[list[int]]] = {tag: [] for tag in range(num_threads)}

        def body(tag: int) -> None:
            for _ in range(num_messages):
                tensor = torch.zeros(2, dtype=torch.int64)
                group.recv([tensor], 0, tag).wait()
                found[tag].append(tensor.tolist())

        threads = [threading.Thread(target=body, args=(tag,)) for tag in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {tag: [[number, tag] for number in range(num_messages)] for tag in range(num_threads)}

    run(2, on_each(send, receive))


def test_a_message_is_there_for_who_asks_without_waiting(run: Run) -> None:
    is_sent = threading.Event()

    def send(group: Group) -> None:
        group.send([torch.ones(5)], 1, 0).wait()
        is_sent.set()

    def receive(group: Group) -> None:
        tensor = torch.zeros(5)
        work = group.recv([tensor], 0, 0)
        assert is_sent.wait(60)
        group.barrier().wait()  # of a message over sockets the communication thread may know later
        while not work.is_completed():
            pass
        assert work.is_success()
        assert tensor.sum() == 5

    def send_and_meet(group: Group) -> None:
        send(group)
        group.barrier().wait()

    run(2, on_each(send_and_meet, receive))


@pytest.mark.skipif(not can_share(2), reason="this platform has no segment")
def test_an_inbox_that_cannot_be_read_is_the_loss_of_whose_it_is() -> None:
    class Broken:
        num_changes = 0

        def first(self, peer: int) -> None:
            raise RuntimeError(f"planted for {peer}")

        def wait(self, seen: int, timeout_s: float, *, num_bytes: int) -> None:
            """It looks again at once."""

        wake = put = withdraw = staticmethod(lambda *_: False)

    def body(group: Group) -> None:
        if group.rank() == 1:
            group.state.messages._inboxes = Broken()  # type: ignore[assignment]
            with pytest.raises(FabricError, match=r"rank 0 \(host h0\).*planted for 0"):
                group.recv([torch.zeros(1)], 0, 0).wait()
        group.barrier().wait()

    run_groups(2, body)


@pytest.mark.skipif(not can_share(2), reason="this platform has no segment")
@pytest.mark.parametrize("size", [1000, 200_000])
def test_messages_within_a_host_pass_no_communication_thread(size: int) -> None:
    are_sent = threading.Barrier(2)

    def body(group: Group) -> None:
        peer, sent, received = 1 - group.rank(), torch.full((size,), float(group.rank())), torch.zeros(size)
        group.barrier().wait()
        before = count_sent(group)
        for _ in range(10):
            send = group.send([sent], peer, 0)
            are_sent.wait(60)  # else a large one may be offered to who has asked for it and does not wait yet
            group.recv([received], peer, 0).wait()
            send.wait()
            assert (received == peer).all()
        assert count_sent(group) - before == Counter({MEMORY_CLASS: 10})
        group.barrier().wait()

    run_groups(2, body)


def test_a_large_message_arrives_though_nobody_waits_for_it(run: Run) -> None:
    """Or what its sender does next would never be met by a rank that has only asked for it."""

    def send(group: Group) -> None:
        group.barrier().wait()
        group.send([torch.ones(3_000_000)], 1, 0).wait()
        group.barrier().wait()

    def receive(group: Group) -> None:
        tensor = torch.zeros(3_000_000)
        work = group.recv([tensor], 0, 0)
        group.barrier().wait()
        group.barrier().wait()
        work.wait()
        assert (tensor == 1).all()

    run(2, on_each(send, receive))


def test_ranks_that_wait_for_their_large_sends_receive_meanwhile(run: Run) -> None:
    def body(group: Group) -> None:
        peer = 1 - group.rank()
        tensors = [torch.zeros(1_500_000) for _ in range(3)]
        receives = [group.recv([tensor], peer, tag) for tag, tensor in enumerate(tensors)]
        sends = [group.send([torch.full((1_500_000,), float(tag))], peer, tag) for tag in (2, 0, 1)]
        for work in (*sends, *receives):
            work.wait()
        assert [float(tensor.mean()) for tensor in tensors] == [0.0, 1.0, 2.0]

    run(2, body)


@pytest.mark.skipif(not can_share(2), reason="this platform has no segment")
def test_memory_that_cannot_be_read_is_sent() -> None:
    class Unreadable:
        def __init__(self, inboxes: Any) -> None:
            self._inboxes = inboxes

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inboxes, name)

        read = staticmethod(lambda *_: False)

    def body(group: Group) -> None:
        peer, size = 1 - group.rank(), 100_000
        group.state.messages._inboxes = Unreadable(group.state.messages._inboxes)  # type: ignore[assignment]
        tensor = torch.zeros(size)
        for number in range(5):
            send = group.send([torch.full((size,), float(number))], peer, 0)
            group.recv([tensor], peer, 0).wait()
            assert (tensor == number).all()
            send.wait()
        group.barrier().wait()

    run_groups(2, body)


def count_sent(group: Group) -> Counter[int]:
    """Return how many messages were sent in memory, and on each class of connections."""
    counts = Counter[int]()
    for connection in group.state.communicator.statistics().fabric.connections:
        counts[connection.connection_class] += connection.sent_messages
    del counts[CONTROL_CLASS]  # heartbeats
    return counts
