"""How a group comes about: a world connects through the store that it is given; a group of a world shares that.

The shell around it is a whole ``ProcessGroup`` here, for groups that are Syncline's alone, and for all before PyTorch
2.14; that of groups of several backends is in :mod:`.py_backend`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from syncline.backend.calls import GroupCalls
from syncline.backend.group_state import GroupState, open_part
from syncline.backend.group_streams import GroupStreams
from syncline.errors import ConfigurationError
from syncline.fabric.slice_executor import NUM_STREAMS
from syncline.pytorch.connecting import choose_interface, connect, with_address
from syncline.pytorch.environment import UNWRITTEN, Arguments, BackendOptions, Environment, read_environment
from syncline.pytorch.stores import TorchStore
from syncline.runtime import Communicator
from syncline.topology import Topology
from syncline.updates.combinations import WRITE_ONE, Combination, TrainingRequest, check_combinations
from syncline.updates.private_torch import failing_backend, has_other_backends

OF_GROUPS = (
    Combination("gateway: helper", "whose ranks all do what the program says", WRITE_ONE),
    Combination(
        "memory",
        "where DDP, FSDP2 or the program says what a rank keeps",
        "leave memory out of the topology",
        is_refused=False,
    ),
    *(
        Combination(
            f'Priorities(search="{search}")',
            "which have one connection to each peer",
            "leave priorities out of the topology, or train with syncline.distribute()",
            is_refused=False,
        )
        for search in ("auto", "equal")
    ),
)


def create_group(distributed: Any, pg_options: object = None) -> Any:
    """Return this rank's part in the group that ``distributed`` describes; all of its ranks call it.

    A group of a world that is Syncline's uses the world's connections; any other is a world of its own. Raises what
    :func:`syncline.init` raises.

    Where no other backend has a part in it, this is the group itself. A backend in a group of C++ would be given the
    same calls, but of their works C++ hands out ``wait()`` and ``get_future()`` alone, and is_completed() stays False.
    """
    # a state is of reconfigure(), which has connected its ranks
    state = pg_options if isinstance(pg_options, GroupState) else create_state(distributed, choose_options(pg_options))
    if has_other_backends(distributed):
        from syncline.backend.py_backend import SynclineBackend

        return SynclineBackend(state)
    return SynclineProcessGroup(state)


def choose_options(given: object) -> BackendOptions:
    """Return what ``pg_options`` means: options, or a topology alone; :class:`ConfigurationError` for all else."""
    if given is None:
        return BackendOptions()
    if isinstance(given, BackendOptions):
        return given
    if isinstance(given, (str, Path, Topology)):
        return BackendOptions(topology=given)
    raise ConfigurationError(
        f"pg_options must be syncline.BackendOptions, a syncline.Topology, or the path or name of one, not {given!r}"
    )


def read_options(options: BackendOptions, *, rank: int, world_size: int, timeout_s: float) -> Environment:
    """Complete the options by variables and defaults, and check them all."""
    given = Arguments.of_group(options, rank=rank, world_size=world_size, timeout_s=timeout_s)
    return read_environment(given=given, has_store=True)


def create_state(distributed: Any, options: BackendOptions) -> GroupState:
    """Return what is behind a new group."""
    timeout_s = distributed.timeout.total_seconds()
    ranks = list(distributed.global_ranks_in_group)
    world = find_world() if ranks else None
    if world is None:
        return _open_world(distributed, options, ranks, timeout_s)
    if options != BackendOptions():
        raise ConfigurationError(
            "A group of a world that is Syncline's uses the world's connections and their options; leave pg_options "
            "out of new_group()"
        )
    return open_part(world, ranks, distributed.store, timeout_s)


def find_world() -> GroupState | None:
    """Return what is behind the default group; None if that is another backend's."""
    return state_of(dist.group.WORLD) if dist.is_initialized() else None


def state_of(group: Any) -> GroupState | None:
    """Return what is behind a group of ``torch.distributed``; None if no backend of it is Syncline's."""
    if isinstance(group, GroupCalls):
        return group.state
    for device in getattr(group, "_device_types", ()):
        backend = group._get_backend(torch.device(device))
        if isinstance(backend, GroupCalls):
            return backend.state
    return None


def _open_world(distributed: Any, options: BackendOptions, ranks: list[int], timeout_s: float) -> GroupState:
    rank, size = distributed.group_rank, distributed.group_size
    environment = read_options(options, rank=rank, world_size=size, timeout_s=timeout_s)
    communicator = _connect(_restrict(environment, ranks), distributed.store)
    try:
        check_topology(communicator)
        # All meet here, so whoever goes on knows that the store is not needed for the meeting any more.
        communicator.open_segment(is_wanted=environment.uses_shared_memory)
    except BaseException:
        communicator.abort()
        raise
    return GroupState(
        communicator,
        message_stream=NUM_STREAMS - 1,
        staging_stream=NUM_STREAMS - 2,
        timeout_s=timeout_s,
        store=distributed.store,
        streams=GroupStreams(distributed.store, token=communicator.token.hex()),
        uses_shared_memory=environment.uses_shared_memory,
    )


def check_topology(communicator: Communicator) -> None:
    """Refuse, or warn of, what a topology says that its process groups do not honour; no rank waits for another."""
    topology = communicator.topology
    request = TrainingRequest(topology=topology, priorities=topology.priorities)
    tells = communicator.rank == 0
    check_combinations(OF_GROUPS, "process groups", request, tells=tells, error=ConfigurationError)


def _restrict(environment: Environment, ranks: list[int]) -> Environment:
    """Let a topology of all of the job's ranks serve for a group of some, where another backend has the world."""
    chosen = environment.topology
    if chosen in UNWRITTEN or not ranks:
        return environment
    topology = chosen if isinstance(chosen, Topology) else Topology.load(chosen)
    if topology.num_ranks != environment.world_size and topology.num_ranks > max(ranks):
        topology = topology.restricted(ranks)
    return environment._replace(topology=topology)


def _connect(environment: Environment, torch_store: Any) -> Communicator:
    store = TorchStore(HashStore())
    if environment.world_size > 1:
        store = TorchStore(PrefixStore("syncline", torch_store))
        environment = choose_interface(environment, store, torch_store)
    communicator, _ = connect(with_address(environment), lambda _: store)
    return communicator


class SynclineProcessGroup(GroupCalls, dist.ProcessGroup):  # type: ignore[misc]  # the binding types nothing
    """One rank's part in a group, made by ``init_process_group("syncline")`` and ``new_group()``.

    Raises, in a call: :class:`MismatchError` on all ranks if their calls differ, :class:`PeerLostError` if a rank is
    lost, :class:`DeadlineError` at the timeout, :class:`ConfigurationError` for what it cannot take.
    """

    def __init__(self, state: GroupState) -> None:
        communicator = state.communicator
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]  # one for subclasses
        self.state = state
        # A mesh asks the group for a backend of each device; the calls come to the group itself.
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self._register_backend(torch.device(device), kind, failing_backend(self.rank(), self.size()))

    def __repr__(self) -> str:
        return f"<SynclineProcessGroup {self.group_name!r}: {self.state.communicator!r}>"
