"""Accelerate and the Hugging Face Trainer on Syncline's process group: they take the one that is there.

Neither has a way in for other backends. On the processor Accelerate refuses every name but its own
(``ddp_backend="syncline"`` too), without a name it trains on gloo, and without an accelerator or torchrun's variables
each rank trains alone, unless ``cpu=True``; the last two in silence. So the group is made before them, and what they
read of the environment is written in torchrun's words, whatever started the ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist

from syncline.arguments import checked
from syncline.backend import NAME
from syncline.backend.creation import find_world
from syncline.errors import ConfigurationError
from syncline.pytorch.environment import BackendOptions, Environment, read_environment
from syncline.pytorch.launchers import find_place
from syncline.topology import Topology
from syncline.variables import process_variables


@checked
def huggingface(options: BackendOptions | Topology | str | Path | None = None) -> None:
    """Let Accelerate and the Hugging Face Trainer train on Syncline; call it before ``Accelerator()`` or its like.

    It makes the default process group, with ``options`` as ``init_process_group("syncline", pg_options=options)`` would
    (a topology or its path may stand alone), under every launcher that :func:`syncline.init` knows. Where there is no
    accelerator, ``ACCELERATE_USE_CPU`` is set, without which Accelerate would train on each rank alone. Leave
    ``ddp_backend`` out. A process that is alone in its job is left as it is.

    Raises :class:`ConfigurationError` if Accelerate has chosen already: it would train on gloo, or alone. And whatever
    :func:`syncline.init` raises.

    >>> syncline.huggingface()  # then Accelerator(), or TrainingArguments(...) and Trainer(...)
    """
    values = process_variables()
    place = find_place(values)
    if place.world_size == 1:
        return
    if find_world() is None:
        _check_nobody_chose(place.rank)
        _tell(read_environment(values), place.local_rank, place.local_world_size)
        dist.init_process_group(NAME, pg_options=options)
    if not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _check_nobody_chose(rank: int) -> None:
    """Refuse a group of another backend, and an Accelerate that has found none."""
    accelerate = sys.modules.get("accelerate.state")
    if dist.is_initialized():
        chosen = f"a process group of {dist.get_backend()} exists already"
    elif accelerate is not None and accelerate.PartialState._shared_state:  # as the Trainer asks
        chosen = "Accelerate has chosen already to train on each rank alone"
    else:
        return
    raise ConfigurationError(
        f"syncline.huggingface() must be called before Accelerator(), TrainingArguments() and other groups, but "
        f"on rank {rank} {chosen}; make it the first call of the script"
    )


def _tell(environment: Environment, local_rank: int | None, local_world_size: int | None) -> None:
    """Set torchrun's variables, by which torch meets and Accelerate counts; what is not known stays as it is."""
    told = {
        "RANK": environment.rank,
        "WORLD_SIZE": environment.world_size,
        "MASTER_ADDR": environment.master_address,
        "MASTER_PORT": environment.master_port,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    for name, value in told.items():
        if value is not None:
            os.environ[name] = str(value)
