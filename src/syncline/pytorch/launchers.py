"""Which rank this process is, of how many, and where they meet: from the variables of whatever started it.

Each launcher has one pure function from the variables to a :class:`Place`, or to None. ``RANK`` and ``WORLD_SIZE``
(torchrun, ``syncline run``, Ray Train, a user) go before everything else. Without ``WORLD_SIZE`` the job has one rank
only if no launcher says, or may mean, more: a rank that believes itself alone trains a model of its own, in silence. So
a launcher that says more than one is used or refused.

Launchers may be nested: the one that is asked first is the one that usually stands inside. ``mpirun`` in a Slurm
allocation leaves each process the variables of the daemon that started it, and SkyPilot may run on Slurm.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from syncline.endpoints import DEFAULT_MASTER_PORT, LOOPBACK, without_brackets
from syncline.errors import ConfigurationError, TopologyError
from syncline.topology.host_matching import expand_hostlist
from syncline.variables import optional_number, whole_number

_FIRST_PORT, _NUM_PORTS = 12000, 17393
"""A prime number of ports, below torchrun's, Kubernetes' and those that the kernel gives to connections."""
_NEXT_JOB = 101

START_RANKS = (
    "start the ranks with `torchrun` or `syncline run` on each machine, or set RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT for each; WORLD_SIZE=1 if this process is to train alone"
)
TELL_MASTER = (
    "set both, alike for all ranks, to the host of rank 0 and a free port there, or give init(master=), or use "
    "`syncline run`"
)


class Place(NamedTuple):
    """A process's place in its job."""

    rank: int
    world_size: int
    source: str
    """What says how many ranks there are, mostly a variable."""
    local_rank: int | None = None
    """Its number among the processes of its host, None if the launcher does not say."""
    local_world_size: int | None = None
    host: str | None = None
    """What the launcher calls this host."""
    master_address: str | None = None
    """Where rank 0 runs, as the other ranks reach it."""
    master_port: int | None = None
    remedy: str = TELL_MASTER
    """What to do where the launcher does not tell the master."""


Launcher = Callable[[Mapping[str, str]], Place | None]
"""From a process's variables to its place; None if that launcher did not start it as one of several, and
:class:`ConfigurationError` if what it says leaves the place open."""


def check_place(place: Place, name: str) -> Place:
    """Return ``place`` if its rank, from the variable ``name``, is one of the job's."""
    if not 0 <= place.rank < place.world_size:
        raise ConfigurationError(
            f"{name} must be from 0 to {place.source} - 1, but they are {place.rank} and {place.world_size}; "
            "start the ranks with `syncline run` or torchrun"
        )
    return place


def derive_port(job: int | str, step: int = 0) -> int:
    """Return a port for rank 0 that all ranks of a job derive alike, and other jobs on its host hardly.

    Numbers of jobs that share a host are mostly near each other: of 17,393 consecutive jobs no two have the same port
    in the same step, nor do two less than 172 apart in any of their first 101 steps. The port may still be in use: then
    rank 0 says so, and MASTER_PORT goes before it. A job named by a text gets one of as many ports by its checksum.
    """
    number = job if isinstance(job, int) else zlib.crc32(job.encode())
    return _FIRST_PORT + (number * _NEXT_JOB + step) % _NUM_PORTS


def _numbered(values: Mapping[str, str], size: str, rank: str, start: str, **more: Any) -> Place | None:
    """Return the place that two variables tell, ``more`` of it beside; None unless the process is one of several.

    ``start`` says how to start it where it has no number.
    """
    world_size = whole_number(values, size, 1)
    if world_size <= 1:
        return None
    if not values.get(rank):
        raise ConfigurationError(f"{size} is {values[size]!r}, but {rank} is not set; {start}")
    return check_place(Place(rank=whole_number(values, rank, 0), world_size=world_size, source=size, **more), rank)


# Slurm's ``srun``: which task of its step a process is, and where task 0 runs.
#
# Outside a step (a batch script, the shell of ``salloc``) the variables of the allocation look much the same, down to
# ``SLURM_PROCID=0``; so only ``SLURM_STEP_NUM_TASKS`` says that ``srun`` started this process.
#
# Rank 0 serves the store, so the master is the first node of the step. ``SLURM_LAUNCH_NODE_IPADDR`` is where ``srun``
# itself ran, which may be a login node.


