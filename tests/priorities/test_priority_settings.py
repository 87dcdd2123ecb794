"""The settings of priorities: what is refused, and what defaults become."""

from __future__ import annotations

import math
import re

import pytest

import syncline
from syncline.errors import ConfigurationError
from syncline.priorities.settings import Priorities


def test_defaults_are_four_classes_that_are_searched() -> None:
    priorities = syncline.Priorities()
    assert priorities is not None
    assert isinstance(priorities, Priorities)
    assert (priorities.num_classes, priorities.dscp) == (4, (46, 34, 18, 8))
    assert priorities.is_on
    assert priorities.is_searched


def test_off_is_one_class_without_a_mark() -> None:
    off = Priorities.off()
    assert (off.num_classes, off.dscp, off.is_on, off.is_searched) == (1, None, False, False)


@pytest.mark.parametrize("num_classes", range(1, 17))
def test_the_default_marks_fit_any_number_of_classes(num_classes: int) -> None:
    marks = Priorities(num_classes=num_classes).dscp
    assert marks is not None
    assert len(marks) == len(set(marks)) == num_classes
    assert marks[0] == 46


def test_marks_are_kept_as_given_or_left_alone() -> None:
    assert Priorities(num_classes=2, dscp=(40, 0)).dscp == (40, 0)
    assert Priorities(num_classes=2, dscp=None).dscp is None


def test_proportions_add_up_to_one() -> None:
    assert Priorities(search="equal").proportions == (0.25,) * 4
    assert Priorities(num_classes=2, search=(1, 3)).proportions == (0.25, 0.75)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_classes": 0}, "num_classes must be a whole number from 1 to 16, not 0"),
        ({"num_classes": 17}, "not 17"),
        ({"num_classes": True}, "not True"),
        ({"num_classes": 2.0}, "not 2.0"),
        ({"dscp": (46, 34)}, "one value for each of the 4 classes"),
        ({"dscp": [46, 34, 18, 8]}, "a tuple"),
        ({"dscp": (46, 34, 18, 64)}, "a whole number from 0 to 63), or None, not (46, 34, 18, 64)"),
        ({"search": "best"}, "not 'best'"),
        ({"search": (1.0, 2.0)}, "search must have one value for each of the 4 classes"),
        ({"search": (1.0, 0.0, 1.0, 1.0)}, "a number above 0, finite), not (1.0, 0.0"),
        ({"search": (1.0, math.inf, 1.0, 1.0)}, "not (1.0, inf"),
        ({"measure_steps": 0}, "measure_steps must be a whole numbe"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Priorities(**settings)  # type: ignore[arg-type]
