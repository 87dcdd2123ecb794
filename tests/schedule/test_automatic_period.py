"""The period of local steps where nobody names one: by what part of the time rounds hold up steps."""

import pytest

from syncline.schedule.period import (
    LEAST_STEPS,
    LONGEST,
    PATIENCE,
    SHORTEST,
    AutomaticPeriod,
    common_fragments,
    own_steps,
    shortest_period,
)


def held_up_by(period: int, round_s: float, step_s: float, own_s: float = 0.0) -> float:
    """Return for what part of it rounds hold up a period of steps of ``step_s``: links beyond these, and ``own_s``."""
    waited_s = max(0.0, round_s - period * step_s) + own_s
    return waited_s / (period * step_s + waited_s)


def judge(period: AutomaticPeriod, held_up: float) -> int:
    """End periods until one is judged; return how many."""
    for count in range(1, LEAST_STEPS + 1):
        if period.judge(held_up):
            return count
    raise AssertionError("never judged")


@pytest.mark.parametrize("round_s", [0.01, 0.19, 0.21, 1.5, 3.1, 40.0, 1000.0])
def test_it_settles_on_the_shortest_that_links_carry_and_seldom_tries_another(round_s: float) -> None:
    period, seen = AutomaticPeriod(), []
    for _ in range(400):
        judge(period, held_up_by(period.num_steps, round_s, 0.1))
        seen.append(period.num_steps)
    shortest = shortest_period(round_s, 0.1)
    assert set(seen[8:]) <= {shortest, shortest // 2}
    assert seen.count(shortest) > 0.95 * len(seen)


def test_the_shortest_is_a_power_of_two_that_carries_the_rounds_or_nearly() -> None:
    rounds_s = (0.0, 0.1, 0.21, 0.3, 0.5, 1e9)
    assert [shortest_period(round_s, 0.1) for round_s in rounds_s] == [2, 2, 2, 4, 8, LONGEST]


def test_a_slow_party_makes_fewer_steps_and_all_have_a_fragment_for_each_of_them() -> None:
    assert [own_steps(16, speed) for speed in (1.0, 0.9, 0.89, 0.5, 0.33, 0.001)] == [16, 16, 14, 8, 5, 1]
    assert [common_fragments(16, fewest) for fewest in (16, 14, 8, 5, 1)] == [16, 8, 8, 4, 1]
    assert common_fragments(10, 10) == 10


def test_arithmetic_that_holds_up_every_round_makes_it_longer() -> None:
    period = AutomaticPeriod()
    for _ in range(PATIENCE):
        judge(period, held_up_by(period.num_steps, 0.0, 0.1, own_s=0.03))
    assert period.num_steps == 8


def test_too_few_steps_are_judged_only_if_rounds_took_most_of_the_time() -> None:
    period = AutomaticPeriod()
    assert judge(period, 0.2) == LEAST_STEPS // SHORTEST
    assert period.num_steps == 2 * SHORTEST
    assert judge(AutomaticPeriod(), 0.6) == 1


def test_what_comes_before_a_beginning_is_not_counted() -> None:
    period = AutomaticPeriod()
    for _ in range(LEAST_STEPS // SHORTEST - 1):
        assert not period.judge(0.2)
    period.begin()
    assert judge(period, 0.2) == LEAST_STEPS // SHORTEST


def test_half_is_tried_after_some_calm_and_twice_as_late_when_that_failed() -> None:
    period = AutomaticPeriod()
    judge(period, 0.9)
    long = period.num_steps
    trials = []
    for _ in range(2):
        calm = 0
        while period.num_steps == long:
            judge(period, 0.0)
            calm += 1
        trials.append(calm)
        judge(period, 0.1)
        assert period.num_steps == long
    assert trials == [PATIENCE, 2 * PATIENCE]


def test_no_time_at_all_beside_rounds_is_the_longest_step_up() -> None:
    period = AutomaticPeriod()
    judge(period, 1.0)
    assert period.num_steps == LONGEST
    judge(period, 1.0)
    assert period.num_steps == LONGEST
