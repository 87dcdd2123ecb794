"""What drivers have in common: the first failure, losses, and waits that end."""

from __future__ import annotations

import time

import pytest

from memory_ports import WAIT_S, Ports, on_loop
from syncline.errors import FabricError, UpdateError
from syncline.members import Membership
from syncline.updates.messaging import Driver


class Fake(Driver):
    """A driver of nothing, that waits for all others."""

    def __init__(self, port, *, timeout_s: float = WAIT_S) -> None:
        ranks = tuple(range(port.world_size))
        super().__init__(port, Membership(ranks), timeout_s=timeout_s)
        self.num_looks = 0

    def start(self) -> None:
        on_loop(self._port, lambda: self._watch(9))

    def _on_lost(self, peer: int, error: Exception) -> None:
        with self._changed:
            self.membership.lose(peer, error)
            self._changed.notify_all()

    def _awaited_peers(self):
        return self.membership.living

    def _look(self) -> None:
        self.num_looks += 1

    def wait(self, is_over) -> None:
        self._wait(is_over, "a test")


def test_the_first_failure_counts_and_ends_a_wait() -> None:
    with Ports(1) as (port,):
        driver = Fake(port)
        driver.start()
        first = UpdateError("first")
        for error in (first, UpdateError("second")):
            port.call_soon(driver.fail, error)
        driver.wait(lambda: False)
        with pytest.raises(UpdateError, match="first") as found:
            driver.raise_failure()
        assert found.value is first


def test_a_fault_on_the_loop_ends_a_wait() -> None:
    def fault() -> None:
        raise ValueError("a fault")

    with Ports(1) as (port,):
        driver = Fake(port)
        driver.start()
        port.call_soon(fault)
        driver.wait(lambda: False)
        with pytest.raises(FabricError, match="a fault"):
            driver.raise_failure()


def test_losses_are_told_also_those_of_before() -> None:
    ports = Ports(3)
    with ports as (port, *_):
        witness = Fake(port)
        witness.start()
        ports.communicators[1].abort()
        witness.wait(lambda: 1 in witness.membership.lost)
        driver = Fake(port)
        driver.start()
        assert [*driver.membership.lost] == [1]
        ports.communicators[2].abort()
        driver.wait(lambda: 2 in driver.membership.lost)
        assert driver.membership.living == (0,)
        driver.raise_failure()


def test_the_lowest_rank_that_is_left_says_who_was_lost_and_nobody_who_left(capfd) -> None:
    ports = Ports(4)
    with ports as (_, *others):
        drivers = [Fake(port) for port in others]
        for driver in drivers:
            driver.start()
        ports.communicators[0].abort()
        ports.communicators[3].close()
        for port, driver in zip(others[:2], drivers, strict=False):
            driver.wait(lambda driver=driver: {0, 3} <= driver.membership.lost)
            on_loop(port, lambda: None)
        (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("syncline: rank 0 (host memory) ")
    assert line.endswith("; the others go on without it")


def test_a_wait_looks_for_what_holds_it_up() -> None:
    with Ports(1) as (port,):
        driver = Fake(port)
        driver.wait(lambda: driver.num_looks == 2)
        assert driver.num_looks == 2


def test_a_wait_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.updates.messaging.STALL_GRACE_S", 0.1)
    with Ports(1) as (port,):
        driver, begun_s = Fake(port, timeout_s=0.6), time.monotonic()
        driver.wait(lambda: False)
        assert time.monotonic() - begun_s >= 0.6
        driver.raise_failure()


def test_who_lives_but_does_not_train_is_left_behind_once_it_was_waited_for() -> None:
    """Ranks 1 and 2 hang; nobody waits for rank 2, as it is known to be lost already."""
    with Ports(3) as (port, *_):
        driver = Fake(port)
        driver.start()
        stalls = port.stalls
        stalls.limit_s = 0.2
        for passed_s in (0.0, 30.0):
            on_loop(port, lambda passed_s=passed_s: stalls.tick(passed_s, {1: 4, 2: 4}))
        known = UpdateError("rank 2 is lost")
        on_loop(port, lambda: driver._on_lost(2, known))
        driver.wait(lambda: 1 in driver.membership.lost)
        losses = driver.membership.losses
        assert "rank 1 (host memory) lives, but its training thread has made no call for" in str(losses[1].error)
        assert losses[2].error is known
