"""How parameters change: update rules, and what they stand on. Modules, hooks and autograd are not known here."""

from syncline.updates.allreduce import AllReduce
from syncline.updates.clustered.rule import Clustered
from syncline.updates.overlapped.outer import Nesterov
from syncline.updates.overlapped.rule import Overlapped
from syncline.updates.parameter_owners import matrix_cost
from syncline.updates.redistribution import StateLostError
from syncline.updates.rule import Setting, Updater, UpdateRule
from syncline.updates.sharded import Sharded
from syncline.updates.sharded_statistics import ShardedStatistics

__all__ = [
    "Sharded",
    "ShardedStatistics",
    "matrix_cost",
    "AllReduce",
    "Overlapped",
    "Nesterov",
    "StateLostError",
    "Clustered",
    "UpdateRule",
    "Updater",
    "Setting",
]
