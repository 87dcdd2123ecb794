"""What a rank of a pair works on, put together when its model is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from syncline.runtime.communicator import Communicator
from syncline.runtime.port import Port
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.control import ControlStream
from syncline.updates.phased.computing import Loss
from syncline.updates.phased.stage import Stage
from syncline.updates.phased.storage import Storage
from syncline.updates.phased.updating import Clipping
from syncline.updates.phased.versions import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedSetting:
    """The stages of one rank, and everything that it needs to train them."""

    stages: Mapping[int, Stage]
    """Those that it computes."""
    num_stages: int
    side: int
    partner: int
    max_stages: int
    """Stages that have memory at once."""
    optimizer: torch.optim.Optimizer
    """The user's; its ``param_groups`` stay live."""
    whole_parameters: bool
    loss: Loss
    input_budget_bytes: int | None
    """What inputs that wait for their phase may take of memory; None is everything."""
    clipping: Clipping | None
    storage: Storage
    manifest: Manifest | None
    """Of the step that training begins with, if versions are kept."""
    job: Communicator
    """Of all ranks of the job."""
    collectives: BucketCollectives
    """Between the ranks of this side, which hold the same stages."""
    port: Port
    """Between all ranks of the job."""
    stream: int
    """Of the messages between the two ranks of a pair."""
    versions: ControlStream | None
    """Between all ranks of the job, to tell that a step is stored; None if no versions are kept."""

    @property
    def keeps_versions(self) -> bool:
        """Whether each step is stored beside the one before."""
        return self.manifest is not None
