"""Syncline: data-parallel PyTorch training that is fast on networks that are not uniform.

    import syncline

    syncline.init()
    model, optimizer = syncline.distribute(model, optimizer, update=syncline.Sharded())

Names are loaded when they are first used, so that ``import syncline`` alone does not import PyTorch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if "torch" in sys.modules:  # else torch does it by the entry point, when it is imported
    import_module("syncline.backend.registration").register()

if TYPE_CHECKING:
    from syncline.backend.compressing import GroupCodec as GroupCodec
    from syncline.backend.compressing import compress_group as compress_group
    from syncline.backend.huggingface import huggingface as huggingface
    from syncline.backend.reconfiguration import Reconfiguration as Reconfiguration
    from syncline.backend.reconfiguration import commit as commit
    from syncline.backend.reconfiguration import reconfigure as reconfigure
    from syncline.cli.launcher.function import launch as launch
    from syncline.errors import CheckpointError as CheckpointError
    from syncline.errors import ConfigurationError as ConfigurationError
    from syncline.errors import DeadlineError as DeadlineError
    from syncline.errors import FabricClosedError as FabricClosedError
    from syncline.errors import FabricError as FabricError
    from syncline.errors import HandshakeError as HandshakeError
    from syncline.errors import LabError as LabError
    from syncline.errors import LaunchError as LaunchError
    from syncline.errors import MismatchError as MismatchError
    from syncline.errors import PeerLostError as PeerLostError
    from syncline.errors import RendezvousError as RendezvousError
    from syncline.errors import ScheduleError as ScheduleError
    from syncline.errors import StorageError as StorageError
    from syncline.errors import SynclineError as SynclineError
    from syncline.errors import SynclineWarning as SynclineWarning
    from syncline.errors import TopologyError as TopologyError
    from syncline.errors import UnitError as UnitError
    from syncline.errors import UpdateError as UpdateError
    from syncline.members import Elastic as Elastic
    from syncline.members import MembershipChange as MembershipChange
    from syncline.members import QuorumLostError as QuorumLostError
    from syncline.priorities.settings import Priorities as Priorities
    from syncline.pytorch import data as data
    from syncline.pytorch.checkpoint import CheckpointWork as CheckpointWork
    from syncline.pytorch.checkpoint import Resumption as Resumption
    from syncline.pytorch.checkpoint import latest_checkpoint as latest_checkpoint
    from syncline.pytorch.checkpoint import load_checkpoint as load_checkpoint
    from syncline.pytorch.checkpoint import prepare_save as prepare_save
    from syncline.pytorch.checkpoint import resume as resume
    from syncline.pytorch.checkpoint import save_checkpoint as save_checkpoint
    from syncline.pytorch.comm_hook import comm_hook as comm_hook
    from syncline.pytorch.control import batch_size as batch_size
    from syncline.pytorch.control import clip_grad_norm_ as clip_grad_norm_
    from syncline.pytorch.control import join as join
    from syncline.pytorch.control import no_sync as no_sync
    from syncline.pytorch.control import synchronize as synchronize
    from syncline.pytorch.distribute import distribute as distribute
    from syncline.pytorch.environment import BackendOptions as BackendOptions
    from syncline.pytorch.fleet import Fleet as Fleet
    from syncline.pytorch.fleet import current_fleet as current_fleet
    from syncline.pytorch.init import init as init
    from syncline.pytorch.metrics import metrics as metrics
    from syncline.pytorch.metrics import note as note
    from syncline.pytorch.optimizer import DistributedOptimizer as DistributedOptimizer
    from syncline.pytorch.phased import PhasedTrainer as PhasedTrainer
    from syncline.pytorch.phased import phase as phase
    from syncline.topology import Topology as Topology
    from syncline.updates import AllReduce as AllReduce
    from syncline.updates import Clustered as Clustered
    from syncline.updates import LocalSteps as LocalSteps
    from syncline.updates import Nesterov as Nesterov
    from syncline.updates import Overlapped as Overlapped
    from syncline.updates import Sharded as Sharded
    from syncline.updates import StateLostError as StateLostError

_NAMES = {
    "pytorch.init": "init",
    "pytorch.fleet": "current_fleet Fleet",
    "cli.launcher.function": "launch",
    "pytorch.distribute": "distribute",
    "updates": "Sharded AllReduce Overlapped LocalSteps Nesterov StateLostError Clustered",
    "members": "QuorumLostError Elastic MembershipChange",
    "priorities.settings": "Priorities",
    "pytorch.phased": "phase PhasedTrainer",
    "pytorch.control": "no_sync join synchronize batch_size clip_grad_norm_",
    "pytorch.comm_hook": "comm_hook",
    "backend.compressing": "compress_group GroupCodec",
    "backend.huggingface": "huggingface",
    "pytorch.metrics": "metrics note",
    "pytorch.checkpoint": (
        "save_checkpoint prepare_save load_checkpoint resume Resumption latest_checkpoint CheckpointWork"
    ),
    "pytorch.environment": "BackendOptions",
    "backend.reconfiguration": "reconfigure commit Reconfiguration",
    "pytorch.optimizer": "DistributedOptimizer",
    "topology": "Topology",
    "errors": (
        "SynclineError ConfigurationError UnitError TopologyError ScheduleError FabricError RendezvousError "
        "HandshakeError PeerLostError FabricClosedError DeadlineError MismatchError UpdateError "
        "CheckpointError StorageError LaunchError LabError SynclineWarning"
    ),
}

__all__ = [name for text in ("data", *_NAMES.values()) for name in text.split()]
_load = late_names(__name__, _NAMES)


def __getattr__(name: str) -> object:
    """Load a public name from its home, or the public module."""
    if name == "__version__":
        return import_module("importlib.metadata").version("syncline")
    return import_module("syncline.pytorch.data") if name == "data" else _load(name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
