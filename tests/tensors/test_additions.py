"""What compiled code makes of two numbers is what NumPy and PyTorch make of them, for every type and operation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.errors import ConfigurationError
from syncline.fabric import _native
from syncline.runtime.reduction import OPS
from syncline.tensors.memory import bytes_of, reduction_for

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def reductions():
    """Return all that the reference knows."""
    known = []
    for dtype in TYPES:
        for op in OPS:
            try:
                known.append(reduction_for(dtype, op))
            except ConfigurationError:
                continue  # there is no such thing: bits of floats, an order of complex numbers
    return known


REDUCTIONS = reductions()
NUM_BYTES = 1 << 14
"""Whole vectors of any processor: in what is left behind the last one PyTorch chooses otherwise between zeros."""


def numbers(dtype, source, num_bytes=NUM_BYTES):
    """Return bytes of which each number is likely to be one that is rounded or ordered in its own way."""
    made = source.integers(0, 256, num_bytes, np.uint8)
    if dtype in ("float64", "float32", "float16", "bfloat16", "complex128", "complex64"):
        size = {"float64": 8, "complex128": 8, "float32": 4, "complex64": 4}.get(dtype, 2)
        words = made.view(f"u{size}")
        sign, infinity = 1 << (8 * size - 1), {8: 0x7FF << 52, 4: 0xFF << 23, 2: 0x1F << 10}[size]
        if dtype == "bfloat16":
            infinity = 0xFF << 7
        special = [0, sign, infinity, sign | infinity, infinity | 1, sign | infinity | 2, 1, sign | 1, infinity - 1]
        at = source.random(len(words)) < 0.3
        words[at] = source.choice(np.array(special, words.dtype), at.sum())
    return bytearray(made.tobytes())


def is_nan(raw, dtype):
    """Return which numbers are NaN, part by part where they are complex."""
    kind = {"complex128": "float64", "complex64": "float32"}.get(dtype, dtype)
    return torch.isnan(torch.frombuffer(bytearray(raw), dtype=getattr(torch, kind))).numpy()


def assert_alike(got, expected, dtype):
    """All bits are the same, but those that say which NaN it is."""
    if bytes(got) == bytes(expected):
        return
    got_nan, expected_nan = is_nan(got, dtype), is_nan(expected, dtype)
    assert (got_nan == expected_nan).all()
    words = [np.frombuffer(raw, f"u{len(raw) // len(got_nan)}")[~got_nan] for raw in (got, expected)]
    np.testing.assert_array_equal(*words)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: f"{reduction.op} of {reduction.dtype}")
@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_compiled_code_gives_the_references_bits(reduction, seed):
    source = np.random.default_rng(seed)
    own, other = (numbers(reduction.dtype, source) for _ in range(2))
    got, expected = bytearray(own), bytearray(own)
    _native.add(reduction.dtype, reduction.op, got, other)
    reduction.add(memoryview(expected), memoryview(other))
    assert_alike(got, expected, reduction.dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: f"{reduction.op} of {reduction.dtype}")
@given(seed=st.integers(0, 2**32), num=st.integers(0, 70), skipped=st.integers(0, 9))
@settings(max_examples=20)
def test_a_result_depends_on_no_place_and_no_length(reduction, seed, num, skipped):
    source = np.random.default_rng(seed)
    own, other = (numbers(reduction.dtype, source) for _ in range(2))
    whole = bytearray(own)
    _native.add(reduction.dtype, reduction.op, whole, other)
    part = slice(skipped * reduction.itemsize, (skipped + num) * reduction.itemsize)
    alone = bytearray(own[part])
    _native.add(reduction.dtype, reduction.op, alone, other[part])
    assert_alike(alone, whole[part], reduction.dtype)


def test_all_pairs_of_16_bit_floats_that_matter_are_rounded_as_pytorch_does():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        reduction = reduction_for(dtype)
        for second in every.view(dtype)[:: 2**15 // 61]:
            own, other = (bytearray(t.view(torch.int16).numpy().tobytes()) for t in (every, second.repeat(2**16)))
            got, expected = bytearray(own), bytearray(own)
            _native.add(reduction.dtype, "sum", got, other)
            reduction.add(memoryview(expected), memoryview(other))
            assert_alike(got, expected, reduction.dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_an_infinite_part_of_a_complex_sum_leaves_the_other_part_as_it_is(dtype):
    total, other = torch.tensor([complex(1, 2)], dtype=dtype), torch.tensor([complex(np.inf, 3)], dtype=dtype)
    reduction_for(dtype).add(bytes_of(total), bytes_of(other))
    assert total.item() == complex(np.inf, 5)


def test_what_is_not_there_is_refused():
    assert not _native.can_add("float8_e4m3fn", "sum")
    assert not _native.can_add("complex64", "max")
    with pytest.raises(ValueError, match="there is no bxor of float32 here"):
        _native.add("float32", "bxor", bytearray(4), bytes(4))
    with pytest.raises(ValueError, match="of the same size"):
        _native.add("float32", "sum", bytearray(4), bytes(8))
