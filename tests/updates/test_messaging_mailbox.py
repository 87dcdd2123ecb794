"""Numbered messages, and texts with payloads, on ports in memory; messages arrive in a random order."""

import struct
import threading
from functools import partial

import pytest

from memory_ports import WAIT_S, Ports, on_loop
from syncline.errors import UpdateError
from syncline.updates.messaging import HEAD_BYTES, MAX_TEXT_BYTES, Mailbox, MessageStream

STREAM = 9
PUSH, ANSWER = range(2)


@pytest.mark.parametrize("seed", range(3))
def test_each_kind_is_received_in_the_order_in_which_it_was_sent(seed: int) -> None:
    heard: dict[int, list[bytes]] = {PUSH: [], ANSWER: []}
    done = threading.Event()

    def receive(stream: MessageStream, kind: int) -> None:
        memory = memoryview(bytearray(1))

        def received() -> None:
            heard[kind].append(bytes(memory))
            receive(stream, kind)
            if sum(map(len, heard.values())) == 6:
                done.set()

        stream.receive(0, kind, memory, received)

    with Ports(2, seed) as ports:
        sender, receiver = (MessageStream(port, STREAM, urgency=0) for port in ports)

        def begin() -> None:
            for kind in heard:
                receive(receiver, kind)
            for number in range(3):
                for kind in heard:
                    sender.send(1, kind, memoryview(bytearray([10 * kind + number])))

        on_loop(ports[0], begin)
        assert done.wait(WAIT_S)
    assert heard == {PUSH: [b"\x00", b"\x01", b"\x02"], ANSWER: [b"\x0a", b"\x0b", b"\x0c"]}


def test_who_is_retired_sends_nothing_and_is_told_nothing_but_its_memory_is_written() -> None:
    """A later stream of the same number has other tags, so it begins anew."""
    told: list[str] = []
    done = threading.Event()
    landing, next_landing = memoryview(bytearray(1)), memoryview(bytearray(1))
    with Ports(2) as ports:
        sender, old = (MessageStream(port, STREAM, urgency=0) for port in ports)
        retired, later = (MessageStream(ports[0], STREAM, urgency=0, epoch=epoch) for epoch in (0, 1))
        new = MessageStream(ports[1], STREAM, urgency=0, epoch=1)

        def begin() -> None:
            old.receive(0, PUSH, landing, partial(told.append, "old"))
            old.retire()
            new.receive(0, PUSH, next_landing, done.set)
            retired.retire()
            retired.send(1, PUSH, memoryview(bytearray(b"x")))
            sender.send(1, PUSH, memoryview(bytearray(b"1")))
            later.send(1, PUSH, memoryview(bytearray(b"2")))

        on_loop(ports[0], begin)
        assert done.wait(WAIT_S)
        on_loop(ports[0], lambda: None)
    assert told == []
    assert (bytes(landing), bytes(next_landing)) == (b"1", b"2")


def test_a_receive_that_is_cancelled_is_given_back() -> None:
    with Ports(2) as ports:
        stream = MessageStream(ports[0], STREAM, urgency=0)

        def begin() -> None:
            stream.receive(1, PUSH, memoryview(bytearray(1)), lambda: None)
            stream.cancel(1, PUSH)

        on_loop(ports[0], begin)
        assert "0 receives" in repr(ports[0])


def lengths(text: bytes) -> tuple[list[memoryview], list[memoryview]]:
    """A message that says how long its payloads are."""
    sizes = [int(size) for size in text.split(b".")[0].split(b",") if size]
    payloads = [memoryview(bytearray(size)) for size in sizes]
    return payloads, payloads


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("receiver", [0, 1])
def test_messages_arrive_whole_and_in_order_each_when_it_is_asked_for(seed: int, receiver: int) -> None:
    """Also at the sender itself. Texts are short, and longer than a head; of payloads some are empty."""
    messages = [[5, 3], [], [0], [7, 0, 1], [4]]
    texts = [b",".join(b"%d" % size for size in sizes) + b"." * (500 * sum(sizes)) for sizes in messages]
    heard: list[list[bytes]] = []
    sent: list[int] = []
    done = threading.Event()

    def on_message(peer: int, payloads: list[memoryview]) -> None:
        assert peer == 0
        heard.append([bytes(memory) for memory in payloads])
        boxes[receiver].listen(peer)
        if len(heard) == len(messages):
            done.set()

    with Ports(2, seed) as ports:
        streams = [MessageStream(port, STREAM, urgency=0) for port in ports]
        boxes = [
            Mailbox(stream, stream, decode=lengths, on_message=on_message, on_lost=pytest.fail) for stream in streams
        ]

        def begin() -> None:
            boxes[receiver].listen(0)
            for number, (sizes, text) in enumerate(zip(messages, texts, strict=True)):
                payloads = [memoryview(bytearray([number] * size)) for size in sizes]
                num_bytes = boxes[0].send(receiver, text, payloads, partial(sent.append, number))
                assert num_bytes == max(HEAD_BYTES, len(text) + 4) + sum(sizes)

        on_loop(ports[0], begin)
        assert done.wait(WAIT_S)
        on_loop(ports[0], lambda: None)
    assert heard == [[bytes([number] * size) for size in sizes] for number, sizes in enumerate(messages)]
    assert sorted(sent) == [*range(len(messages))]
    assert boxes[0].sent_bytes.total() == sum(max(HEAD_BYTES, len(text) + 4) for text in texts) + 20


@pytest.mark.parametrize("head", [struct.pack("<I", 3) + b"no!", struct.pack("<I", MAX_TEXT_BYTES + 1)])
def test_who_sends_nonsense_is_lost_and_nothing_more_is_heard(head: bytes) -> None:
    told: list[tuple[int, Exception]] = []
    done = threading.Event()

    def on_lost(peer: int, error: Exception) -> None:
        told.append((peer, error))
        done.set()

    with Ports(2) as ports:
        sender, receiver = (MessageStream(port, STREAM, urgency=0) for port in ports)
        box = Mailbox(receiver, receiver, decode=lengths, on_message=pytest.fail, on_lost=on_lost)

        def begin() -> None:
            box.listen_to_all()
            for _ in range(2):
                sender.send(1, Mailbox.HEAD, memoryview(bytearray(head.ljust(HEAD_BYTES, b"\0"))))

        on_loop(ports[0], begin)
        assert done.wait(WAIT_S)
        on_loop(ports[0], lambda: None)
    ((peer, error),) = told
    assert peer == 0
    assert isinstance(error, UpdateError)
    assert str(error).startswith("rank 0 (host memory) sent ")
