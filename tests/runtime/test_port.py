"""A port beside the collectives: what its user hears when something goes wrong on the loop."""

import threading

from syncline.errors import FabricError
from syncline.fabric import PeerLeftError
from syncline.runtime import communicators_in_memory


def test_an_exception_that_nobody_catches_is_told_to_every_port_until_it_is_closed() -> None:
    """The engine may have failed long before, of a lost rank: then it says nothing more."""
    communicators = communicators_in_memory(2)
    heard: list[tuple[int, Exception]] = []
    has_heard = threading.Event()

    def on_lost(peer: int, error: Exception) -> None:
        heard.append((peer, error))
        has_heard.set()

    def fail(what: str) -> None:
        raise ValueError(what)

    with communicators[0] as first, communicators[1] as second:
        port, closed = first.open_port("one"), second.open_port("other")
        for one in (port, closed):
            one.call_soon(one.watch_losses, on_lost)
        closed.call_soon(closed.close)
        port.call_soon(fail, "a fault")
        assert has_heard.wait(60)
        ((peer, error),) = heard
        assert peer == 0
        assert isinstance(error, FabricError)
        assert str(error) == "the communication loop of rank 0 (host memory) failed: ValueError('a fault')"
        port.call_soon(port.close)


def test_who_watches_late_hears_of_those_who_left_as_of_those_who_were_lost() -> None:
    """A rank that left in good order is not one that was lost: who needs it no more goes on."""
    communicators = communicators_in_memory(3)
    heard: dict[int, Exception] = {}
    has_heard = threading.Event()
    early, late = threading.Event(), {}

    def on_lost(peer: int, error: Exception) -> None:
        heard[peer] = error
        has_heard.set()

    with communicators[0] as first, communicators[1]:
        port = first.open_port("one")
        port.call_soon(port.watch_losses, lambda peer, error: (late.update({peer: error}), early.set()))
        communicators[2].close()
        assert early.wait(10)
        other = first.open_port("two")
        other.call_soon(other.watch_losses, on_lost)
        assert has_heard.wait(10)
        assert heard == late
        assert isinstance(heard[2], PeerLeftError)
        for one in (port, other):
            one.call_soon(one.close)
