"""What the end of a turn does, and in which order; the loop is a list of callbacks."""

from __future__ import annotations

from syncline.fabric.tick import TickEnd


class ListedLoop:
    """Keeps what is to run in the next turn."""

    def __init__(self):
        self.ready = []

    def call_soon(self, callback):
        self.ready.append(callback)

    def run_turn(self):
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()
        return len(ready)


class NotingWriter:
    """Notes on a desk that it writes."""

    def __init__(self, desk, name, connection_class, then):
        self.connection_class = connection_class
        self._desk = desk
        self._name = name
        self._then = then

    def write(self):
        self._desk.noted.append(self._name)
        self._then()


class Desk:
    """A turn's end whose grants and writes are noted in the order in which they happen."""

    def __init__(self):
        self.loop = ListedLoop()
        self.noted = []
        self.granted = []
        self.tick_end = TickEnd(self.loop, self._grant)

    def _grant(self):
        self.noted.append("grant")
        for name, connection_class in self.granted:
            self.write_soon(name, connection_class)

    def write_soon(self, name, connection_class, then=lambda: None):
        self.tick_end.write_soon(NotingWriter(self, name, connection_class, then))


def test_grants_come_first_and_control_is_written_before_data():
    desk = Desk()
    desk.write_soon("bulk", 1)
    desk.write_soon("data", 0)
    desk.write_soon("more data", 0)
    desk.write_soon("control", -1)
    desk.tick_end.grant_soon()
    desk.tick_end.grant_soon()
    num_callbacks = desk.loop.run_turn()
    assert desk.noted == ["grant", "control", "data", "more data", "bulk"]
    assert num_callbacks == 1


def test_a_writer_that_asks_twice_writes_once():
    desk = Desk()
    writer = NotingWriter(desk, "data", 0, lambda: None)
    desk.tick_end.write_soon(writer)
    desk.tick_end.write_soon(writer)
    desk.loop.run_turn()
    assert desk.noted == ["data"]


def test_a_grant_is_written_in_the_tick_that_gives_it():
    desk = Desk()
    desk.granted = [("granted", -1)]
    desk.write_soon("data", 0)
    desk.tick_end.grant_soon()
    desk.loop.run_turn()
    assert desk.noted == ["grant", "granted", "data"]
    assert not desk.loop.ready


def test_what_a_write_brings_about_belongs_to_the_next_tick():
    desk = Desk()
    desk.write_soon("first", 0, then=lambda: desk.write_soon("second", -1))
    desk.loop.run_turn()
    assert desk.noted == ["first"]
    desk.loop.run_turn()
    assert desk.noted == ["first", "second"]
    assert not desk.loop.ready
