"""Which tensors are sent as they are, and what is known of the memory of several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from syncline.tensors.memory import (
    ScratchPool,
    host_memory_of,
    is_plain,
    joined,
    landing_memory_of,
    overlap,
    put_back,
    shares_memory,
    touches,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4).t(),
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(4)[::2],
    ],
)
def test_what_is_not_simply_there_is_copied_and_put_back(tensor: torch.Tensor) -> None:
    assert not is_plain(tensor)
    host, landing = host_memory_of(tensor), landing_memory_of(tensor)
    assert is_plain(host)
    assert torch.equal(host, tensor)
    assert is_plain(landing)
    assert landing.shape == tensor.shape
    assert not shares_memory(host, tensor)
    put_back(host * 2, tensor)
    assert torch.equal(tensor, host * 2)


def test_elements_that_share_memory_take_the_first_ones_value() -> None:
    tensor = torch.zeros(2, 1, 3)[:, :, :1].expand(2, 4, 3)
    put_back(torch.arange(24.0).view(2, 4, 3), tensor)
    assert tensor[:, 0, 0].tolist() == [0.0, 12.0]
    assert torch.equal(tensor, tensor[:, :1, :1].expand(2, 4, 3))
    nothing = torch.ones(1, 0).expand(4, 0)
    put_back(nothing.clone(), nothing)


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(4, 3)[1:3], torch.empty(0), torch.tensor(1.0)])
def test_what_is_simply_there_is_sent_from_there(tensor: torch.Tensor) -> None:
    assert is_plain(tensor)
    for host in (host_memory_of(tensor), landing_memory_of(tensor)):
        assert shares_memory(host, tensor)


def test_neighbours_are_one_tensor() -> None:
    whole = torch.arange(8.0)
    parts = list(whole[1:].split([2, 1, 4]))
    found = joined(parts)
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4, 5, 6, 7]
    found.zero_()
    assert whole.eq(0).all()
    rows = joined(list(torch.arange(6.0).reshape(3, 2)))
    assert rows is not None
    assert rows.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(2), torch.ones(2)],
        list(torch.ones(4).split(2))[::-1],
        [torch.ones(4)[:2], torch.ones(4)[2:]],
        list(torch.ones(4, 2).t()),
        [torch.ones(2)] * 2,
    ],
)
def test_others_are_not(tensors: list[torch.Tensor]) -> None:
    assert joined(tensors) is None


def test_memory_in_common() -> None:
    whole = torch.ones(10)
    parts = list(whole.split([3, 0, 3, 4]))
    assert not overlap(parts)
    assert overlap([*parts, whole[2:4]])
    assert overlap([whole, whole])
    assert not overlap([torch.empty(0), torch.empty(0)])
    assert touches([parts[0], parts[3]], [torch.ones(3), whole[2:5]])
    assert touches([parts[0], parts[3]], [whole[9:]])
    assert touches([parts[0]], [whole])
    assert not touches([parts[0], parts[3]], [parts[2], parts[1], torch.ones(3)])


def test_scratch_is_lent_to_one_at_a_time() -> None:
    pool = ScratchPool()
    kept = pool.borrow(torch.arange(6).reshape(2, 3))
    assert kept.tolist() == [[0, 1, 2], [3, 4, 5]]
    pool.give_back(kept)
    again = pool.borrow(torch.zeros(6, dtype=torch.int64))
    assert again.data_ptr() == kept.data_ptr()
    other = pool.borrow(torch.zeros(6, dtype=torch.int64))
    assert other.data_ptr() != kept.data_ptr()
    pool.give_back(again)
    with ThreadPoolExecutor(4) as threads:
        lent = list(threads.map(lambda _: pool.borrow_empty(6, torch.int64), range(8)))
    assert len({one.data_ptr() for one in lent}) == 8


def test_scratch_of_an_inference_serves_training() -> None:
    pool = ScratchPool()
    with torch.inference_mode():
        pool.give_back(pool.borrow(torch.ones(3)))
    assert pool.borrow(torch.zeros(3)).tolist() == [0, 0, 0]
