"""Quantities that people write, "10 Gbit/s", "64 MiB", "5 ms", "3 GHz" and "0.2 %": parsed and printed here alone.

Inside Syncline a rate is bytes per second (float), a size is bytes (int), a duration is seconds (float), a frequency is
hertz (float) and a share is a part of one (float).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

from syncline.errors import UnitError

UNLIMITED = "unlimited"
"""How an infinite rate is written: a link that never limits."""

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {f"{prefix}B": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
_BIT_RATES = {f"{prefix}bit/s": Fraction(factor, 8) for prefix, factor in _DECIMAL.items()}
_RATES = _BIT_RATES | {f"{unit}/s": factor for unit, factor in _SIZES.items()}
_ALSO_WRITTEN = {f"{prefix}{unit}": f"{prefix}bit/s" for prefix in _DECIMAL for unit in ("bit", "bps", "b/s", "bE")}
"""What else people write for rates in bits per second, an Ethernet's name among it."""
_DURATIONS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_FREQUENCIES = {f"{prefix}Hz": Fraction(_DECIMAL[prefix]) for prefix in ("", "k", "M", "G")}
_SHARES = {"%": Fraction(1, 100)}
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?) ?(?P<unit>[^\s\d].*)", re.ASCII)
_MAX_LENGTH = 64  # nobody writes a longer quantity, and a number of a million digits takes long to parse


def parse_rate(text: object) -> float:
    """Bytes per second of a rate such as ``"10 Gbit/s"``, ``"125 MB/s"``, ``"1 GiB/s"`` or ``"unlimited"``.

    So are ``"10Gbit"``, ``"10 Gbps"``, ``"10 Gb/s"`` and ``"1 GbE"`` read: a small b is a bit.
    """
    if text == UNLIMITED:
        return math.inf
    return float(_parse(text, "rate", _RATES, "10 Gbit/s"))


def parse_size(text: object) -> int:
    """Bytes of a size such as ``"64 MiB"``, ``"16 MB"`` or ``"0 B"``; it must come out whole."""
    size = _parse(text, "size", _SIZES, "64 MiB")
    if size.denominator != 1:
        raise UnitError(f"{text!r} is not a whole number of bytes; write {str(round(size)) + ' B'!r}")
    return int(size)


def parse_duration(text: object) -> float:
    """Seconds of a duration such as ``"5 ms"``, ``"200 us"`` or ``"1.5 s"``."""
    return float(_parse(text, "duration", _DURATIONS, "5 ms"))


def parse_frequency(text: object) -> float:
    """Hertz of a frequency such as ``"3 GHz"`` or ``"1980 MHz"``."""
    return float(_parse(text, "frequency", _FREQUENCIES, "3 GHz"))


def parse_share(text: object) -> float:
    """Part of one of a share such as ``"0.2 %"``."""
    return float(_parse(text, "share", _SHARES, "0.2 %"))


def format_rate(bytes_per_s: float, *, exact: bool = False) -> str:
    """Spell a rate in bits per second, with four digits, or so that it parses to the very same number."""
    if math.isinf(bytes_per_s):
        return UNLIMITED
    if exact:
        return _format_exact(bytes_per_s, _BIT_RATES, "B/s")
    return _format(bytes_per_s, _BIT_RATES)


def format_size(num_bytes: float) -> str:
    """Spell a size in binary units: ``"64 MiB"``."""
    return _format(num_bytes, {unit: factor for unit, factor in _SIZES.items() if unit == "B" or unit[1] == "i"})


def format_duration(seconds: float, *, exact: bool = False) -> str:
    """Spell a duration, with four digits, or so that it parses to the very same number."""
    units = {unit: _DURATIONS[unit] for unit in ("ns", "us", "ms", "s")}
    return _format_exact(seconds, units, "s") if exact else _format(seconds, units)


def format_frequency(hertz: float) -> str:
    """Spell a frequency: ``"2.4 GHz"``."""
    return _format(hertz, _FREQUENCIES)


def format_share(share: float) -> str:
    """Spell a part of one in per cent, so that it parses to the very same number: ``"0.2 %"``."""
    return f"{Decimal(repr(share)).scaleb(2):f} %"


def counted(number: int, noun: str) -> str:
    """Spell a number of things: ``"1 rank"``, ``"4,096 ranks"``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _parse(text: object, noun: str, units: Mapping[str, Fraction], example: str) -> Fraction:
    if not isinstance(text, str):
        raise UnitError(f"{text!r} is not a {noun}; write a number and its unit, such as {example!r}")
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise UnitError(f"{text[:_MAX_LENGTH]!r} is not a {noun}; write a number and its unit, such as {example!r}")
    number, unit = match["number"], _ALSO_WRITTEN.get(match["unit"], match["unit"])
    if unit not in units:
        meant = _meant_unit(unit, units)
        remedy = f"write {f'{number} {meant}'!r}" if meant else f"write it in one of {', '.join(units)}"
        raise UnitError(f"{text!r} is not a {noun}; {remedy}")
    quantity = Fraction(number) * units[unit]
    if quantity > 10**30:
        raise UnitError(f"{text!r} is too large a {noun}; write one such as {example!r}")
    return quantity


def _meant_unit(unit: str, units: Mapping[str, Fraction]) -> str | None:
    """Guess the unit behind a common slip: 'Gbps', 'gbit/s', 'Mb/s', 'MBps', 'mib', 'msec'."""
    plain = unit.removesuffix("/s") if unit.endswith("ps/s") else unit
    plain = re.sub(r"ps$", "/s", plain)
    candidates = (re.sub(r"b(its?)?/s$", "bit/s", plain), re.sub(r"b(ytes?)?$", "B", plain), plain.rstrip("ec"))
    for candidate in candidates:
        same = [known for known in units if known == candidate]
        folded = [known for known in units if known.lower() == candidate.lower()]
        if same or folded:
            return (same or folded)[0]
    return None


def _format(value: float, units: Mapping[str, Fraction]) -> str:
    """Spell ``value`` with four significant digits in the largest unit that leaves at least one whole."""
    ascending = sorted(units.items(), key=lambda item: item[1])
    for unit, factor in reversed(ascending):
        number = f"{value / float(factor):.4g}"
        if float(number) >= 1 or unit == ascending[0][0]:
            return f"{number} {unit}"
    raise AssertionError("a table of units is never empty")


def _format_exact(value: float, units: Mapping[str, Fraction], base: str) -> str:
    """Spell ``value`` in the largest unit that reproduces it, or else in ``base`` (factor one) with all its digits."""
    for unit, factor in sorted(units.items(), key=lambda item: item[1], reverse=True):
        number = f"{value / float(factor):.9g}"
        if float(number) >= 1 and "e" not in number and float(Fraction(number) * factor) == value:
            return f"{number} {unit}"
    return f"{value!r} {base}"
