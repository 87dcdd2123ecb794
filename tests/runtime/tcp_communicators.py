"""Communicators of this process that talk over TCP on loopback."""

from concurrent.futures import ThreadPoolExecutor

from meeting_stores import DictStore
from syncline.fabric import FabricOptions
from syncline.runtime import Communicator


def connect_all(topology, *, options=None, store=None, **settings):
    store = store or DictStore()

    def connect(rank):
        return Communicator.connect(
            rank=rank,
            world_size=topology.num_ranks,
            topology=topology,
            store=store,
            options=options or FabricOptions(),
            **settings,
        )

    with ThreadPoolExecutor(topology.num_ranks) as pool:
        return list(pool.map(connect, range(topology.num_ranks)))


def close_all(communicators):
    with ThreadPoolExecutor(len(communicators)) as pool:
        list(pool.map(Communicator.close, communicators))
