"""Annotations as rules: what each kind accepts, how a refusal reads, and what is left to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import pytest
import torch

from syncline.arguments import Bounds, Count, Seconds, Share, Whole, check_fields, checked
from syncline.errors import ConfigurationError, TopologyError

if TYPE_CHECKING:
    from nowhere import Unknown


class Closes(Protocol):
    """What can be closed."""

    def close(self) -> None: ...


class Closing:
    def close(self) -> None:
        pass


@checked
def call(
    whole: Whole | None = None,
    *,
    count: Count = 1,
    share: Share = 0.5,
    most: Annotated[int, Bounds(2, 4)] = 2,
    seconds: Seconds = 1.0,
    momentum: Annotated[float, Bounds(0, below=1)] = 0.9,
    switch: bool = True,
    word: Literal["a", "b"] | None = None,
    text: str = "",
    path: str | Path = "",
    tensor: torch.Tensor | None = None,
    function: Callable[..., object] = len,
    names: Sequence[str] = (),
    marks: tuple[int, ...] = (),
    weights: Mapping[str, float] | None = None,
    stream: Iterable[int] = (),
    closes: Closes | None = None,
    either: Annotated[Literal["auto"] | Count, '"auto", or how many'] = "auto",
    unknown: Unknown | None = None,
    anything: Any = None,
    **more: int,
) -> str:
    return "called"


ACCEPTED = [
    {"whole": 0}, {"whole": np.int64(3)}, {"whole": None}, {"most": 4}, {"share": np.float32(0.5)}, {"share": 1},
    {"share": torch.tensor(0.5)}, {"seconds": 3}, {"momentum": 0.0}, {"switch": 0}, {"word": "b"}, {"path": Path("x")},
    {"tensor": torch.nn.Parameter(torch.ones(1))}, {"function": Closing}, {"names": ["x"]}, {"names": ()},
    {"marks": (1, 2)}, {"weights": {"x": 1}}, {"stream": iter("ab")}, {"closes": Closing()}, {"either": 3},
    {"unknown": 3}, {"anything": object}, {"other": 3},
]  # fmt: skip
REFUSED = [
    ({"whole": -1}, "call: whole must be a whole number from 0 up, or None, not -1"),
    ({"whole": True}, "whole must be a whole number from 0 up, or None, not True"),
    ({"count": 1.5}, "count must be a whole number from 1 up, not 1.5"),
    ({"count": "x"}, "count must be a whole number from 1 up, not 'x'"),
    ({"most": 5}, "most must be a whole number from 2 to 4, not 5"),
    ({"share": math.nan}, "share must be a number from 0 to 1, not nan"),
    ({"share": torch.ones(2)}, "share must be a number from 0 to 1, not tensor"),
    ({"share": 10**400}, "share must be a number from 0 to 1, not 1000"),
    ({"seconds": 0}, "seconds must be a positive number of seconds, not 0"),
    ({"seconds": math.inf}, "seconds must be a positive number of seconds, not inf"),
    ({"momentum": 1}, "momentum must be a number from 0 to below 1, not 1"),
    ({"switch": "on"}, "switch must be True or False, not 'on'"),
    ({"word": "c"}, 'word must be "a" or "b", or None, not \'c\''),
    ({"word": ["a"]}, "word must be"),
    ({"text": b"x"}, "text must be a string, not b'x'"),
    ({"path": 3}, "path must be a string, or a path, not 3"),
    ({"tensor": 3}, "tensor must be a Tensor, or None, not 3"),
    ({"tensor": torch.Tensor}, "tensor must be a Tensor, or None, not the class Tensor; give an object"),
    ({"function": 3}, "function must be a function, not 3"),
    ({"names": "ab"}, "names must be a sequence (each: a string), not 'ab'"),
    ({"names": [1]}, "names must be a sequence (each: a string), not [1]"),
    ({"marks": [1]}, "marks must be a tuple (each: a whole number), not [1]"),
    ({"weights": {"x": "y"}}, "weights must be a mapping from a string to a number, or None, not {'x': 'y'}"),
    ({"weights": {1: 1}}, "weights must be"),
    ({"stream": 3}, "stream must be an iterable (each: a whole number), not 3"),
    ({"closes": 3}, "closes must be a Closes (which has close), or None, not 3"),
    ({"closes": Closing}, "closes must be a Closes (which has close), or None, not the class Closing; give an object"),
    ({"either": 0}, 'either must be "auto", or how many, not 0'),
    ({"other": "x"}, "other must be a whole number, not 'x'"),
]


@pytest.mark.parametrize("given", ACCEPTED, ids=[next(iter(one)) for one in ACCEPTED])
def test_what_fits_its_annotation_is_passed_on(given: dict[str, Any]) -> None:
    assert call(**given) == "called"


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=[text[:20] for _, text in REFUSED])
def test_what_does_not_is_refused_with_the_rule_and_the_value(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call(**given)
    assert text in str(caught.value)


def test_positional_arguments_are_known_by_their_place() -> None:
    assert call(3) == "called"
    with pytest.raises(ConfigurationError, match="whole must be"):
        call("x")  # type: ignore[arg-type]


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ConfigurationError) as caught:
        call("x" * 10_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Fields of a base class are of the module where that is."""

    size: Count = 1

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Base):
    """Two fields."""

    name: str = "x"


@pytest.mark.parametrize("given", [{"size": 0}, {"name": 3}])
def test_settings_are_checked_as_they_are_made(given: dict[str, Any]) -> None:
    assert Settings(size=2, name="y").size == 2
    with pytest.raises(TopologyError, match=r"^Settings: (size|name) must be .*, not"):
        Settings(**given)
