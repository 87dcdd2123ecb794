"""Compares what a program gave on a rank with its reference, and says where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def differences(found: Any, expected: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Yield a line for each value that differs by more than rounding."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            yield f"{where or 'values'}: names differ: {_names(found)} and {_names(expected)}"
            return
        for name, value in expected.items():
            yield from differences(found[name], value, tolerance, f"{where}.{name}" if where else name)
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            yield f"{where}: {found} is not {expected}"
            return
        for index, value in enumerate(expected):
            yield from differences(found[index], value, tolerance, f"{where}[{index}]")
    elif isinstance(expected, (torch.Tensor, float)):
        yield from _numbers(torch.as_tensor(found), torch.as_tensor(expected), tolerance, where)
    elif found != expected:
        yield f"{where}: {found!r} is not {expected!r}"


def _numbers(found: torch.Tensor, expected: torch.Tensor, tolerance: float, where: str) -> Iterator[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        yield f"{where}: {found.dtype} of {tuple(found.shape)}, not {expected.dtype} of {tuple(expected.shape)}"
    elif not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        yield f"{where}: differs by up to {float((found - expected).abs().max()):.3g}"


def _names(value: Any) -> object:
    return sorted(value) if isinstance(value, dict) else type(value).__name__
