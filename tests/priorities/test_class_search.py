"""The model of the forward pass, and that the search over it is exact."""

from __future__ import annotations

import time
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from syncline.priorities.forward_timing import (
    ForwardProfile,
    assumed_issue_s,
    divide_by_proportions,
    predict_forward,
    search_classes,
)
from syncline.priorities.settings import Priorities


def profile_of(
    sizes: list[int],
    forward: list[float],
    issued: list[float] | None = None,
    *,
    rate: float = 1.0,
    backlog: float = 1e9,
) -> ForwardProfile:
    return ForwardProfile(
        num_bytes=tuple(sizes),
        forward_s=tuple(forward),
        issued_s=tuple(issued or [0.0] * len(sizes)),
        bytes_per_s=rate,
        backlog_bytes=backlog,
    )


@st.composite
def profiles(draw: st.DrawFn, max_layers: int = 8) -> ForwardProfile:
    number = draw(st.integers(1, max_layers))
    sizes = draw(st.lists(st.integers(0, 20), min_size=number, max_size=number))
    seconds = st.lists(st.integers(0, 20).map(float), min_size=number, max_size=number)
    issued = draw(st.lists(st.integers(-10, 40).map(float), min_size=number, max_size=number))
    return profile_of(sizes, draw(seconds), issued, rate=2.0, backlog=draw(st.integers(0, 60)))


def test_a_layer_waits_for_its_parameters_and_for_those_before_it() -> None:
    prediction = predict_forward(profile_of([2, 3], [1.0, 4.0]), (0, 0))
    assert prediction.arrivals_s == (2.0, 5.0)
    assert prediction.time_s == 9.0


def test_rear_layers_that_were_issued_before_hold_up_their_own_class_by_the_backlog() -> None:
    reverse = profile_of([4, 6], [1.0, 1.0], [1.0, 0.0], backlog=5)
    assert predict_forward(reverse, (0, 0)).arrivals_s == (10.0, 10.0)
    assert predict_forward(reverse, (0, 1)).arrivals_s == (5.0, 10.0)


def test_a_pipe_that_waits_for_the_last_issue_is_idle_in_between() -> None:
    assert predict_forward(profile_of([1, 1], [0.0, 0.0], [0.0, 7.0]), (0, 0)).arrivals_s == (1.0, 8.0)


def test_two_classes_are_found_where_one_holds_up_the_front() -> None:
    profile = profile_of([10, 10, 10, 10], [10.0] * 4, [0.3, 0.2, 0.1, 0.0], backlog=20)
    one = predict_forward(profile, (0,) * 4)
    best = search_classes(profile, 4)
    assert best.time_s == pytest.approx(10.3 + 40.0)
    assert one.time_s == pytest.approx(10.3 + 20.0 + 40.0)


def test_one_class_is_kept_where_nothing_is_gained() -> None:
    assert search_classes(profile_of([5] * 6, [1.0] * 6), 4).classes == (0,) * 6


@settings(max_examples=150, deadline=None)
@given(profiles(max_layers=7), st.integers(1, 4))
def test_the_search_equals_brute_force(profile: ForwardProfile, num_classes: int) -> None:
    every = combinations_with_replacement(range(num_classes), profile.num_layers)
    best_s = min(predict_forward(profile, classes).time_s for classes in every)
    assert search_classes(profile, num_classes).time_s == pytest.approx(best_s, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(profiles(max_layers=40), st.integers(1, 6))
def test_the_search_is_never_worse_than_one_class_or_fixed_proportions(
    profile: ForwardProfile, num_classes: int
) -> None:
    found = search_classes(profile, num_classes)
    assert found.num_classes <= num_classes
    assert found == predict_forward(profile, found.classes)
    for proportions in (
        [1.0],
        [1 / num_classes] * num_classes,
        Priorities(num_classes=num_classes, search=tuple(2.0**k for k in range(num_classes))).proportions,
    ):
        fixed = predict_forward(profile, divide_by_proportions(profile.num_bytes, proportions))
        assert found.time_s <= fixed.time_s + 1e-9


@settings(max_examples=100, deadline=None)
@given(profiles(max_layers=12), st.integers(2, 4))
def test_arrivals_agree_with_a_pipe_that_is_simulated_unit_by_unit(profile: ForwardProfile, num_classes: int) -> None:
    """Each layer in a class of its own: a strict-priority pipe, half a second a unit (times of issue are whole)."""
    classes = tuple(range(profile.num_layers))
    left = list(profile.num_bytes)
    now_s, arrivals = min(profile.issued_s), [0.0] * len(left)
    for layer, size in enumerate(left):
        if not size:  # it is there with those before it, which the model waits for
            arrivals[layer] = profile.issued_s[layer]
    while any(left):
        ready = [layer for layer in classes if left[layer] and profile.issued_s[layer] <= now_s]
        now_s += 0.5
        if ready:
            left[ready[0]] -= 1
            arrivals[ready[0]] = now_s
    modelled = predict_forward(profile, classes).arrivals_s
    assert modelled == pytest.approx(tuple(np.maximum.accumulate(arrivals)))


def test_64_layers_and_4_classes_take_less_than_a_fifth_of_a_second() -> None:
    generator = np.random.default_rng(4)
    number = 64
    profile = profile_of(
        generator.integers(1, 1000, number).tolist(),
        generator.random(number).tolist(),
        generator.random(number).tolist(),
        rate=1e4,
        backlog=2000,
    )
    search_classes(profile, 4)
    start = time.thread_time()
    search_classes(profile, 4)
    assert time.thread_time() - start < 0.2


def test_proportions_divide_bytes_and_not_layers() -> None:
    assert divide_by_proportions([8, 1, 1, 1, 1, 1, 1, 1, 1], [0.5, 0.5]) == (0,) + (1,) * 8
    assert divide_by_proportions([1] * 7, Priorities(num_classes=3, search=(1, 2, 4)).proportions) == (
        0,
        1,
        1,
        2,
        2,
        2,
        2,
    )
    assert divide_by_proportions([0, 0], [0.5, 0.5]) == (0, 0)


def test_all_gathers_are_assumed_to_follow_the_backward_pass() -> None:
    assert assumed_issue_s([10, 10], [1.0, 1.0], 10.0) == (1.0, 0.0)
    assert assumed_issue_s([50, 10], [1.0, 1.0], 10.0) == (5.0, 0.0)
