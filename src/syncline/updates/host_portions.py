"""Whose part of the optimizer's state is how large: what users say of hosts, and what hosts have memory for."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch

from syncline.arguments import Bounds
from syncline.errors import ConfigurationError
from syncline.schedule.step_candidates import Cap
from syncline.topology import Host, Topology
from syncline.units import format_size
from syncline.updates.bucket import BucketPlan
from syncline.updates.inner import ELEMENTWISE, make_inner, step_without_hooks

_log = logging.getLogger(__name__)

Weights = Mapping[str, Annotated[float, Bounds(0, below=math.inf)]]
Portions = Literal["balanced", "fastest"] | Cap | Weights
_NUM_PROBED = 16


def rank_shares(topology: Topology, portions: Mapping[str, float]) -> tuple[float, ...]:
    """Return the share of each rank, where hosts share as ``portions`` say and the ranks of a host alike.

    Ranks behind a gateway own nothing.
    Raises :class:`ConfigurationError` if ``portions`` leave out a host of the topology, or name another.
    """
    names = [host.name for host in topology.hosts]
    unknown, missing = sorted(portions.keys() - set(names)), [name for name in names if name not in portions]
    if unknown or missing:
        wrong = f"name {unknown[0]!r}, which it has not" if unknown else f"leave out {missing[0]!r}"
        raise ConfigurationError(
            f"portions give a number for each host of {topology.name!r}, but {wrong}; its hosts are {', '.join(names)}"
        )
    total = math.fsum(portions.values())
    return tuple(
        portions[topology.host_of(rank).name] / total / number if number else 0.0
        for rank, number in enumerate(_num_owners(topology))
    )


def most_shares(
    topology: Topology,
    plans: Sequence[BucketPlan],
    optimizer: torch.optim.Optimizer,
    *,
    num_copies: int,
    num_owners: int = 1,
    tells: bool,
) -> tuple[float, ...] | None:
    """Return the share of the state that each rank has room for; None if nothing is known that would limit it.

    A host's memory holds the parameters and the gradients of each of its ranks, with ``num_copies`` of the former and
    of the latter, and what is left is for state, of which each element has ``num_owners``; activations and
    the program itself are not counted. Raises :class:`ConfigurationError` if all hosts together have no room for the
    state.
    """
    if all(host.memory_bytes is None for host in topology.hosts):
        return None
    state_bytes = num_copies * _whole_state_bytes(plans, optimizer)
    if math.isnan(state_bytes):
        if tells:
            _log.warning(
                "The memory of hosts does not limit what their ranks own, since nobody knows what %s keeps",
                type(optimizer).__name__,
            )
        return None
    if not state_bytes:
        return None
    fixed_bytes = (num_copies + 1) * sum(plan.num_bytes for plan in plans)
    rooms = [
        _room(topology.host_of(rank), fixed_bytes) / number if number else 0.0
        for rank, number in enumerate(_num_owners(topology))
    ]
    needed_bytes = num_owners * state_bytes
    if sum(rooms) < needed_bytes:
        small = ", ".join(f"{host.name} {format_size(host.memory_bytes or 0)}" for host in topology.hosts[:8])
        raise ConfigurationError(
            f"The hosts of {topology.name!r} ({small}) have no room for the {format_size(needed_bytes)} of state that "
            f"{type(optimizer).__name__} keeps beside {format_size(fixed_bytes)} of parameters and gradients for each"
            " rank; use more hosts, an optimizer with less state, or correct their memory in the topology file"
        )
    return tuple(min(1.0, room / state_bytes) for room in rooms)


def _room(host: Host, fixed_bytes: int) -> float:
    """Return the bytes that a host has for the state of all its ranks."""
    if host.memory_bytes is None:
        return math.inf
    return max(0.0, host.memory_bytes - fixed_bytes * len(host.ranks))


def _num_owners(topology: Topology) -> list[int]:
    """Return for each rank how many ranks of its host may own something; 0 for one that may not itself."""
    by_host = Counter(topology.host_of(rank).name for rank in topology.speakers)
    return [
        0 if rank in topology.gateways else by_host[topology.host_of(rank).name] for rank in range(topology.num_ranks)
    ]


def _whole_state_bytes(plans: Sequence[BucketPlan], optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of the state of all parameters; NaN if it is not known."""
    per_element = {kind: state_bytes_per_element(optimizer, *kind) for kind in {_kind_of(plan) for plan in plans}}
    return sum(per_element[_kind_of(plan)] * plan.num_elements for plan in plans)


def _kind_of(plan: BucketPlan) -> tuple[int, torch.dtype, torch.device]:
    return plan.group, plan.dtype, plan.device


def state_bytes_per_element(
    optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the bytes of state that ``optimizer`` keeps for each element of a parameter; NaN if it is not known.

    One of torch's own that treats each element by itself is made again for a few elements, and steps once on zeros.
    """
    if type(optimizer) not in ELEMENTWISE:
        return math.nan
    probe = torch.nn.Parameter(torch.zeros(_NUM_PROBED, dtype=dtype, device=device))
    inner = make_inner(optimizer, group, [probe])
    probe.grad = torch.zeros_like(probe)
    step_without_hooks(inner)
    kept = [value for value in inner.state[probe].values() if isinstance(value, torch.Tensor)]
    return sum(value.element_size() for value in kept if value.shape == probe.shape)
