"""How parameters change: update rules, and what they stand on. Modules, hooks and autograd are not known here."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.updates.allreduce import AllReduce as AllReduce
    from syncline.updates.clustered.rule import Clustered as Clustered, TemporaryServer as TemporaryServer
    from syncline.updates.local_steps import Grace as Grace, LocalSteps as LocalSteps, Nesterov as Nesterov
    from syncline.updates.overlapped.rule import Overlapped as Overlapped
    from syncline.updates.ownership import matrix_cost as matrix_cost
    from syncline.updates.peer_state import StateLostError as StateLostError
    from syncline.updates.rule import Setting as Setting, Updater as Updater, UpdateRule as UpdateRule
    from syncline.updates.sharded import Sharded as Sharded
    from syncline.updates.sharded_updater import ShardedStatistics as ShardedStatistics

_NAMES = {
    "sharded": "Sharded",
    "sharded_updater": "ShardedStatistics",
    "ownership": "matrix_cost",
    "allreduce": "AllReduce",
    "local_steps": "LocalSteps Nesterov Grace",
    "overlapped.rule": "Overlapped",
    "peer_state": "StateLostError",
    "clustered.rule": "Clustered TemporaryServer",
    "rule": "UpdateRule Updater Setting",
}

__all__ = [name for text in _NAMES.values() for name in text.split()]
__getattr__ = late_names(__name__, _NAMES)
