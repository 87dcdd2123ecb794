"""Packing parameters into buckets, for any sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from syncline.errors import ConfigurationError
from syncline.updates.bucket import ParameterEntry, Slot, plan_buckets

entries = st.lists(
    st.builds(
        lambda number, group, dtype: ParameterEntry(
            name="p", group=group, shape=(number,), stride=(1,), dtype=dtype, device=torch.device("cpu")
        ),
        st.integers(1, 300),
        st.integers(0, 2),
        st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    min_size=1,
    max_size=40,
)


@given(entries=entries, bucket_bytes=st.integers(1, 1000))
def test_every_parameter_has_one_place(entries: list[ParameterEntry], bucket_bytes: int) -> None:
    plans = plan_buckets(entries, bucket_bytes=bucket_bytes)
    positions = [slot.position for plan in plans for slot in plan.slots]
    assert sorted(positions) == list(range(len(entries)))
    assert [plan.index for plan in plans] == list(range(len(plans)))
    first = [plan.slots[0].position for plan in plans]
    assert first == sorted(first), "buckets are numbered in forward order"
    for plan in plans:
        edges = [0, *(slot.stop for slot in plan.slots)]
        assert [slot.start for slot in plan.slots] == edges[:-1]
        assert plan.num_elements == sum(slot.num_elements for slot in plan.slots)
        for slot in plan.slots:
            entry = entries[slot.position]
            assert (entry.group, entry.dtype, entry.num_elements) == (plan.group, plan.dtype, slot.num_elements)
        first_bytes = plan.slots[0].num_elements * plan.dtype.itemsize
        assert plan.num_bytes <= max(bucket_bytes, first_bytes) + bucket_bytes // 8


@given(entries=entries, bucket_bytes=st.integers(1, 1000))
def test_a_small_parameter_opens_a_bucket_only_where_the_last_of_its_kind_is_full(
    entries: list[ParameterEntry], bucket_bytes: int
) -> None:
    last: dict[tuple[int, torch.dtype], int] = {}
    for plan in plan_buckets(entries, bucket_bytes=bucket_bytes):
        kind = (plan.group, plan.dtype)
        opener_bytes = plan.slots[0].num_elements * plan.dtype.itemsize
        if kind in last and opener_bytes <= bucket_bytes // 8:
            assert last[kind] + opener_bytes > bucket_bytes // 4
        last[kind] = plan.num_bytes


def entry(num_elements: int) -> ParameterEntry:
    return ParameterEntry(
        name="p", group=0, shape=(num_elements,), stride=(1,), dtype=torch.float32, device=torch.device("cpu")
    )


def test_a_bias_goes_with_the_weight_that_fills_the_bucket() -> None:
    layers = [entry(size) for _ in range(6) for size in (1 << 20, 1 << 10)]
    sizes = [plan.num_bytes for plan in plan_buckets(layers, bucket_bytes=4 << 20)]
    assert sizes == [(4 << 20) + (4 << 10)] * 6


def test_many_small_parameters_do_not_make_a_bucket_large() -> None:
    sizes = [plan.num_bytes for plan in plan_buckets([entry(256)] * 100, bucket_bytes=16 << 10)]
    assert sizes == [6 << 10, 10 << 10, *[18 << 10] * 4, 8 << 10, 4 << 10]


def test_the_first_and_the_last_buckets_are_small() -> None:
    sizes = [plan.num_bytes for plan in plan_buckets([entry(128)] * 30, bucket_bytes=2048)]
    assert sizes == [512, 1024, *[2048] * 6, 1024, 512]


def test_a_bias_goes_with_its_weight_at_the_rear_too() -> None:
    layers = [entry(size) for _ in range(16) for size in (1 << 18, 1 << 8)]
    sizes = [len(plan.slots) for plan in plan_buckets(layers, bucket_bytes=4 << 20)]
    assert sizes == [2, 4, 8, 8, 4, 4, 2]


def test_crumbs_between_the_large_buckets_and_the_last_go_with_these() -> None:
    sizes = [plan.num_bytes for plan in plan_buckets([entry(128)] * 13 + [entry(16)] * 4, bucket_bytes=2048)]
    assert sizes == [512, 1024, 2048, 1536, 1024, 768]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="bucket_bytes"):
        plan_buckets([], bucket_bytes=0)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_slots_keep_the_memory_order(memory_format: torch.memory_format) -> None:
    value = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5).contiguous(memory_format=memory_format)
    slot = Slot(name="p", position=0, start=7, stop=127, shape=(2, 3, 4, 5), stride=value.stride())
    flat = torch.zeros(130)
    slot.view(flat).copy_(value)
    assert torch.equal(slot.view(flat), value)
    assert torch.equal(flat[7:127], slot.flatten(value))
    assert torch.equal(slot.flatten(value.contiguous()), slot.flatten(value))
    assert flat[:7].eq(0).all()
    assert flat[127:].eq(0).all()
