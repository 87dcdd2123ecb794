"""How parameters change: update rules, and what they stand on. Modules, hooks and autograd are not known here."""

from syncline.updates.allreduce import AllReduce
from syncline.updates.clustered.rule import Clustered
from syncline.updates.membership import QuorumLostError
from syncline.updates.overlapped.outer import Nesterov
from syncline.updates.overlapped.rule import Overlapped
from syncline.updates.rule import Setting, Updater, UpdateRule
from syncline.updates.sharded import Sharded

__all__ = [
    "Sharded",
    "AllReduce",
    "Overlapped",
    "Nesterov",
    "QuorumLostError",
    "Clustered",
    "UpdateRule",
    "Updater",
    "Setting",
]
