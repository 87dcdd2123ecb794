"""How: collectives, the schedule that brings one about, its planners, its proof, and what it costs.

A planner maps a topology and a collective to a schedule, and returns only through the verifier.
"""

from syncline.schedule.collective import After, Before, Collective
from syncline.schedule.draft import UNOWNED, Draft
from syncline.schedule.layout import Layout
from syncline.schedule.program import Phase, RankProgram, Receive, Send
from syncline.schedule.schedule import Schedule
from syncline.schedule.transfers import Transfer, Transfers
from syncline.schedule.tree import plan_tree
from syncline.schedule.verifier import verify

__all__ = [
    "Collective",
    "Before",
    "After",
    "Draft",
    "UNOWNED",
    "Transfer",
    "Transfers",
    "verify",
    "Schedule",
    "RankProgram",
    "Phase",
    "Send",
    "Receive",
    "Layout",
    "plan_tree",
]
