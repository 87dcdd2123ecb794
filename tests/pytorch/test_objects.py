"""Collectives on Python objects, and where they are refused."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from syncline.errors import ConfigurationError, MismatchError
from syncline.fabric import FabricOptions
from syncline.pytorch.connecting import is_exposed
from syncline.pytorch.fleet import Fleet


@dataclass(frozen=True)
class Metrics:
    """What a rank would tell of its epoch."""

    rank: int
    losses: list[float]


class Explosive:
    """Tells where it is unpickled."""

    places: list[int] = []  # noqa: RUF012 - shared by all ranks on purpose

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return _explode, (self.rank,)


def _explode(rank: int) -> int:
    Explosive.places.append(threading.get_ident())
    return rank


@pytest.mark.parametrize("is_in_shared_memory", [False, True])
def test_objects_of_different_sizes(is_in_shared_memory: bool, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> tuple[Any, Any, Any]:
        if is_in_shared_memory:
            fleet.communicator.open_segment()
        ours = Metrics(fleet.rank, [0.5] * 1000 * fleet.rank)
        given = {"rank": 1, "weights": torch.arange(3.0)} if fleet.rank == 1 else None
        sent = fleet.broadcast_object(given, root=1)
        assert torch.equal(sent["weights"], torch.arange(3.0))
        assert (sent is given) == (fleet.rank == 1)
        return fleet.all_gather_object(ours), fleet.gather_object(ours, dst=2), fleet.all_gather_object(None)

    everything = [Metrics(rank, [0.5] * 1000 * rank) for rank in range(3)]
    for rank, (gathered, at_one, nothing) in enumerate(run_fleets(3, body)):
        assert gathered == everything
        assert at_one == (everything if rank == 2 else None)
        assert nothing == [None] * 3


def test_only_the_destination_loads_the_pickles(run_fleets: Any) -> None:
    Explosive.places.clear()

    def body(fleet: Fleet) -> int:
        fleet.gather_object(Explosive(fleet.rank), dst=1)
        return threading.get_ident()

    threads = run_fleets(3, body)
    assert Explosive.places == [threads[1]] * 3


def test_what_cannot_be_pickled_is_an_error_on_every_rank(run_fleets: Any) -> None:
    def gather(fleet: Fleet) -> None:
        with pytest.raises(ConfigurationError, match="rank 1 cannot be pickled"):
            fleet.all_gather_object(threading.Lock() if fleet.rank == 1 else 3)
        with pytest.raises(ConfigurationError, match="rank 2 cannot be pickled"):
            fleet.broadcast_object(threading.Lock() if fleet.rank == 2 else None, root=2)
        assert fleet.all_gather_object(fleet.rank) == [0, 1, 2]

    run_fleets(3, gather)


def test_different_calls_on_objects_are_a_mismatch(run_fleets: Any) -> None:
    have_failed = threading.Barrier(3)

    def body(fleet: Fleet) -> str:
        with pytest.raises(MismatchError) as caught:
            fleet.gather_object(1, dst=0) if fleet.rank == 1 else fleet.all_gather_object(1)
        have_failed.wait(60)
        return str(caught.value)

    for text in run_fleets(3, body):
        assert "(for rank 0; gather_object)" in text
        assert "(all_gather_object)" in text


def test_strangers_pickles_are_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        exposed = Fleet(fleet.communicator, is_trusted=False)
        for call in (exposed.all_gather_object, exposed.gather_object, exposed.broadcast_object):
            with pytest.raises(ConfigurationError, match="give all ranks a secret"):
                call(1)
        with pytest.raises(ConfigurationError, match="dst must be a rank, 0 to 1, not 2"):
            fleet.gather_object(1, dst=2)

    run_fleets(2, body)


def test_who_is_a_stranger() -> None:
    assert not is_exposed(FabricOptions(address="10.0.0.1"))  # the fabric will refuse that
    assert not is_exposed(FabricOptions(insecure=True))
    assert not is_exposed(FabricOptions(insecure=True, address="127.0.0.1"))
    assert is_exposed(FabricOptions(insecure=True, address="10.0.0.1"))
