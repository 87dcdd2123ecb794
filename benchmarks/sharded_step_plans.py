"""How near sharded steps are to the least time of their links: the shipped topologies and random trees.

For each: the predicted reduce-scatter and all-gather of 64 MiB, where links alone cost anything, over the bound; once
with any owners and once with none above 1.25 times its equal share. Nothing is measured, so a busy machine does as well
as an idle one. The trees are those of the tests.

    python benchmarks/sharded_step_plans.py                       the table, as Markdown
    python benchmarks/sharded_step_plans.py --trees 50 --ranks 24
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from syncline.schedule import CostModel, plan_sharded_step, predict_sharded_step, sharded_step_bound
from syncline.schedule.step_candidates import BALANCED
from syncline.topology import Topology
from syncline.topology.document import shipped_names

sys.path.append(str(Path(__file__).parents[1] / "tests" / "schedule"))
from schedule_trees import trees

NUM_BYTES = 64 << 20
FAR = 1.1
LINKS_ALONE = CostModel.of_links_alone()


def random_trees(count: int, max_ranks: int) -> list[Topology]:
    """Draw trees that differ, the same ones each time."""
    drawn: dict[str, Topology] = {}

    @seed(24)
    @settings(
        max_examples=4 * count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trees(max_ranks=max_ranks))
    def draw(topology: Topology) -> None:
        if topology.num_ranks > 1:
            drawn.setdefault(topology.digest, topology)

    draw()
    return list(drawn.values())[:count]


def judge(topology: Topology, cap: float) -> tuple[float, float, str]:
    """Return the bound in seconds, the prediction over it, and the planner, where no rank owns more than ``cap``."""
    most = [min(1.0, cap)] * topology.num_ranks
    bound_s = sharded_step_bound(topology, NUM_BYTES, most=most)
    step = plan_sharded_step(topology, NUM_BYTES, most=most, portions="fastest", cost=LINKS_ALONE)
    time_s = predict_sharded_step(step, topology, NUM_BYTES, cost=LINKS_ALONE).time_s
    return bound_s, time_s / bound_s if bound_s else 1.0, step.reduce_scatter.planner


def main() -> None:
    """Print one row for each topology, then a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=64, help="the most that a tree has")
    arguments = parser.parse_args()
    shipped = [Topology.load(name) for name in shipped_names()]
    drawn = random_trees(arguments.trees, arguments.ranks)
    print("| topology | ranks | bound, any owners (s) | x | planner | bound, capped (s) | x | planner |")
    print("|---|---|---|---|---|---|---|---|")
    ratios = []
    for number, topology in enumerate([*shipped, *drawn]):
        name = topology.name if number < len(shipped) else f"random {number - len(shipped)}"
        cells = [judge(topology, cap) for cap in (1.0, BALANCED / topology.num_ranks)]
        ratios += [ratio for _, ratio, _ in cells]
        figures = " | ".join(f"{bound_s:.3f} | {ratio:.3f} | {planner}" for bound_s, ratio, planner in cells)
        print(f"| {name} | {topology.num_ranks} | {figures} |", flush=True)
    num_far = sum(ratio > FAR for ratio in ratios)
    print(f"\n{len(ratios)} plans, {num_far} of them more than {FAR - 1:.0%} above the bound; worst {max(ratios):.3f}")


if __name__ == "__main__":
    main()
