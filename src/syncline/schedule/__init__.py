"""How: collectives, the schedule that brings one about, its planners, its proof, and what it costs.

A planner maps a topology and a collective to a schedule, and returns only through the verifier.
"""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.schedule.binomial import plan_binomial
    from syncline.schedule.bound import lower_bound
    from syncline.schedule.collective import After, Before, Collective
    from syncline.schedule.cost import DEFAULT_SLICE_BYTES, CostModel, Prediction, predict
    from syncline.schedule.draft import UNOWNED, Draft
    from syncline.schedule.in_trees import draft_with_owners
    from syncline.schedule.layout import Layout
    from syncline.schedule.ownership import Fractions, Target
    from syncline.schedule.planners import PLANNERS, Planner, choose, with_gateways_chosen
    from syncline.schedule.program import Phase, RankProgram, Receive, Send
    from syncline.schedule.recursive_doubling import plan_recursive_doubling
    from syncline.schedule.ring import plan_ring
    from syncline.schedule.schedule import Schedule
    from syncline.schedule.sharded_step import (
        ShardedStep,
        layout_of_step,
        plan_sharded_step,
        predict_sharded_step,
        sharded_step_bound,
    )
    from syncline.schedule.step_prediction import StepPrediction
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
        "Collective": "syncline.schedule.collective",
        "Before": "syncline.schedule.collective",
        "After": "syncline.schedule.collective",
        "Draft": "syncline.schedule.draft",
        "UNOWNED": "syncline.schedule.draft",
        "Transfer": "syncline.schedule.transfers",
        "Transfers": "syncline.schedule.transfers",
        "verify": "syncline.schedule.verifier",
        "split": "syncline.schedule.verifier",
        "Schedule": "syncline.schedule.schedule",
        "RankProgram": "syncline.schedule.program",
        "Phase": "syncline.schedule.program",
        "Send": "syncline.schedule.program",
        "Receive": "syncline.schedule.program",
        "Layout": "syncline.schedule.layout",
        "Target": "syncline.schedule.ownership",
        "Fractions": "syncline.schedule.ownership",
        "plan_tree": "syncline.schedule.tree",
        "plan_weighted_tree": "syncline.schedule.weighted_tree",
        "plan_ring": "syncline.schedule.ring",
        "plan_recursive_doubling": "syncline.schedule.recursive_doubling",
        "plan_binomial": "syncline.schedule.binomial",
        "Planner": "syncline.schedule.planners",
        "PLANNERS": "syncline.schedule.planners",
        "choose": "syncline.schedule.planners",
        "with_gateways_chosen": "syncline.schedule.planners",
        "predict": "syncline.schedule.cost",
        "Prediction": "syncline.schedule.cost",
        "CostModel": "syncline.schedule.cost",
        "DEFAULT_SLICE_BYTES": "syncline.schedule.cost",
        "lower_bound": "syncline.schedule.bound",
        "ShardedStep": "syncline.schedule.sharded_step",
        "plan_sharded_step": "syncline.schedule.sharded_step",
        "predict_sharded_step": "syncline.schedule.sharded_step",
        "StepPrediction": "syncline.schedule.step_prediction",
        "sharded_step_bound": "syncline.schedule.sharded_step",
        "layout_of_step": "syncline.schedule.sharded_step",
        "draft_with_owners": "syncline.schedule.in_trees",
    },
)
