"""Buckets lie in large pages, where the kernel has them."""

from pathlib import Path

import pytest
import torch

from syncline.tensors.memory import PAGE_BYTES, zeros_in_large_pages

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address):
    """Return what the kernel notes of the memory at ``address``."""
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and ":" not in first:
            start, stop = (int(edge, 16) for edge in first.split("-"))
            is_found = start <= address < stop
        elif is_found and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_tensors_are_zeros_of_their_sizes_that_do_not_overlap():
    sizes = [1, 100, 3 * PAGE_BYTES + 12, 4]
    tensors = zeros_in_large_pages(sizes)
    assert [tuple(tensor.shape) for tensor in tensors] == [(size,) for size in sizes]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert not any(tensor.any() for tensor in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert all(tensor.eq(number + 1).all() for number, tensor in enumerate(tensors))


def test_the_memory_lives_as_long_as_one_tensor():
    _, kept = zeros_in_large_pages([PAGE_BYTES, PAGE_BYTES])
    assert kept.view(torch.float32).add_(1).eq(1).all()


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this kernel has no large pages")
def test_only_whole_pages_are_large():
    """A large page that is used in part would cost all of itself."""
    (tensor,) = zeros_in_large_pages([2 * PAGE_BYTES + 100])
    assert tensor.data_ptr() % PAGE_BYTES == 0
    assert "hg" in flags_at(tensor.data_ptr())
    assert "hg" in flags_at(tensor.data_ptr() + 2 * PAGE_BYTES - 1)
    assert "hg" not in flags_at(tensor.data_ptr() + 2 * PAGE_BYTES)
