"""What each planner would do on a topology, as plain numbers: the part of ``syncline plan`` that does not print."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncline.errors import ConfigurationError
from syncline.schedule import Collective, Prediction, Schedule, lower_bound, predict, with_gateways_chosen
from syncline.schedule.cost import fastest, predicted_slice_bytes
from syncline.schedule.ownership import Target
from syncline.schedule.planners import PLANNERS, check_plannable
from syncline.topology import DirectedLink, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """One planner's schedule in figures."""

    planner: str
    prediction: Prediction
    ratio: float
    """Predicted time over the lower bound; infinite where no link limits."""
    num_steps: int
    num_messages: int
    link_bytes: Mapping[DirectedLink, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All planners side by side, in the order of their registry."""

    topology: Topology
    collective: Collective
    num_bytes: int
    bound_s: float
    results: tuple[PlannerResult, ...]

    @property
    def winner(self) -> PlannerResult:
        """The fastest by prediction, as the library itself chooses (:func:`syncline.schedule.cost.fastest`)."""
        return fastest((result, result.prediction) for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "topology": self.topology.name,
            "num_ranks": self.topology.num_ranks,
            "collective": self.collective.value,
            "num_bytes": self.num_bytes,
            "bound_s": self.bound_s,
            "winner": self.winner.planner,
            "planners": [_result_json(result) for result in self.results],
        }


def compare_planners(
    topology: Topology, collective: Collective, num_bytes: int, *, target: Target = "balanced", root: int = 0
) -> Comparison:
    """Plan ``collective`` with every planner that serves it, and prove and predict each schedule."""
    if not 0 <= root < topology.num_ranks:
        raise ConfigurationError(f"--root must be a rank from 0 to {topology.num_ranks - 1}, got {root}")
    check_plannable(topology)
    topology = with_gateways_chosen(topology, num_bytes)
    bound_s = lower_bound(topology, collective, num_bytes, target=target, root=root)
    schedules = [
        planner.plan(topology, collective, target=target, root=root)
        for planner in PLANNERS.values()
        if planner.serves(topology, collective, target)
    ]
    return Comparison(
        topology=topology,
        collective=collective,
        num_bytes=num_bytes,
        bound_s=bound_s,
        results=tuple(_judge(schedule, topology, num_bytes, bound_s) for schedule in schedules),
    )


def _judge(schedule: Schedule, topology: Topology, num_bytes: int, bound_s: float) -> PlannerResult:
    prediction = predict(schedule, topology, num_bytes, predicted_slice_bytes(topology))
    return PlannerResult(
        planner=schedule.planner,
        prediction=prediction,
        ratio=prediction.time_s / bound_s if bound_s > 0 else math.inf,
        num_steps=schedule.num_steps,
        num_messages=len(schedule.transfers),
        link_bytes=schedule.link_bytes(topology, num_bytes),
    )


def _result_json(result: PlannerResult) -> dict[str, Any]:
    prediction, bottleneck = result.prediction, result.prediction.bottleneck
    links: dict[str, dict[str, int]] = {}
    for link, amount in result.link_bytes.items():
        links.setdefault(link.child, {})[link.direction] = amount
    return {
        "planner": result.planner,
        "time_s": prediction.time_s,
        "ratio": result.ratio if math.isfinite(result.ratio) else None,
        "num_steps": result.num_steps,
        "num_messages": result.num_messages,
        "bottleneck": [bottleneck.child, bottleneck.direction] if bottleneck else None,
        "num_full_links": prediction.num_full_links,
        "link_bytes": links,
    }
