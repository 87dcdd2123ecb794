"""How parameters change: update rules, and what they stand on. Torch is imported here; hooks and modules are not known."""

from syncline.updates.allreduce import AllReduce
from syncline.updates.rule import Setting, Updater, UpdateRule
from syncline.updates.sharded import Sharded

__all__ = ["Sharded", "AllReduce", "UpdateRule", "Updater", "Setting"]
