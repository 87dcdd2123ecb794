"""Communicators that are closed whatever happens, and a check that they leave no thread behind."""

import faulthandler
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tcp_communicators import close_all, connect_all

from syncline.fabric import FabricOptions
from syncline.runtime import communicators_in_memory


@pytest.fixture
def usual_signal():
    """Leave no action for SIGUSR1 behind: what writes last calls at it leaves it to one that there is."""
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, "a test before this one left an action behind"
    yield
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


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
def in_shared_memory(in_memory):
    """Make communicators that talk in memory and have a segment."""

    def make(*args, **kwargs):
        communicators = in_memory(*args, **kwargs)
        with ThreadPoolExecutor(len(communicators)) as pool:
            assert all(pool.map(lambda communicator: communicator.open_segment(), communicators))
        return communicators

    return make


@pytest.fixture
def over_tcp():
    """Connect communicators over loopback; they are closed at the end, and their threads are gone."""
    before = set(threading.enumerate())
    made = []

    def make(topology, **settings):
        communicators = connect_all(topology, **settings)
        made.extend(communicators)
        return communicators

    yield make
    if made:
        close_all(made)
    assert set(threading.enumerate()) <= before


@pytest.fixture(params=["in memory", "over tcp", "from memory to memory"])
def anywhere(request):
    """Make communicators that talk in memory, or over TCP on loopback, with sockets or from memory to memory."""
    if request.param == "in memory":
        yield request.getfixturevalue("in_memory")
        return
    make = request.getfixturevalue("over_tcp")
    options = FabricOptions(shares_memory=request.param == "from memory to memory")

    def connect(_num_ranks, topology, *, seed, **settings):  # the order of delivery is the kernel's
        return make(topology, options=options, **settings)

    yield connect
