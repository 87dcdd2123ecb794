"""Slurm's ``srun``: which task of its step a process is, and where task 0 runs.

Outside a step (a batch script, the shell of ``salloc``) the variables of the allocation look much the same, down to
``SLURM_PROCID=0``; so only ``SLURM_STEP_NUM_TASKS`` says that ``srun`` started this process.

Rank 0 serves the store, so the master is the first node of the step. ``SLURM_LAUNCH_NODE_IPADDR`` is where ``srun``
itself ran, which may be a login node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from syncline.errors import ConfigurationError, TopologyError
from syncline.pytorch.launchers.place import (
    LOOPBACK,
    START_RANKS,
    TELL_MASTER,
    Place,
    check_place,
    derive_port,
    optional_number,
    whole_number,
)
from syncline.topology.hostlist import expand_hostlist

_SIZE = "SLURM_STEP_NUM_TASKS"
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def srun(values: Mapping[str, str]) -> Place | None:
    """Read a step's variables; master and port are those of its first node, and of its job and step.

    :class:`ConfigurationError` if the allocation has several tasks or nodes and no step started this process.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
    >>> place = srun({**step, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"})
    >>> place.rank, place.master_address, place.master_port
    (3, 'n1', 12707)
    """
    if not values.get(_SIZE):
        _check_allocation(values)
        return None
    world_size = whole_number(values, _SIZE, 1)
    if world_size == 1:
        return Place(rank=0, world_size=1, source=_SIZE, host=values.get("SLURMD_NODENAME") or None)
    if not values.get("SLURM_PROCID"):
        raise _not_by_srun(_SIZE, str(world_size), "SLURM_PROCID")
    nodes = _nodes(values)
    is_ordered = not values.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    is_known = bool(nodes) and (is_ordered or len(nodes) == 1)
    place = Place(
        rank=whole_number(values, "SLURM_PROCID", 0),
        world_size=world_size,
        source=_SIZE,
        local_rank=optional_number(values, "SLURM_LOCALID"),
        local_world_size=_local_size(values),
        host=values.get("SLURMD_NODENAME") or None,
        master_address=(LOOPBACK if len(nodes) == 1 else nodes[0]) if is_known else None,
        master_port=_port(values),
        remedy=TELL_MASTER
        if is_ordered
        else f"with an arbitrary distribution no node is known to run rank 0: {TELL_MASTER}",
    )
    return check_place(place, "SLURM_PROCID")


def _check_allocation(values: Mapping[str, str]) -> None:
    for name in ("SLURM_NTASKS", "SLURM_NNODES"):
        if whole_number(values, name, 1) > 1:
            raise _not_by_srun(name, values[name], _SIZE)


def _not_by_srun(source: str, number: str, missing: str) -> ConfigurationError:
    return ConfigurationError(
        f"{source} is {number}, but {missing} is not set, so Slurm did not start this process as one of several; "
        f"start it with srun, or {START_RANKS}"
    )


def _nodes(values: Mapping[str, str]) -> tuple[str, ...]:
    text = values.get("SLURM_STEP_NODELIST")
    try:
        return expand_hostlist(text) if text else ()
    except TopologyError as error:
        raise ConfigurationError(f"SLURM_STEP_NODELIST cannot be read: {error}") from error


def _port(values: Mapping[str, str]) -> int | None:
    """Return the first port that Slurm keeps free for the step, if it does; else one by the numbers of job and step."""
    reserved = values.get("SLURM_STEP_RESV_PORTS", "").partition("-")[0].partition(",")[0]
    if reserved.isdecimal():
        return int(reserved)
    job = optional_number(values, "SLURM_JOB_ID")
    return None if job is None else derive_port(job, whole_number(values, "SLURM_STEP_ID", 0))


def _local_size(values: Mapping[str, str]) -> int | None:
    """Return how many tasks of the step this node has: ``3(x2),1`` is 3, 3 and 1."""
    counts: list[int] = []
    for item in values.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := _REPEATED.fullmatch(item):
            counts += [int(match[1])] * min(int(match[2] or 1), 1 << 16)
    node = whole_number(values, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else None