_SIZE = "SLURM_STEP_NUM_TASKS"
_USE_SRUN = f"Slurm did not start this process as one of several: start it with srun, or {START_RANKS}"
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
    nodes = _nodes(values)
    is_ordered = not values.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    is_known = bool(nodes) and (is_ordered or len(nodes) == 1)
    return _numbered(
        values,
        _SIZE,
        "SLURM_PROCID",
        _USE_SRUN,
        local_rank=optional_number(values, "SLURM_LOCALID"),
        local_world_size=_local_size(values),
        host=values.get("SLURMD_NODENAME") or None,
        master_address=(LOOPBACK if len(nodes) == 1 else nodes[0]) if is_known else None,
        master_port=_port(values),
        remedy=TELL_MASTER
        if is_ordered
        else f"with an arbitrary distribution no node is known to run rank 0: {TELL_MASTER}",
    )


def _check_allocation(values: Mapping[str, str]) -> None:
    for name in ("SLURM_NTASKS", "SLURM_NNODES"):
        if whole_number(values, name, 1) > 1:
            raise ConfigurationError(f"{name} is {values[name]}, but {_SIZE} is not set; {_USE_SRUN}")


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


# ``mpirun`` and ``mpiexec``: Open MPI, and those that speak PMI (MPICH and its kin with Hydra, Intel MPI).
#
# None of them tells where rank 0 runs. Where all ranks are on one host that is loopback, on a port by the job's name;
# otherwise the user says it, and the error shows how.


_HYDRA_PROXY = "hydra_pmi_proxy"
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", _SIZE)


