"""How: collectives, the schedule that brings one about, its planners, its proof, and what it costs.

A planner maps a topology and a collective to a schedule, and returns only through the verifier.
"""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.schedule.binomial import plan_binomial as plan_binomial
    from syncline.schedule.bound import lower_bound as lower_bound
    from syncline.schedule.cost import DEFAULT_SLICE_BYTES as DEFAULT_SLICE_BYTES
    from syncline.schedule.cost import CostModel as CostModel
    from syncline.schedule.cost import Prediction as Prediction
    from syncline.schedule.cost import StepPrediction as StepPrediction
    from syncline.schedule.cost import predict as predict
    from syncline.schedule.draft import UNOWNED as UNOWNED
    from syncline.schedule.draft import After as After
    from syncline.schedule.draft import Before as Before
    from syncline.schedule.draft import Collective as Collective
    from syncline.schedule.draft import Draft as Draft
    from syncline.schedule.in_trees import draft_with_owners as draft_with_owners
    from syncline.schedule.layout import Layout as Layout
    from syncline.schedule.ownership import Fractions as Fractions
    from syncline.schedule.ownership import Target as Target
    from syncline.schedule.planners import PLANNERS as PLANNERS
    from syncline.schedule.planners import Planner as Planner
    from syncline.schedule.planners import choose as choose
    from syncline.schedule.planners import with_gateways_chosen as with_gateways_chosen
    from syncline.schedule.recursive_doubling import plan_recursive_doubling as plan_recursive_doubling
    from syncline.schedule.ring import plan_ring as plan_ring
    from syncline.schedule.schedule import Phase as Phase
    from syncline.schedule.schedule import RankProgram as RankProgram
    from syncline.schedule.schedule import Receive as Receive
    from syncline.schedule.schedule import Schedule as Schedule
    from syncline.schedule.schedule import Send as Send
    from syncline.schedule.sharded_step import ShardedStep as ShardedStep
    from syncline.schedule.sharded_step import layout_of_step as layout_of_step
    from syncline.schedule.sharded_step import plan_sharded_step as plan_sharded_step
    from syncline.schedule.sharded_step import predict_sharded_step as predict_sharded_step
    from syncline.schedule.sharded_step import sharded_step_bound as sharded_step_bound
    from syncline.schedule.transfers import Transfer as Transfer
    from syncline.schedule.transfers import Transfers as Transfers
    from syncline.schedule.tree import plan_tree as plan_tree
    from syncline.schedule.verifier import split as split
    from syncline.schedule.verifier import verify as verify
    from syncline.schedule.weighted_tree import plan_weighted_tree as plan_weighted_tree

_NAMES = {
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
}

__all__ = [name for text in _NAMES.values() for name in text.split()]
__getattr__ = late_names(__name__, _NAMES)
