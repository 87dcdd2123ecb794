"""Where a rank listens whose job meets in a store, and nobody says where."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from syncline.errors import ConfigurationError, RendezvousError
from syncline.pytorch import connecting
from syncline.pytorch.connecting import connect
from syncline.pytorch.environment import Arguments, Environment, read_environment
from syncline.pytorch.stores import TorchStore
from syncline.testing import run_threads


def environment_of(rank: int, interface: str | None = None) -> Environment:
    given = Arguments(rank=rank, world_size=2, interface=interface)
    return read_environment({}, given, has_store=True)


def test_ranks_of_several_machines_listen_where_the_store_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        underlying_store = dist.HashStore()

    monkeypatch.setattr(connecting.socket, "gethostname", lambda: "127.0.0.1")
    with pytest.raises(ConfigurationError, match=r"several machines.*'127.0.0.1'.*BackendOptions\(interface=\)"):
        connecting.reachable_address(Named())
    monkeypatch.setattr(connecting, "own_address", lambda host: {"10.0.0.9": "10.0.0.2"}[host])
    store = dist.HashStore()
    monkeypatch.setattr(connecting.socket, "gethostname", lambda: "10.0.0.9")
    assert connecting.reachable_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "10.0.0.2"


def test_ranks_find_out_in_their_store_whether_they_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    place = threading.local()
    monkeypatch.setattr(connecting, "machine_name", lambda: place.name)
    monkeypatch.setattr(connecting, "reachable_address", lambda _: f"10.0.0.{place.name}")
    store = dist.HashStore()

    def interfaces(names: str, given: str | None = None) -> list[str | None]:
        def on_rank(rank: int) -> str | None:
            place.name = names[rank]
            own = environment_of(rank, given if rank else None)
            return connecting.choose_interface(own, TorchStore(store), store).interface

        found: list[str | None] = run_threads(2, on_rank)
        return found

    assert interfaces("11") == ["127.0.0.1", "127.0.0.1"]
    assert interfaces("12") == ["10.0.0.1", "10.0.0.2"]
    assert interfaces("12", "eth1") == ["10.0.0.1", "eth1"]


@pytest.mark.parametrize(("name", "is_told"), [("a0", True), ("localhost", False), ("127.0.0.1", False)])
def test_rank_0_says_where_it_waits_that_a_name_is_its_loopback(name: str, is_told: bool) -> None:
    """As Debian has a host's own name, so that ranks of other hosts go elsewhere."""
    given = Arguments(rank=0, world_size=2, master=f"{name}:29500", connect_timeout_s=0.3)
    read = read_environment({}, given)
    with pytest.raises(RendezvousError, match="rank 1 did not come") as raised:
        connect(read._replace(fabric=replace(read.fabric, address="127.0.0.1")), lambda _: TorchStore(dist.HashStore()))
    assert (f"{name} means loopback on this host" in str(raised.value)) == is_told
