"""How: collectives, the schedule that brings one about, its planners, its proof, and what it costs.

A planner maps a topology and a collective to a schedule, and returns only through the verifier.
"""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.schedule.binomial import plan_binomial
    from syncline.schedule.bound import lower_bound
    from syncline.schedule.cost import DEFAULT_SLICE_BYTES, CostModel, Prediction, StepPrediction, predict
    from syncline.schedule.draft import UNOWNED, After, Before, Collective, Draft
    from syncline.schedule.in_trees import draft_with_owners
    from syncline.schedule.layout import Layout
    from syncline.schedule.ownership import Fractions, Target
    from syncline.schedule.planners import PLANNERS, Planner, choose, with_gateways_chosen
    from syncline.schedule.recursive_doubling import plan_recursive_doubling
    from syncline.schedule.ring import plan_ring
    from syncline.schedule.schedule import Phase, RankProgram, Receive, Schedule, Send
    from syncline.schedule.sharded_step import (
        ShardedStep,
        layout_of_step,
        plan_sharded_step,
        predict_sharded_step,
        sharded_step_bound,
    )
    from syncline.schedule.transfers import Transfer, Transfers
    from syncline.schedule.tree import plan_tree
    from syncline.schedule.verifier import split, verify
    from syncline.schedule.weighted_tree import plan_weighted_tree

__all__ = [
    "Collective",
    "Before",
    "After",
    "Draft",
    "UNOWNED",
    "Transfer",
    "Transfers",
    "verify",
    "split",
    "Schedule",
    "RankProgram",
    "Phase",
    "Send",
    "Receive",
    "Layout",
    "Target",
    "Fractions",
    "plan_tree",
    "plan_weighted_tree",
    "plan_ring",
    "plan_recursive_doubling",
    "plan_binomial",
    "Planner",
    "PLANNERS",
    "choose",
    "with_gateways_chosen",
    "predict",
    "Prediction",
    "CostModel",
    "DEFAULT_SLICE_BYTES",
    "lower_bound",
    "ShardedStep",
    "plan_sharded_step",
    "predict_sharded_step",
    "StepPrediction",
    "sharded_step_bound",
    "layout_of_step",
    "draft_with_owners",
]

__getattr__ = late_names(
    __name__,
    {
        "draft": "Collective Before After Draft UNOWNED",
        "transfers": "Transfer Transfers",
        "verifier": "verify split",
        "schedule": "Schedule RankProgram Phase Send Receive",
        "layout": "Layout",
        "ownership": "Target Fractions",
        "tree": "plan_tree",
        "weighted_tree": "plan_weighted_tree",
        "ring": "plan_ring",
        "recursive_doubling": "plan_recursive_doubling",
        "binomial": "plan_binomial",
        "planners": "Planner PLANNERS choose with_gateways_chosen",
        "cost": "predict Prediction StepPrediction CostModel DEFAULT_SLICE_BYTES",
        "bound": "lower_bound",
        "sharded_step": "ShardedStep plan_sharded_step predict_sharded_step sharded_step_bound layout_of_step",
        "in_trees": "draft_with_owners",
    },
)
