"""A wrong argument is refused with its name, its value and what is meant, not with an error of Python's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline import AllReduce, Clustered, ConfigurationError, Elastic, Fleet, Overlapped, Priorities, Sharded

Misuse = Callable[[], object]
WORDS: Any = "three"
CONSTRUCTORS: dict[str, list[tuple[Callable[[], object], str]]] = {
    "Elastic": [
        (lambda: Elastic(min_ranks=WORDS), r"min_ranks must be .* from 1 up, not 'three'"),
        (lambda: Elastic(min_ranks=0), r"min_ranks must be .* from 1 up, not 0"),
        (lambda: Elastic(min_ranks=True), r"min_ranks must be .* from 1 up, not True"),
    ],
    "Priorities": [(lambda: Priorities(num_classes=WORDS), r"num_classes .* from 1 to 16, not 'three'")],
    "Sharded": [
        (lambda: Sharded(bucket_bytes=WORDS), r"bucket_bytes .*'three'"),
        (lambda: Sharded(spares=WORDS), r"spares must be 0, or 1 .* 'three'"),
        (lambda: Sharded(align=WORDS), r"align must be .* 'three'"),
    ],
    "AllReduce": [(lambda: AllReduce(bucket_bytes=WORDS), r"bucket_bytes .*'three'")],
    "Overlapped": [
        (lambda: Overlapped(period=WORDS), r"period .*'three'"),
        (lambda: Overlapped(quorum=WORDS), r"quorum .*'three'"),
        (lambda: Overlapped(servers=WORDS), r"servers .*'three'"),
    ],
    "Clustered": [(lambda: Clustered(period=WORDS), r"period .*'three'")],
}
CALLS: dict[str, list[tuple[Callable[[Fleet], object], str]]] = {
    "reduce": [(lambda fleet: fleet.reduce(torch.ones(1), dst=WORDS), r"dst must be a rank, 0 to 0, not 'three'")],
    "gather": [(lambda fleet: fleet.gather(torch.ones(1), dst=1), r"dst must be a rank, 0 to 0, not 1")],
    "gather_object": [(lambda fleet: fleet.gather_object(1, dst=WORDS), r"dst must be a rank, 0 to 0, not 'three'")],
    "broadcast": [(lambda fleet: fleet.broadcast(torch.ones(1), root=WORDS), r"root must be a rank, .* 'three'")],
    "broadcast_object": [(lambda fleet: fleet.broadcast_object(1, root=WORDS), r"root must be a rank, .* 'three'")],
}
CASES = [pytest.param(*case, id=f"{name}-{n}") for name, every in CONSTRUCTORS.items() for n, case in enumerate(every)]
CALL_CASES = [pytest.param(*case, id=f"{name}-{n}") for name, every in CALLS.items() for n, case in enumerate(every)]


@pytest.mark.parametrize(("misuse", "text"), CASES)
def test_what_cannot_be_made(misuse: Misuse, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        misuse()


@pytest.mark.parametrize(("misuse", "text"), CALL_CASES)
def test_what_a_fleet_cannot_do(misuse: Callable[[Fleet], object], text: str, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        with pytest.raises(ConfigurationError, match=text):
            misuse(fleet)

    run_fleets(1, body)
