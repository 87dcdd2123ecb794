"""Which ranks of a group share a host, and what NCCL is asked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from syncline.backend import inner_groups
from syncline.backend.inner_groups import PLACE_BYTES, DevicePlace, NcclBackend, divide_by_hosts
from syncline.pytorch.connecting import machine_name


@pytest.mark.parametrize(
    ("places", "hosts"),
    [
        ("a0 a1 b0 b1", ((0, 1), (2, 3))),
        ("b0 a0 a1 b1", ((0, 3), (1, 2))),
        ("a0 a1 a2", ((0, 1, 2),)),
        ("a0 a1 b0", ()),
        ("a0 b0", ()),
        ("a0 a0 b0 b1", ()),
        ("a0 a1 b0 -", ()),
        ("- -", ()),
    ],
)
def test_hosts_of_equal_numbers_of_devices_alone(places: str, hosts: Sequence[Sequence[int]]) -> None:
    told = [DevicePlace(host="" if name == "-" else name[0], device=name[1:]) for name in places.split()]
    assert divide_by_hosts([DevicePlace.decode(place.encode()) for place in told]) == hosts


def test_a_place_is_told_in_as_many_bytes_whatever_its_names() -> None:
    for place in (DevicePlace(host="", device=""), DevicePlace(host="h" * 32, device="GPU-" + "0" * 36)):
        assert DevicePlace.decode(place.encode()) == place
    for long in (DevicePlace(host="h" * 99, device="d" * 99), DevicePlace(host="höst", device="d")):
        assert len(long.encode()) == PLACE_BYTES


def test_a_gpu_is_known_by_its_own_number_where_there_is_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of {device}"))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert NcclBackend().find_place(gpu) == DevicePlace(host=machine_name(), device="of cuda:1")
    assert not NcclBackend().find_place(torch.device("cpu")).host
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not NcclBackend().find_place(gpu).host


def test_nccl_is_opened_in_the_store_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(inner_groups, "nccl_group", lambda *given, **named: asked.append((given, named)))
    NcclBackend().open("store", rank=1, size=2, timeout_s=9.0)
    assert asked == [(("store", 1, 2), {"timeout_s": 9.0})]
