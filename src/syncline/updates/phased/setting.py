"""What a rank of a pair works on, put together when its model is set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from syncline.runtime.port import Port
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.phased.computing import Loss
from syncline.updates.phased.stage import Stage
from syncline.updates.phased.storage import Storage


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
    storage: Storage
    collectives: BucketCollectives
    """Between the ranks of this side, which hold the same stages."""
    port: Port
    """Between all ranks of the job."""
    stream: int
    """Of the messages between the two ranks of a pair."""
    note_wait: Callable[[str, float], None]
    """Adds to the seconds that the training thread waited, by reason."""
