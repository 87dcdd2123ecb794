"""The compiled codec, against its description in PyTorch: the same bytes, for whatever numbers."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

import reference_codec
from syncline.fabric import _native
from syncline.tensors.codec import Codec
from syncline.tensors.memory import bytes_of

BITS = [4, 8, 16]
EXTREMES = [0.0, -0.0, 1e-38, -1e-45, 2.0**-100, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 0.5, -1.5]


def numbers(count: int, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.exp(spread * torch.randn(count, generator=generator))


def check(bits: int, values: torch.Tensor, error: torch.Tensor) -> None:
    codec, count = Codec(bits), values.numel()
    codes, lacking = torch.empty(codec.num_bytes(count), dtype=torch.uint8), error.clone()
    codec.encode(values, lacking, codes)
    expected, expected_error = reference_codec.encode(bits, values, error)
    assert torch.equal(codes, expected)
    assert torch.equal(lacking, expected_error)
    sums = torch.arange(count, dtype=torch.float32)
    total = sums + reference_codec.decode(bits, codes, count)
    codec.add(codes, sums)
    torch.testing.assert_close(sums, total, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", BITS)
@given(count=st.integers(0, 700), seed=st.integers(0, 2**31), spread=st.sampled_from([0.0, 1.0, 8.0]))
def test_codes_are_the_same_bytes(bits: int, count: int, seed: int, spread: float) -> None:
    check(bits, numbers(count, seed, spread), 0.1 * numbers(count, seed + 1, 0.0))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", EXTREMES)
def test_extremes_are_the_same_bytes(bits: int, value: float) -> None:
    values = numbers(300, 5, 1.0)
    values[[3, 131, 299]] = value
    check(bits, values, torch.zeros(300))
    check(bits, torch.full((129,), value), torch.zeros(129))


@pytest.mark.parametrize("bits", BITS)
def test_what_is_lacking_is_not_lost(bits: int) -> None:
    codec, count = Codec(bits), 1000
    error, sums, truth = torch.zeros(count), torch.zeros(count), torch.zeros(count, dtype=torch.float64)
    codes = torch.empty(codec.num_bytes(count), dtype=torch.uint8)
    for step in range(50):
        values = numbers(count, step, 1.0)
        truth += values
        codec.encode(values, error, codes)
        codec.add(codes, sums)
    largest = 40.0
    assert float((sums + error - truth).abs().max()) < 1e-3 * largest
    assert float((sums - truth).abs().max()) > 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_a_nan_spoils_its_block_and_leaves_no_error(bits: int) -> None:
    values, error = torch.ones(256), torch.zeros(256)
    values[7] = math.nan
    codes, sums = torch.empty(Codec(bits).num_bytes(256), dtype=torch.uint8), torch.zeros(256)
    Codec(bits).encode(values, error, codes)
    Codec(bits).add(codes, sums)
    assert bool(sums[:128].isnan().all())
    assert torch.allclose(sums[128:], torch.ones(128), rtol=0.01)
    assert not bool(error.isnan().any())


def test_a_number_takes_half_a_byte_and_a_sixty_fourth() -> None:
    assert [Codec(bits).num_bytes(1 << 14) for bits in BITS] == [(64 + 2) << 7, (128 + 2) << 7, 256 << 7]
    assert Codec(4).num_bytes(0) == 0


def test_other_sizes_and_bits_are_refused() -> None:
    values, codes = bytes_of(torch.zeros(128)), bytes_of(torch.zeros(66, dtype=torch.uint8))
    with pytest.raises(ValueError, match="other numbers than codes"):
        _native.encode(8, values, bytes_of(torch.zeros(128)), codes)
    with pytest.raises(ValueError, match="each number has an error"):
        _native.encode(4, values, bytes_of(torch.zeros(127)), codes)
    with pytest.raises(ValueError, match="4, 8 and 16 bits"):
        _native.decode(5, codes, values)
