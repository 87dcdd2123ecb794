"""Kubernetes: a TrainJob of the Kubeflow Trainer, and a JobSet or an indexed Job.

A TrainJob sets torchrun's own variables (``PET_*``) for each pod, and each pod is to start torchrun. Where a pod has
one process, the pod's number is its rank and torchrun is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.errors import ConfigurationError
from syncline.pytorch.launchers.place import (
    DEFAULT_MASTER_PORT,
    START_RANKS,
    Place,
    check_place,
    whole_number,
)

_USE_TORCHRUN = (
    "let each pod start `torchrun train.py` in place of `python train.py`: torchrun reads the PET variables; or start "
    "one process per node (numProcPerNode: 1)"
)


def train_job(values: Mapping[str, str]) -> Place | None:
    """Read ``PET_NNODES``, ``PET_NPROC_PER_NODE``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT``.

    :class:`ConfigurationError` if a node is to have several processes, which torchrun alone can start.

    >>> place = train_job({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"})
    >>> place.rank, place.world_size, place.master_port
    (1, 2, 29500)
    """
    if not values.get("PET_NNODES") and not values.get("PET_NPROC_PER_NODE"):
        return None
    num_nodes, num_processes = values.get("PET_NNODES") or "1", values.get("PET_NPROC_PER_NODE") or "1"
    if num_nodes == "1:1":
        num_nodes = "1"
    if num_processes != "1":
        raise ConfigurationError(f"PET_NPROC_PER_NODE is {num_processes!r}, but WORLD_SIZE is not set; {_USE_TORCHRUN}")
    if not num_nodes.isdecimal():
        raise ConfigurationError(f"PET_NNODES is {num_nodes!r}, but WORLD_SIZE is not set; {_USE_TORCHRUN}")
    if num_nodes != "1" and not values.get("PET_NODE_RANK"):
        raise ConfigurationError(f"PET_NNODES is {num_nodes!r}, but PET_NODE_RANK is not set; {_USE_TORCHRUN}")
    address = values.get("PET_MASTER_ADDR") or None
    place = Place(
        rank=whole_number(values, "PET_NODE_RANK", 0) if num_nodes != "1" else 0,
        world_size=int(num_nodes),
        source="PET_NNODES",
        local_rank=0,
        local_world_size=1,
        master_address=address,
        master_port=whole_number(values, "PET_MASTER_PORT", DEFAULT_MASTER_PORT) if address else None,
    )
    return check_place(place, "PET_NODE_RANK")


def job_set(values: Mapping[str, str]) -> Place | None:
    """Refuse an indexed Job that says the number of a pod and not of how many."""
    if not values.get("JOB_COMPLETION_INDEX") or values.get("PET_NNODES"):
        return None
    raise ConfigurationError(
        f"JOB_COMPLETION_INDEX is {values['JOB_COMPLETION_INDEX']!r}, so this may be one process of several, but "
        "WORLD_SIZE is not set; set WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the pod's template, and RANK from the "
        f"field metadata.annotations['batch.kubernetes.io/job-completion-index']; or {START_RANKS}"
    )
