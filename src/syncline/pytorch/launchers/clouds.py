"""SkyPilot, dstack and Kubernetes: each runs the task's command once per node, or pod, and says how many GPUs one has.

With one process per node that process is the node's rank. With several, the command is to be torchrun: a TrainJob of
the Kubeflow Trainer sets torchrun's own variables (``PET_*``) for each pod.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.errors import ConfigurationError
from syncline.pytorch.launchers.place import (
    DEFAULT_MASTER_PORT,
    START_RANKS,
    Place,
    check_place,
    derive_port,
    whole_number,
)

_USE_TORCHRUN = (
    "let each pod start `torchrun train.py` in place of `python train.py`: torchrun reads the PET variables; or start "
    "one process per node (numProcPerNode: 1)"
)


def skypilot(values: Mapping[str, str]) -> Place | None:
    """Read ``SKYPILOT_NUM_NODES``, ``_NODE_RANK``, ``_NODE_IPS`` (the first is rank 0's) and ``_NUM_GPUS_PER_NODE``.

    The port is by ``SKYPILOT_TASK_ID``, since tasks may share a cluster.

    >>> place = skypilot({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4"})
    >>> place.rank, place.master_address
    (1, '10.0.0.4')
    """
    task = values.get("SKYPILOT_TASK_ID")
    return _one_per_node(
        values,
        num_nodes="SKYPILOT_NUM_NODES",
        rank="SKYPILOT_NODE_RANK",
        num_gpus="SKYPILOT_NUM_GPUS_PER_NODE",
        address=next(iter(values.get("SKYPILOT_NODE_IPS", "").split()), None),
        port=derive_port(task) if task else DEFAULT_MASTER_PORT,
        master='$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
    )


def dstack(values: Mapping[str, str]) -> Place | None:
    """Read ``DSTACK_NODES_NUM``, ``_NODE_RANK``, ``_MASTER_NODE_IP`` and ``_GPUS_PER_NODE``; port by ``_RUN_NAME``."""
    run = values.get("DSTACK_RUN_NAME")
    return _one_per_node(
        values,
        num_nodes="DSTACK_NODES_NUM",
        rank="DSTACK_NODE_RANK",
        num_gpus="DSTACK_GPUS_PER_NODE",
        address=values.get("DSTACK_MASTER_NODE_IP") or None,
        port=derive_port(run) if run else DEFAULT_MASTER_PORT,
        master="$DSTACK_MASTER_NODE_IP",
    )


def _one_per_node(
    values: Mapping[str, str],
    *,
    num_nodes: str,
    rank: str,
    num_gpus: str,
    address: str | None,
    port: int,
    master: str,
) -> Place | None:
    """Return the node's place; ``master`` is what a shell writes for rank 0's address."""
    if not values.get(num_nodes):
        return None
    world_size = whole_number(values, num_nodes, 1)
    if world_size > 1 and whole_number(values, num_gpus, 0) > 1:
        raise ConfigurationError(
            f"{num_nodes} is {values[num_nodes]!r} and {num_gpus} {values[num_gpus]!r}, but WORLD_SIZE is not set; let "
            f"the task start `torchrun --nnodes=${num_nodes} --nproc-per-node=${num_gpus} --node-rank=${rank} "
            f"--master-addr={master} --master-port={DEFAULT_MASTER_PORT} train.py`"
        )
    if world_size > 1 and not values.get(rank):
        raise ConfigurationError(f"{num_nodes} is {values[num_nodes]!r}, but {rank} is not set; {START_RANKS}")
    place = Place(
        rank=whole_number(values, rank, 0) if world_size > 1 else 0,
        world_size=world_size,
        source=num_nodes,
        local_rank=0,
        local_world_size=1,
        master_address=address,
        master_port=port if address else None,
    )
    return check_place(place, rank)


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
