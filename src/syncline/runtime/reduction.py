"""How two pieces of a buffer become one: the one thing that the engine has to know about numbers.

Mostly they are added; maxima, minima, products and bits take the same way. That happens on the communication loop's
thread, and numpy releases the interpreter lock meanwhile.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from syncline.errors import ConfigurationError
from syncline.fabric.slice_executor import Reduction

__all__ = ["BITWISE_OPS", "DTYPES", "OPS", "Reduction", "numpy_reduction"]

DTYPES = (
    *("float64", "float32", "float16"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)

BITWISE_OPS = ("band", "bor", "bxor")
"""Of integers alone: their bits by and, or, exclusive or."""

_UFUNCS: MappingProxyType[str, np.ufunc] = MappingProxyType(
    {
        "sum": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "product": np.multiply,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
)
OPS = tuple(_UFUNCS)


class _NumpyReduction(NamedTuple):
    """Sums (and products) wrap around, as integers do, or overflow to infinity: who reads the result judges that."""

    dtype: str
    itemsize: int
    op: str

    def add(self, into: memoryview, other: memoryview) -> None:
        """Add ``other`` to ``into``."""
        self.add_both(into, into, other)

    def add_both(self, into: memoryview, first: memoryview, second: memoryview) -> None:
        """Make ``into`` the sum of two."""
        left, right, result = (np.frombuffer(view, self.dtype) for view in (first, second, into))
        with np.errstate(over="ignore", invalid="ignore"):
            _UFUNCS[self.op](left, right, out=result)


def numpy_reduction(dtype: str, op: str = "sum") -> Reduction:
    """Return the ``op``, one of :data:`OPS`, of elements of ``dtype``, one of :data:`DTYPES`.

    >>> into, other = bytearray([1, 2]), bytes([3, 4])
    >>> numpy_reduction("uint8").add(memoryview(into), memoryview(other))
    >>> list(into)
    [4, 6]
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"numpy can sum {', '.join(DTYPES)} here, not {dtype!r}; convert the buffer first")
    numbers = np.dtype(dtype)
    if op in BITWISE_OPS and numbers.kind == "f":
        raise ConfigurationError(f"There is no {op} of {dtype}, only of integers; give the buffer an integer type")
    return _NumpyReduction(dtype, numbers.itemsize, op)
