"""How: collectives, the schedule that brings one about, its planners, its proof, and what it costs.

A planner maps a topology and a collective to a schedule, and returns only through the verifier.
"""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.schedule.bound import lower_bound as lower_bound
    from syncline.schedule.cost import (
        DEFAULT_SLICE_BYTES as DEFAULT_SLICE_BYTES,
        CostModel as CostModel,
        Prediction as Prediction,
        StepPrediction as StepPrediction,
        predict as predict,
    )
    from syncline.schedule.draft import (
        UNOWNED as UNOWNED,
        After as After,
        Before as Before,
        Collective as Collective,
        Draft as Draft,
    )
    from syncline.schedule.in_trees import draft_with_owners as draft_with_owners
    from syncline.schedule.layout import Layout as Layout
    from syncline.schedule.ownership import Fractions as Fractions, Target as Target
    from syncline.schedule.planners import (
        PLANNERS as PLANNERS,
        Planner as Planner,
        choose as choose,
        with_gateways_chosen as with_gateways_chosen,
    )
    from syncline.schedule.schedule import (
        Phase as Phase,
        Receive as Receive,
        Schedule as Schedule,
        Send as Send,
    )
    from syncline.schedule.sharded_step import (
        ShardedStep as ShardedStep,
        layout_of_step as layout_of_step,
        plan_sharded_step as plan_sharded_step,
        predict_sharded_step as predict_sharded_step,
        sharded_step_bound as sharded_step_bound,
    )
    from syncline.schedule.transfers import Transfer as Transfer, Transfers as Transfers
    from syncline.schedule.tree import plan_tree as plan_tree
    from syncline.schedule.verifier import verify as verify

_NAMES = {
    "draft": "Collective Before After Draft UNOWNED",
    "transfers": "Transfer Transfers",
    "verifier": "verify",
    "schedule": "Schedule Phase Send Receive",
    "layout": "Layout",
    "ownership": "Target Fractions",
    "tree": "plan_tree",
    "planners": "Planner PLANNERS choose with_gateways_chosen",
    "cost": "predict Prediction StepPrediction CostModel DEFAULT_SLICE_BYTES",
    "bound": "lower_bound",
    "sharded_step": "ShardedStep plan_sharded_step predict_sharded_step sharded_step_bound layout_of_step",
    "in_trees": "draft_with_owners",
}

__all__ = [name for text in _NAMES.values() for name in text.split()]
__getattr__ = late_names(__name__, _NAMES)
