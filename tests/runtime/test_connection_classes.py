"""When connections are opened, and whose sizes they have, where several models share them; no sockets."""

import asyncio

import pytest

from syncline.priorities.settings import Priorities
from syncline.runtime.communicator import ConnectionClasses

FOUR = Priorities()
FIRST, SECOND = 10, 20
"""The streams of two models."""


class RecordingFabric:
    def __init__(self):
        self.log = []

    async def open_classes(self, priorities, *, timeout_s, only_check):
        assert timeout_s == 5.0
        self.log.append(f"{'check' if only_check else 'open'} {priorities.num_classes}")


class Loop:
    """Runs at once what a communication loop would."""

    def run(self, coroutine, timeout_s):
        assert timeout_s > 0
        return asyncio.run(coroutine)


@pytest.fixture(name="fabric")
def _fabric():
    return RecordingFabric()


@pytest.fixture(name="classes")
def _classes(fabric):
    return ConnectionClasses(fabric, Loop(), timeout_s=5.0)


def test_what_is_only_noted_or_checked_opens_nothing(fabric, classes):
    classes.assign(FIRST, (0, 0))
    classes.open(FOUR, only_check=True)
    classes.assign(FIRST, (0, 0), FOUR)
    assert fabric.log == ["check 4"], "sizes were those of one class all the time"


def test_sizes_are_those_of_one_class_once_no_model_has_several(fabric, classes):
    classes.assign(FIRST, (0, 1), FOUR)
    classes.assign(SECOND, (0, 0, 3), FOUR)
    classes.assign(FIRST, (0, 0), FOUR)
    assert fabric.log == ["open 4"] * 2
    classes.assign(SECOND, (0, 0, 0), FOUR)
    assert fabric.log[2:] == ["open 1"]
    classes.assign(SECOND, (0, 0, 0), FOUR)
    assert fabric.log[2:] == ["open 1"], "once is enough"


def test_classes_that_were_open_from_the_start_are_given_back_too(fabric, classes):
    classes.open(FOUR)
    classes.assign(FIRST, (0, 0), FOUR)
    classes.assign(FIRST, (0, 1), FOUR)
    assert fabric.log == ["open 4", "open 1", "open 4"]


def test_a_single_class_has_nothing_to_give_back(fabric, classes):
    classes.open(Priorities.off())
    classes.assign(FIRST, (0, 0), Priorities.off())
    assert fabric.log == ["open 1"]
