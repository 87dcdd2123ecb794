"""How parameters change: update rules, and what they stand on. Modules, hooks and autograd are not known here."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.updates.allreduce import AllReduce
    from syncline.updates.clustered.rule import Clustered
    from syncline.updates.overlapped.rule import Overlapped
    from syncline.updates.parameter_owners import matrix_cost
    from syncline.updates.redistribution import StateLostError
    from syncline.updates.rounds.local_steps import LocalSteps
    from syncline.updates.rounds.outer import Nesterov
    from syncline.updates.rule import Setting, Updater, UpdateRule
    from syncline.updates.sharded import Sharded
    from syncline.updates.sharded_statistics import ShardedStatistics

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
        "Sharded": "syncline.updates.sharded",
        "ShardedStatistics": "syncline.updates.sharded_statistics",
        "matrix_cost": "syncline.updates.parameter_owners",
        "AllReduce": "syncline.updates.allreduce",
        "LocalSteps": "syncline.updates.rounds.local_steps",
        "Overlapped": "syncline.updates.overlapped.rule",
        "Nesterov": "syncline.updates.rounds.outer",
        "StateLostError": "syncline.updates.redistribution",
        "Clustered": "syncline.updates.clustered.rule",
        "UpdateRule": "syncline.updates.rule",
        "Updater": "syncline.updates.rule",
        "Setting": "syncline.updates.rule",
    },
)
