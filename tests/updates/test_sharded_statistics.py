"""What users see of the portions that were chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from syncline.updates.sharded_updater import ShardedStatistics


def schedules(*owned: tuple[int, ...], num_replicas: int = 1) -> Any:
    replicas = tuple((rank,) for rank in range(num_replicas)) if num_replicas > 1 else ()
    return [
        SimpleNamespace(
            num_owned=numbers,
            layout=SimpleNamespace(num_elements=sum(numbers) // num_replicas),
            replicas=replicas,
            apart=None,
        )
        for numbers in owned
    ]


def test_elements_of_all_buckets_are_counted() -> None:
    counted = ShardedStatistics.of(schedules((10, 30), (30, 30)), "fastest")
    assert counted.shares == (0.4, 0.6)
    assert counted.is_balanced
    assert (
        str(counted) == 'portions="fastest": of 100 elements ranks own 40.0 % to 60.0 %: rank 0 40.0 %, rank 1 60.0 %'
    )


def test_even_shares_are_said_once() -> None:
    assert str(ShardedStatistics.of(schedules((50, 50)), {"h0": 1.0})) == (
        'portions="given": each rank owns 50.0 % of 100 elements'
    )


def test_each_replica_owns_all_elements() -> None:
    counted = ShardedStatistics.of(schedules((60, 60, 40, 40), num_replicas=2), "balanced")
    assert (counted.shares, counted.num_replicas) == ((0.6, 0.6, 0.4, 0.4), 2)
    assert str(counted).startswith("2 replicas: of 100 elements ranks own 40.0 % to 60.0 %")


@pytest.mark.parametrize(("portions", "explains"), [("balanced", True), ("fastest", False)])
def test_portions_that_could_not_be_balanced_say_why(portions: Any, explains: bool) -> None:
    text = str(ShardedStatistics.of(schedules((70, 30)), portions))
    assert ("more than 10 % longer" in text) is explains
