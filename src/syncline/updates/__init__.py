"""How parameters change: update rules, and what they stand on. Modules, hooks and autograd are not known here."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.updates.allreduce import AllReduce
    from syncline.updates.clustered.rule import Clustered
    from syncline.updates.local_steps import LocalSteps, Nesterov
    from syncline.updates.overlapped.rule import Overlapped
    from syncline.updates.ownership import matrix_cost
    from syncline.updates.peer_state import StateLostError
    from syncline.updates.rule import Setting, Updater, UpdateRule
    from syncline.updates.sharded import Sharded
    from syncline.updates.sharded_updater import ShardedStatistics

__all__ = [
    "Sharded",
    "ShardedStatistics",
    "matrix_cost",
    "AllReduce",
    "LocalSteps",
    "Overlapped",
    "Nesterov",
    "StateLostError",
    "Clustered",
    "UpdateRule",
    "Updater",
    "Setting",
]

__getattr__ = late_names(
    __name__,
    {
        "sharded": "Sharded",
        "sharded_updater": "ShardedStatistics",
        "ownership": "matrix_cost",
        "allreduce": "AllReduce",
        "local_steps": "LocalSteps Nesterov",
        "overlapped.rule": "Overlapped",
        "peer_state": "StateLostError",
        "clustered.rule": "Clustered",
        "rule": "UpdateRule Updater Setting",
    },
)
