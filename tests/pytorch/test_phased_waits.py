"""Whoever waits for a rank of a pair is woken by each change that it may wait for, whichever thread made it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from phased_models import make_batches, make_stages, squared

from syncline.pytorch.phased import phase


class WatchedCondition(threading.Condition):
    """Lists the states in which its lock was given up without telling those who wait; ``state`` needs the lock."""

    def __init__(self, state: Callable[[], str]) -> None:
        super().__init__()
        self.untold: list[str] = []
        self.num_notifications = 0
        self._state = state
        self._told = state()
        self._is_notified = False

    def notify_all(self) -> None:
        self.num_notifications += 1
        self._is_notified = True
        super().notify_all()

    def __exit__(self, *arguments: Any) -> None:
        state = self._state()
        if state != self._told and not self._is_notified:
            self.untold.append(f"{self._told} became {state}")
        self._told, self._is_notified = state, False
        super().__exit__(*arguments)


def test_every_change_of_the_machine_is_told_to_those_who_wait(run_fleets: Any) -> None:
    """A change that is not told is seen only where a wait looks by itself, and at its deadline that may be too late."""

    def body(fleet: Any) -> tuple[list[str], int]:
        trainer = phase(make_stages(4), lambda them: torch.optim.SGD(them, lr=0.1), loss=squared, fleet=fleet)
        driver = trainer._driver
        phases = driver._phases
        with driver._changed:  # all stages have room, so nothing more happens until the first call
            assert driver._changed.wait_for(lambda: all(held.is_final for held in phases.held.values()), 60)
        condition = driver._changed = WatchedCondition(lambda: f"{phases!r}, settled: {phases.is_settled}")
        fleet.barrier()  # nobody sends before both are watched
        for step in make_batches(2, 1):
            trainer.step(*step[0])
        trainer.evaluate(step[0][0])
        trainer.synchronize()
        return condition.untold, condition.num_notifications

    for untold, num_notifications in run_fleets(2, body):
        assert not untold
        assert num_notifications
