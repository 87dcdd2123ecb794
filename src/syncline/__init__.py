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
    from syncline import (
        fabric as fabric,
        runtime as runtime,
        schedule as schedule,
        topology as topology,
        updates as updates,
    )
    from syncline.backend.compressing import GroupCodec as GroupCodec, compress_group as compress_group
    from syncline.backend.huggingface import huggingface as huggingface
    from syncline.backend.reconfiguration import (
        Reconfiguration as Reconfiguration,
        commit as commit,
        reconfigure as reconfigure,
    )
    from syncline.cli.launcher.function import launch as launch
    from syncline.errors import (
        CheckpointError as CheckpointError,
        ConfigurationError as ConfigurationError,
        DeadlineError as DeadlineError,
        FabricClosedError as FabricClosedError,
        FabricError as FabricError,
        HandshakeError as HandshakeError,
        LabError as LabError,
        LaunchError as LaunchError,
        MismatchError as MismatchError,
        PeerLostError as PeerLostError,
        RendezvousError as RendezvousError,
        ScheduleError as ScheduleError,
        StorageError as StorageError,
        SynclineError as SynclineError,
        SynclineWarning as SynclineWarning,
        TopologyError as TopologyError,
        UnitError as UnitError,
        UpdateError as UpdateError,
    )
    from syncline.members import (
        Elastic as Elastic,
        MembershipChange as MembershipChange,
        QuorumLostError as QuorumLostError,
    )
    from syncline.priorities.settings import Priorities as Priorities
    from syncline.pytorch import data as data
    from syncline.pytorch.checkpoint import (
        CheckpointWork as CheckpointWork,
        Resumption as Resumption,
        latest_checkpoint as latest_checkpoint,
        load_checkpoint as load_checkpoint,
        prepare_save as prepare_save,
        resume as resume,
        save_checkpoint as save_checkpoint,
    )
    from syncline.pytorch.comm_hook import comm_hook as comm_hook
    from syncline.pytorch.control import (
        batch_size as batch_size,
        clip_grad_norm_ as clip_grad_norm_,
        join as join,
        no_sync as no_sync,
        synchronize as synchronize,
    )
    from syncline.pytorch.distribute import distribute as distribute
    from syncline.pytorch.environment import BackendOptions as BackendOptions
    from syncline.pytorch.fleet import Fleet as Fleet, current_fleet as current_fleet
    from syncline.pytorch.init import init as init
    from syncline.pytorch.metrics import metrics as metrics, note as note
    from syncline.pytorch.optimizer import DistributedOptimizer as DistributedOptimizer
    from syncline.pytorch.phased import PhasedTrainer as PhasedTrainer, phase as phase
    from syncline.topology import Topology as Topology
    from syncline.updates import (
        AllReduce as AllReduce,
        Clustered as Clustered,
        Grace as Grace,
        LocalSteps as LocalSteps,
        Nesterov as Nesterov,
        Overlapped as Overlapped,
        Sharded as Sharded,
        StateLostError as StateLostError,
    )

_NAMES = {
    "pytorch.init": "init",
    "pytorch.fleet": "current_fleet Fleet",
    "cli.launcher.function": "launch",
    "pytorch.distribute": "distribute",
    "updates": "Sharded AllReduce Overlapped LocalSteps Nesterov Grace StateLostError Clustered",
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

_ROOMS = ("fabric", "lightning", "ray", "runtime", "schedule", "topology", "updates")
"""Packages and modules of other public names, which are written with their room: ``syncline.updates.matrix_cost``."""

__all__ = [name for text in ("data", *_NAMES.values()) for name in text.split()]
_load = late_names(__name__, _NAMES)


def __getattr__(name: str) -> object:
    """Load a public name from its home, or a public module."""
    if name == "__version__":
        return import_module("importlib.metadata").version("syncline")
    if name in _ROOMS:
        return import_module(f"syncline.{name}")
    return import_module("syncline.pytorch.data") if name == "data" else _load(name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