def open_mpi(values: Mapping[str, str]) -> Place | None:
    """Read ``OMPI_COMM_WORLD_SIZE``, ``_RANK``, ``_LOCAL_RANK`` and ``_LOCAL_SIZE``.

    >>> names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    >>> said = {f"OMPI_COMM_WORLD_{name}": text for name, text in zip(names, "4114", strict=True)}
    >>> place = open_mpi({**said, "PMIX_NAMESPACE": "prterun-a0-1234@1"})
    >>> place.rank, place.world_size, place.master_address
    (1, 4, '127.0.0.1')
    """
    jobs = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    return _by_mpi(
        values,
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        local=("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        host="PMIX_HOSTNAME",
        find_job=lambda: next(filter(None, map(values.get, jobs)), None),
        passing="-x {}={}",
        number="PMIX_RANK",
    )


def _hydra_proxy() -> int | None:
    """Return the process of Hydra above this one, which may have a shell between them; None if there is none."""
    import psutil  # under MPI alone

    try:
        return next((above.pid for above in psutil.Process().parents() if above.name() == _HYDRA_PROXY), None)
    except psutil.Error:
        return None


def mpich(values: Mapping[str, str], *, find_proxy: Callable[[], int | None] = _hydra_proxy) -> Place | None:
    """Read ``PMI_SIZE``, ``PMI_RANK``, ``MPI_LOCALRANKID`` and ``MPI_LOCALNRANKS``.

    Hydra tells no process the name of its job; but all ranks of a host are below one proxy, and on one host the number
    of that process, from ``find_proxy``, names the job as well.
    """
    return _by_mpi(
        values,
        ("PMI_SIZE", "PMI_RANK"),
        local=("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        host="PMI_HOSTNAME",
        find_job=lambda: values.get("PMI_JOBID") or find_proxy(),
        passing="-genv {} {}",
        number="PMI_ID",
    )


def _by_mpi(
    values: Mapping[str, str],
    place: tuple[str, str],
    *,
    local: tuple[str, str],
    host: str,
    find_job: Callable[[], int | str | None],
    passing: str,
    number: str,
) -> Place | None:
    """Read one kind of MPI: size and rank in the job and on the host, and how its launcher passes variables on.

    Raises for a ``number`` without any size: ``mpiexec -pmi-port`` tells none.
    """
    if values.get(number) and not any(map(values.get, _SIZES)):
        raise ConfigurationError(
            f"{number} is {values[number]!r}, so this may be one process of several, but WORLD_SIZE is not set; "
            f"{START_RANKS}"
        )
    num_local = optional_number(values, local[0])
    is_one_host = num_local is not None and num_local == optional_number(values, place[0])
    job = find_job() if is_one_host else None
    return _numbered(
        values,
        *place,
        f"start it with mpirun, or {START_RANKS}",
        local_rank=optional_number(values, local[1]),
        local_world_size=num_local,
        host=values.get(host) or None,
        master_address=LOOPBACK if is_one_host else None,
        master_port=derive_port(job) if job else None,
        remedy=_remedy(passing, is_one_host=is_one_host),
    )


def _remedy(passing: str, *, is_one_host: bool) -> str:
    port = passing.format("MASTER_PORT", DEFAULT_MASTER_PORT)
    if is_one_host:
        return f"start with `mpirun {port} ...` and a free port, or use `syncline run`"
    host = passing.format("MASTER_ADDR", "HOST")
    return (
        f"MPI does not tell where rank 0 runs: start with `mpirun {host} {port} ...`, HOST being that of rank 0, or "
        "give init(master=), or use `syncline run`"
    )


# SkyPilot, dstack and Kubernetes: each runs the task's command once per node, or pod, and says how many GPUs one has.
#
# With one process per node that process is the node's rank. With several, the command is to be torchrun: a TrainJob of
# the Kubeflow Trainer sets torchrun's own variables (``PET_*``) for each pod.


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
    return _one_per_node(
        values,
        ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
        num_gpus="SKYPILOT_NUM_GPUS_PER_NODE",
        address=next(iter(values.get("SKYPILOT_NODE_IPS", "").split()), None),
        job=values.get("SKYPILOT_TASK_ID"),
        master='$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
    )


def dstack(values: Mapping[str, str]) -> Place | None:
    """Read ``DSTACK_NODES_NUM``, ``_NODE_RANK``, ``_MASTER_NODE_IP`` and ``_GPUS_PER_NODE``; port by ``_RUN_NAME``."""
    return _one_per_node(
        values,
        ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK"),
        num_gpus="DSTACK_GPUS_PER_NODE",
        address=values.get("DSTACK_MASTER_NODE_IP"),
        job=values.get("DSTACK_RUN_NAME"),
        master="$DSTACK_MASTER_NODE_IP",
    )


def _one_per_node(
    values: Mapping[str, str],
    place: tuple[str, str],
    *,
    num_gpus: str,
    address: str | None,
    job: str | None,
    master: str,
) -> Place | None:
    """Return the node's place by its number of nodes and its own; ``master`` is what a shell writes for rank 0's."""
    num_nodes, rank = place
    if whole_number(values, num_nodes, 1) > 1 and whole_number(values, num_gpus, 0) > 1:
        raise ConfigurationError(
            f"{num_nodes} is {values[num_nodes]!r} and {num_gpus} {values[num_gpus]!r}, but WORLD_SIZE is not set; let "
            f"the task start `torchrun --nnodes=${num_nodes} --nproc-per-node=${num_gpus} --node-rank=${rank} "
            f"--master-addr={master} --master-port={DEFAULT_MASTER_PORT} train.py`"
        )
    port = derive_port(job) if job else DEFAULT_MASTER_PORT
    return _of_node(values, *place, START_RANKS, address=address, port=port)


def _of_node(
    values: Mapping[str, str], num_nodes: str, rank: str, start: str, *, address: str | None, port: int
) -> Place | None:
    """Return the place of the only process of its node; ``address`` is that of the first."""
    master = {"master_address": address, "master_port": port} if address else {}
    return _numbered(values, num_nodes, rank, start, local_rank=0, local_world_size=1, **master)


def train_job(values: Mapping[str, str]) -> Place | None:
    """Read ``PET_NNODES``, ``PET_NPROC_PER_NODE``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT``.

    :class:`ConfigurationError` if a node is to have several processes, which torchrun alone can start.

    >>> place = train_job({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"})
    >>> place.rank, place.world_size, place.master_port
    (1, 2, 29500)
    """
    num_nodes, num_processes = values.get("PET_NNODES") or "1", values.get("PET_NPROC_PER_NODE") or "1"
    if num_processes != "1":
        raise ConfigurationError(f"PET_NPROC_PER_NODE is {num_processes!r}, but WORLD_SIZE is not set; {_USE_TORCHRUN}")
    if num_nodes == "1:1":
        return None
    if not num_nodes.isdecimal():
        raise ConfigurationError(f"PET_NNODES is {num_nodes!r}, but WORLD_SIZE is not set; {_USE_TORCHRUN}")
    port = whole_number(values, "PET_MASTER_PORT", DEFAULT_MASTER_PORT)
    address = values.get("PET_MASTER_ADDR")
    return _of_node(values, "PET_NNODES", "PET_NODE_RANK", _USE_TORCHRUN, address=address, port=port)


def job_set(values: Mapping[str, str]) -> Place | None:
    """Refuse an indexed Job that says the number of a pod and not of how many."""
    if not values.get("JOB_COMPLETION_INDEX") or values.get("PET_NNODES"):
        return None
    raise ConfigurationError(
        f"JOB_COMPLETION_INDEX is {values['JOB_COMPLETION_INDEX']!r}, so this may be one process of several, but "
        "WORLD_SIZE is not set; set WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the pod's template, and RANK from the "
        f"field metadata.annotations['batch.kubernetes.io/job-completion-index']; or {START_RANKS}"
    )


_OTHERS: tuple[Launcher, ...] = (open_mpi, mpich, skypilot, dstack, train_job, srun, job_set)


def torchrun(values: Mapping[str, str]) -> Place | None:
    """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    A worker of Ray Train finds the same ones. Ray has made a process group before the user's function runs, so its
    ranks meet at that group's store.

    >>> place = torchrun({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a0", "MASTER_PORT": "29500"})
    >>> place.rank, place.world_size, place.master_address
    (1, 2, 'a0')
    """
    if not values.get("WORLD_SIZE") or not values.get("RANK"):
        return None
    place = Place(
        rank=whole_number(values, "RANK", 0),
        world_size=whole_number(values, "WORLD_SIZE", 1),
        source="WORLD_SIZE",
        local_rank=optional_number(values, "LOCAL_RANK"),
        local_world_size=optional_number(values, "LOCAL_WORLD_SIZE"),
        master_address=without_brackets(values.get("MASTER_ADDR", "")) or None,
        master_port=optional_number(values, "MASTER_PORT") if values.get("MASTER_PORT") else None,
    )
    return check_place(place, "RANK")


LAUNCHERS = (torchrun, *_OTHERS)
"""In the order in which they are asked."""


def find_place(values: Mapping[str, str]) -> Place:
    """Return the process's place; :class:`ConfigurationError` names the variable that is wrong or leaves it open."""
    if (named := torchrun(values)) is not None:
        return named
    if values.get("WORLD_SIZE"):
        return _of_size(whole_number(values, "WORLD_SIZE", 1), values)
    for launcher in _OTHERS:
        found = launcher(values)
        if found is not None:
            return _with_master(found, values)
    return check_place(Place(rank=whole_number(values, "RANK", 0), world_size=1, source="WORLD_SIZE"), "RANK")


def _of_size(world_size: int, values: Mapping[str, str]) -> Place:
    """Take WORLD_SIZE's word; without RANK, a launcher's number if it starts as many: scripts export the size alone."""
    if world_size == 1:
        return Place(rank=0, world_size=1, source="WORLD_SIZE")
    for launcher in _OTHERS:
        with contextlib.suppress(ConfigurationError):  # it knows less than the user said
            found = launcher(values)
            if found is not None and found.world_size == world_size:
                return _with_master(found, values)
    raise ConfigurationError(f"WORLD_SIZE is {world_size}, but RANK is not set; {START_RANKS}")


def _with_master(place: Place, values: Mapping[str, str]) -> Place:
    """Return ``place`` with the master of another launcher that says the same, if it does not know one itself.

    With ``srun --mpi=pmi2`` the rank is PMI's as well as Slurm's, and Slurm alone tells where rank 0 runs.
    """
    for launcher in _OTHERS if place.master_port is None else ():
        with contextlib.suppress(ConfigurationError):
            other = launcher(values)
            if other and (other.rank, other.world_size) == (place.rank, place.world_size) and other.master_port:
                return other._replace(source=place.source)
    return place
