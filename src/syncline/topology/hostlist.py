"""Lists of names as administrators write them, ``h[0-4]`` or ``node[01-03,7],login``: expanded to single names."""

from __future__ import annotations

import itertools
import re

from syncline.errors import TopologyError

MAX_NAMES = 100_000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names of a list, in its order; numbers keep their leading zeros."""
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        names += _expand_item(item.strip(), text)
        _check_count(len(names), text)
    return tuple(names)


def _expand_item(item: str, text: str) -> list[str]:
    parts = _BRACKETS.split(item)  # plain, bracketed, plain, bracketed, ..., plain
    if not item or any(mark in part for part in parts[::2] for mark in "[]"):
        raise TopologyError(f"{text!r} is not a list of names; write for example 'h[0-4]' or 'a,b,c'")
    choices = [[part] if k % 2 == 0 else _expand_ranges(part, text) for k, part in enumerate(parts)]
    count = 1
    for choice in choices:
        count *= len(choice)
        _check_count(count, text)
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None or len(item) > 2 * 9 + 1:
            raise TopologyError(f"{item!r} in {text!r} is not a range of numbers; write for example '0-4'")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise TopologyError(f"range {item!r} in {text!r} runs backwards; write '{last}-{first}'")
        _check_count(int(last) - int(first), text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _check_count(count: int, text: str) -> None:
    if count > MAX_NAMES:
        raise TopologyError(f"{text!r} stands for more than {MAX_NAMES} names; write a shorter list")
