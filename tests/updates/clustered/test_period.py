"""What is stepped on in a period, and what is forecast in the next."""

import pytest
import torch

from syncline.updates.clustered.means import Period
from syncline.updates.flat import Vector, VectorShape

SHAPE = VectorShape(parts=((torch.float64, 2), (torch.float32, 2)))


def vector(*gradients: float, present: tuple[float, ...] = (1.0, 1.0)) -> Vector:
    made = SHAPE.zeros()
    made.parts[0].copy_(torch.tensor(gradients))
    made.presence.copy_(torch.tensor(present))
    return made


def gradients_of(found: Vector | None) -> list[float]:
    assert found is not None
    return found.parts[0].tolist()


def end_one(period: Period) -> Vector | None:
    """Go through a period of two batches that brings (1, 5), and whose outer round gives (4, 1)."""
    period.step_on(vector(1.0, 2.0))
    brought = period.bring(vector(0.0, 3.0))
    assert gradients_of(brought) == [1.0, 5.0]
    return period.end(vector(0.0, 3.0), vector(4.0, 1.0))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_in_the_first_period_the_last_step_replaces_what_was_brought(weight: float) -> None:
    period = Period(forecast_weight=weight)
    first = vector(1.0, 2.0)
    assert period.step_on(first) is first
    assert gradients_of(Period(forecast_weight=weight).end(None, vector(4.0, 1.0))) == [4.0, 1.0]
    assert gradients_of(end_one(Period(forecast_weight=weight))) == [3.0, -1.0]


def test_a_forecast_is_added_to_each_mean_and_in_all_the_result_is_stepped_on() -> None:
    period = Period(forecast_weight=1.0)
    end_one(period)
    steps = [period.step_on(vector(1.0, 1.0)), period.step_on(vector(2.0, 0.0))]
    assert [gradients_of(step) for step in steps] == [[2.5, -1.0], [3.5, -2.0]]
    assert gradients_of(period.bring(vector(1.0, 1.0))) == [4.0, 2.0]
    last = period.end(vector(1.0, 1.0), vector(10.0, 20.0))
    assert [sum(pair) for pair in zip(*map(gradients_of, (*steps, last)), strict=True)] == [10.0, 20.0]
    assert gradients_of(period.step_on(vector(0.0, 0.0))) == [2.0, 6.0]


def test_a_part_of_the_difference_is_forecast() -> None:
    period = Period(forecast_weight=0.5)
    end_one(period)
    step = period.step_on(vector(1.0, 1.0))
    assert gradients_of(step) == [1.75, 0.0]
    period.bring(vector(1.0, 1.0))
    last = period.end(vector(1.0, 1.0), vector(10.0, 20.0))
    assert [sum(pair) for pair in zip(gradients_of(step), gradients_of(last), strict=True)] == [10.0, 20.0]


def test_the_part_is_learned_from_how_well_the_last_difference_told_the_next() -> None:
    period = Period(forecast_weight=None)
    assert gradients_of(end_one(period)) == [3.0, -1.0]
    assert gradients_of(period.step_on(vector(0.0, 0.0))) == [1.5, -2.0]  # nothing is known of it yet: all of it
    period.bring(vector(0.0, 0.0))
    period.end(vector(0.0, 0.0), vector(1.5, 0.0))  # a batch's difference was (1.5, -2), and is (.75, 0)
    weight = round(256 * (1.5 * 0.75) / (1.5**2 + 2.0**2)) / 256
    assert gradients_of(period.step_on(vector(0.0, 0.0))) == [0.75 * weight, 0.0]
    period.bring(vector(0.0, 0.0))
    period.end(vector(0.0, 0.0), vector(-9.0, 0.0))  # the other way: it swings
    assert gradients_of(period.step_on(vector(1.0, 1.0))) == [1.0, 1.0]


def test_batches_without_data_step_on_nothing_and_are_not_counted() -> None:
    period = Period(forecast_weight=1.0)
    end_one(period)
    assert period.step_on(None) is None
    step = period.step_on(vector(1.0, 1.0))
    assert gradients_of(period.bring(None)) == [1.0, 1.0]
    last = period.end(None, vector(3.0, 3.0))
    assert [sum(pair) for pair in zip(gradients_of(step), gradients_of(last), strict=True)] == [3.0, 3.0]
    assert period.step_on(None) is None
    period.bring(None)
    assert period.end(None, None) is None
    assert gradients_of(period.step_on(vector(0.0, 0.0))) == [2.0, 2.0]


def test_a_parameter_that_only_other_clusters_use_is_forecast_too() -> None:
    period = Period(forecast_weight=1.0)
    mine, all_clusters = vector(1.0, 0.0, present=(1.0, 0.0)), vector(1.0, 4.0, present=(1.0, 0.5))
    period.bring(mine)
    period.end(mine, all_clusters)
    step = period.step_on(mine)
    assert step is not None
    assert gradients_of(step) == [1.0, 4.0]
    assert (step.presence > 0).tolist() == [True, True]
    assert mine.presence.tolist() == [1.0, 0.0]


def test_a_forecast_is_taken_back_where_no_other_cluster_is_left() -> None:
    """The mean of all is the own one then: the steps of the period add up to it, and so do those that follow."""
    period = Period(forecast_weight=1.0)
    for _ in range(3):
        period.step_on(vector(1.0, 1.0))
    period.bring(vector(1.0, 1.0))
    period.end(vector(1.0, 1.0), vector(0.0, 8.0, present=(0.0, 1.0)))  # -1 and +1 a batch from now on
    own = (vector(1.0, 0.0, present=(1.0, 0.0)) for _ in range(3))
    steps = [gradients_of(period.step_on(mean)) for mean in own]
    assert steps == [[0.0, 1.0]] * 3
    last = vector(1.0, 0.0, present=(1.0, 0.0))
    period.bring(last)
    taken_back = period.end(last, None)
    assert gradients_of(taken_back) == [4.0, -3.0]
    assert (taken_back.presence > 0).tolist() == [True, True]
    assert gradients_of(period.step_on(vector(1.0, 1.0))) == [1.0, 1.0]


def test_a_forecast_is_taken_back_in_a_last_batch_without_data() -> None:
    period = Period(forecast_weight=1.0)
    end_one(period)
    assert gradients_of(period.step_on(vector(1.0, 1.0))) == [2.5, -1.0]
    period.bring(None)
    assert gradients_of(period.end(None, None)) == [-1.5, 2.0]


def test_another_cluster_forecasts_nothing() -> None:
    period = Period(forecast_weight=1.0)
    end_one(period)
    period.forget()
    assert gradients_of(period.step_on(vector(1.0, 1.0))) == [1.0, 1.0]
