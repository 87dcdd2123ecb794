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

from syncline.late_imports import load_name

if "torch" in sys.modules:  # else torch does it by the entry point, when it is imported
    import_module("syncline.backend.registration").register()

if TYPE_CHECKING:
    from syncline.backend.compressing import GroupCodec, compress_group
    from syncline.backend.huggingface import huggingface
    from syncline.backend.reconfiguration import Reconfiguration, commit, reconfigure
    from syncline.cli.launcher.function import launch
    from syncline.errors import (
        CheckpointError,
        ConfigurationError,
        DeadlineError,
        FabricClosedError,
        FabricError,
        HandshakeError,
        LabError,
        LaunchError,
        MismatchError,
        PeerLostError,
        RendezvousError,
        ScheduleError,
        StorageError,
        SynclineError,
        SynclineWarning,
        TopologyError,
        UnitError,
        UpdateError,
    )
    from syncline.members import Elastic, MembershipChange, QuorumLostError
    from syncline.priorities.settings import Priorities
    from syncline.pytorch import data
    from syncline.pytorch.checkpoint import (
        CheckpointWork,
        Resumption,
        latest_checkpoint,
        load_checkpoint,
        prepare_save,
        resume,
        save_checkpoint,
    )
    from syncline.pytorch.comm_hook import comm_hook
    from syncline.pytorch.control import batch_size, clip_grad_norm_, join, no_sync, synchronize
    from syncline.pytorch.distribute import distribute
    from syncline.pytorch.environment import BackendOptions
    from syncline.pytorch.fleet import Fleet, current_fleet
    from syncline.pytorch.init import init
    from syncline.pytorch.metrics import metrics, note
    from syncline.pytorch.optimizer import DistributedOptimizer
    from syncline.pytorch.phased import PhasedTrainer, phase
    from syncline.topology import Topology
    from syncline.updates import (
        AllReduce,
        Clustered,
        LocalSteps,
        Nesterov,
        Overlapped,
        Sharded,
        StateLostError,
    )

_HOMES = {
    "init": "syncline.pytorch.init",
    "current_fleet": "syncline.pytorch.fleet",
    "launch": "syncline.cli.launcher.function",
    "distribute": "syncline.pytorch.distribute",
    "Sharded": "syncline.updates",
    "AllReduce": "syncline.updates",
    "Overlapped": "syncline.updates",
    "LocalSteps": "syncline.updates",
    "Nesterov": "syncline.updates",
    "QuorumLostError": "syncline.members",
    "StateLostError": "syncline.updates",
    "Clustered": "syncline.updates",
    "Elastic": "syncline.members",
    "MembershipChange": "syncline.members",
    "Priorities": "syncline.priorities.settings",
    "phase": "syncline.pytorch.phased",
    "PhasedTrainer": "syncline.pytorch.phased",
    "no_sync": "syncline.pytorch.control",
    "join": "syncline.pytorch.control",
    "synchronize": "syncline.pytorch.control",
    "batch_size": "syncline.pytorch.control",
    "clip_grad_norm_": "syncline.pytorch.control",
    "comm_hook": "syncline.pytorch.comm_hook",
    "compress_group": "syncline.backend.compressing",
    "GroupCodec": "syncline.backend.compressing",
    "huggingface": "syncline.backend.huggingface",
    "metrics": "syncline.pytorch.metrics",
    "note": "syncline.pytorch.metrics",
    "save_checkpoint": "syncline.pytorch.checkpoint",
    "prepare_save": "syncline.pytorch.checkpoint",
    "load_checkpoint": "syncline.pytorch.checkpoint",
    "resume": "syncline.pytorch.checkpoint",
    "Resumption": "syncline.pytorch.checkpoint",
    "latest_checkpoint": "syncline.pytorch.checkpoint",
    "CheckpointWork": "syncline.pytorch.checkpoint",
    "BackendOptions": "syncline.pytorch.environment",
    "reconfigure": "syncline.backend.reconfiguration",
    "commit": "syncline.backend.reconfiguration",
    "Reconfiguration": "syncline.backend.reconfiguration",
    "Fleet": "syncline.pytorch.fleet",
    "DistributedOptimizer": "syncline.pytorch.optimizer",
    "Topology": "syncline.topology",
    "SynclineError": "syncline.errors",
    "ConfigurationError": "syncline.errors",
    "UnitError": "syncline.errors",
    "TopologyError": "syncline.errors",
    "ScheduleError": "syncline.errors",
    "FabricError": "syncline.errors",
    "RendezvousError": "syncline.errors",
    "HandshakeError": "syncline.errors",
    "PeerLostError": "syncline.errors",
    "FabricClosedError": "syncline.errors",
    "DeadlineError": "syncline.errors",
    "MismatchError": "syncline.errors",
    "UpdateError": "syncline.errors",
    "CheckpointError": "syncline.errors",
    "StorageError": "syncline.errors",
    "LaunchError": "syncline.errors",
    "LabError": "syncline.errors",
    "SynclineWarning": "syncline.errors",
}

_MODULES = {"data": "syncline.pytorch.data"}

__all__ = [
    "init",
    "current_fleet",
    "launch",
    "data",
    "distribute",
    "Sharded",
    "AllReduce",
    "Overlapped",
    "LocalSteps",
    "Nesterov",
    "QuorumLostError",
    "StateLostError",
    "Clustered",
    "Elastic",
    "MembershipChange",
    "Priorities",
    "phase",
    "PhasedTrainer",
    "no_sync",
    "join",
    "synchronize",
    "batch_size",
    "clip_grad_norm_",
    "comm_hook",
    "GroupCodec",
    "compress_group",
    "huggingface",
    "metrics",
    "note",
    "save_checkpoint",
    "prepare_save",
    "load_checkpoint",
    "resume",
    "Resumption",
    "latest_checkpoint",
    "CheckpointWork",
    "BackendOptions",
    "reconfigure",
    "commit",
    "Reconfiguration",
    "Fleet",
    "DistributedOptimizer",
    "Topology",
    "SynclineError",
    "ConfigurationError",
    "UnitError",
    "TopologyError",
    "ScheduleError",
    "FabricError",
    "RendezvousError",
    "HandshakeError",
    "PeerLostError",
    "FabricClosedError",
    "DeadlineError",
    "MismatchError",
    "UpdateError",
    "CheckpointError",
    "StorageError",
    "LaunchError",
    "LabError",
    "SynclineWarning",
]


def __getattr__(name: str) -> object:
    """Load a public name from its home, or a public module."""
    if name == "__version__":
        return import_module("importlib.metadata").version("syncline")
    if name in _MODULES:
        return import_module(_MODULES[name])
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'syncline' has no attribute {name!r}")
    return load_name(home, name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
