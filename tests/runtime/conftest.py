"""Communicators that are closed whatever happens, and a check that they leave no thread behind."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncline.runtime import communicators_in_memory


@pytest.fixture
def in_memory():
    """Make communicators that talk in memory; all are closed at the end, and their threads are gone."""
    before = set(threading.enumerate())
    made = []

    def make(*args, **kwargs):
        communicators = communicators_in_memory(*args, **kwargs)
        made.extend(communicators)
        return communicators

    yield make
    for communicator in made:
        communicator.abort()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def at_a_board(in_memory):
    """Make communicators that talk in memory and have a board."""

    def make(*args, **kwargs):
        communicators = in_memory(*args, **kwargs)
        with ThreadPoolExecutor(len(communicators)) as pool:
            assert all(pool.map(lambda communicator: communicator.open_board(), communicators))
        return communicators

    return make
