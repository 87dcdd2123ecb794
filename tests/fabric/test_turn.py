"""What a turn does, and in which order; the loop is a list of callbacks, and the sockets are pairs."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing, contextmanager

from syncline.fabric.turn import MAX_ROUNDS, Turns


class ListedLoop:
    """Keeps what is to run next, and what it watches."""

    def __init__(self):
        self.ready = []
        self.readers = {}

    def call_soon(self, callback):
        self.ready.append(callback)

    def add_reader(self, descriptor, callback):
        self.readers[descriptor] = callback

    def remove_reader(self, descriptor):
        del self.readers[descriptor]

    def run_ready(self):
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()
        return len(ready)

    def wake(self):
        """Do as if the only descriptor that is watched could be read."""
        (callback,) = self.readers.values()
        callback()


class Desk:
    """Turns whose grants and writes are noted in the order in which they happen."""

    def __init__(self):
        self.loop = ListedLoop()
        self.noted = []
        self.granted = []
        self.turns = Turns(self.loop, self._grant)

    def close(self):
        self.turns.close()

    def _grant(self):
        self.noted.append("grant")
        for name, connection_class in self.granted:
            self.write_soon(name, connection_class)

    def write_soon(self, name, connection_class, then=lambda: None):
        def write():
            self.noted.append(name)
            then()

        self.turns.write_soon(connection_class, write)

    @contextmanager
    def socket(self, name, then=lambda: None):
        """Watch one end of a pair, whose reads are noted, and yield the other."""
        here, there = socket.socketpair()
        here.setblocking(False)

        def read():
            self.noted.append((name, here.recv(10)))
            then()

        with here, there:
            self.turns.watch(here.fileno(), read)
            yield here, there
            self.turns.forget(here.fileno())


def test_grants_come_first_and_control_is_written_before_data():
    with closing(Desk()) as desk:
        desk.write_soon("bulk", 1)
        desk.write_soon("data", 0)
        desk.write_soon("more data", 0)
        desk.write_soon("control", -1)
        desk.turns.grant_soon()
        desk.turns.grant_soon()
        num_callbacks = desk.loop.run_ready()
    assert desk.noted == ["grant", "control", "data", "more data", "bulk"]
    assert num_callbacks == 1


def test_a_grant_is_written_in_the_turn_that_gives_it():
    with closing(Desk()) as desk:
        desk.granted = [("granted", -1)]
        desk.write_soon("data", 0)
        desk.turns.grant_soon()
        desk.loop.run_ready()
    assert desk.noted == ["grant", "granted", "data"]
    assert not desk.loop.ready


def test_what_all_reads_ask_for_is_done_at_once_when_the_last_has_read():
    with closing(Desk()) as desk:

        def ask():
            desk.turns.grant_soon()
            desk.write_soon("written", 0)

        with desk.socket("a", ask) as (_, a), desk.socket("b", ask) as (_, b):
            a.send(b"1")
            b.send(b"2")
            desk.loop.wake()
        assert sorted(desk.noted[:2]) == [("a", b"1"), ("b", b"2")]
        assert desk.noted[2:] == ["grant", "written", "written"]
        assert not desk.loop.ready, "the loop need not come again"


def test_what_arrives_while_a_turn_writes_belongs_to_it_but_not_forever():
    with closing(Desk()) as desk:
        echoed = []

        def echo():
            desk.turns.write_soon(0, lambda: echoed.append(there.send(b"x")))

        with desk.socket("a", echo) as (_, there):
            there.send(b"x")
            desk.loop.wake()
        assert desk.noted == [("a", b"x")] * MAX_ROUNDS
        assert len(echoed) == MAX_ROUNDS


def test_what_a_write_brings_about_is_written_after_all_others():
    with closing(Desk()) as desk:
        desk.write_soon("first", 0, then=lambda: desk.write_soon("third", -1))
        desk.write_soon("second", 0)
        desk.loop.run_ready()
        assert desk.noted == ["first", "second", "third"]
        assert not desk.loop.ready


def test_what_is_left_when_the_rounds_are_over_is_done_when_the_loop_comes_again():
    with closing(Desk()) as desk:

        def again():
            desk.write_soon("again", 0, then=again)

        again()
        desk.loop.run_ready()
        assert len(desk.noted) == MAX_ROUNDS
        desk.loop.run_ready()
        assert len(desk.noted) == 2 * MAX_ROUNDS


def test_a_callback_that_fails_keeps_no_other_from_being_done():
    noted, failures = [], []

    def fail():
        raise ZeroDivisionError

    async def scenario():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(type(context["exception"])))
        turns = Turns(loop)
        for connection_class, write in enumerate((lambda: noted.append("before"), fail, lambda: noted.append("after"))):
            turns.write_soon(connection_class, write)
        await asyncio.sleep(0)
        turns.close()

    asyncio.run(scenario())
    assert noted == ["before", "after"]
    assert failures == [ZeroDivisionError]


def test_a_writer_is_called_as_long_as_the_kernel_takes_more():
    with closing(Desk()) as desk, desk.socket("a") as (here, _):
        desk.turns.watch_writer(here.fileno(), lambda: desk.noted.append("writable"))
        desk.loop.wake()
        desk.loop.wake()
        desk.turns.watch_writer(here.fileno(), None)
        desk.loop.wake()
    assert desk.noted == ["writable"] * 2


def test_a_socket_that_another_read_forgets_is_not_read():
    with closing(Desk()) as desk, desk.socket("a") as (a, to_a), desk.socket("b") as (b, to_b):

        def forget_both():
            desk.noted.append("forgotten")
            desk.turns.forget(a.fileno())
            desk.turns.forget(b.fileno())

        for sock in (a, b):
            desk.turns.forget(sock.fileno())
            desk.turns.watch(sock.fileno(), forget_both)
        to_a.send(b"1")
        to_b.send(b"2")
        desk.loop.wake()
    assert desk.noted == ["forgotten"]


def test_nothing_is_watched_after_the_close():
    desk = Desk()
    desk.write_soon("late", 0)
    desk.close()
    desk.close()
    assert not desk.loop.readers
    desk.loop.run_ready()
    assert desk.noted == ["late"], "a write knows by itself whether its connection is closed"
