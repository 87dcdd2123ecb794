"""Who owns how much of the optimizer's state, and which rank which whole parameter.

How large each rank's part is follows from what users say of hosts, and from what hosts have memory for.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import torch

from syncline.arguments import Bounds, checked
from syncline.errors import ConfigurationError
from syncline.schedule import Collective, lower_bound
from syncline.schedule.ownership import speaking
from syncline.schedule.step_candidates import BALANCED, MAY_TAKE, Cap
from syncline.schedule.step_flow import solve_step_flow
from syncline.topology import Host, Node, Topology
from syncline.units import format_size
from syncline.updates.bucket import BucketPlan, Slot, kind_of
from syncline.updates.inner import ELEMENTWISE, make_inner, step_without_hooks

_log = logging.getLogger(__name__)

Weights = Mapping[str, Annotated[float, Bounds(0, below=math.inf)]]
Portions = Literal["balanced", "fastest"] | Cap | Weights
_NUM_PROBED = 16


def check_hosts(name: str, numbers: Mapping[str, float], topology: Topology) -> None:
    """Raise :class:`ConfigurationError` unless ``numbers``, called ``name``, are of each host, and of no other."""
    names = [host.name for host in topology.hosts]
    unknown, missing = sorted(numbers.keys() - set(names)), [host for host in names if host not in numbers]
    if unknown or missing:
        wrong = f"name {unknown[0]!r}, which it has not" if unknown else f"leave out {missing[0]!r}"
        raise ConfigurationError(
            f"{name} give a number for each host of {topology.name!r}, but {wrong}; its hosts are {', '.join(names)}"
        )


def rank_shares(topology: Topology, portions: Mapping[str, float]) -> tuple[float, ...]:
    """Return the share of each rank, where hosts share as ``portions`` say and the ranks of a host alike.

    Ranks behind a gateway own nothing.
    Raises :class:`ConfigurationError` if ``portions`` leave out a host of the topology, or name another.
    """
    check_hosts("portions", portions, topology)
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
    num_beside: int = 0,
    tells: bool,
) -> tuple[float, ...] | None:
    """Return the share of the state that each rank has room for; None if nothing is known that would limit it.

    A host's memory holds the parameters and the gradients of each of its ranks, with ``num_copies`` of the former and
    of the latter, and ``num_beside`` other copies of the parameters; what is left is for state, of which each element
    has ``num_owners``; activations and the program itself are not counted. Raises :class:`ConfigurationError` if all
    hosts together have no room for the state.
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
    fixed_bytes = (num_copies + 1 + num_beside) * sum(plan.num_bytes for plan in plans)
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
    per_element = {kind: state_bytes_per_element(optimizer, *kind) for kind in {kind_of(plan) for plan in plans}}
    return sum(per_element[kind_of(plan)] * plan.num_elements for plan in plans)


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


# Which rank owns which whole parameter: all parameters of a model are divided at once.
#
# Parameters go in order of falling cost, each to the branch of the tree that is then filled least for its share, and so
# on down to a rank (Graham, "Bounds on multiprocessing timing anomalies", 1969, for machines of unequal speed).
# Branches thus come as near to their shares as their ranks do, so links carry what they would with parameters cut
# anywhere. Parameters that cost the same go round the ranks, so that neighbours in the model, which move at the same
# time, have owners apart. Complexity: O(parameters x levels x children).


Owners = tuple[tuple[int, ...], ...]
"""For each bucket the owner of each of its parameters, in order."""
Cost = Callable[[tuple[int, ...]], float]
"""From the shape of a parameter to what its update costs, in any unit."""


@checked
def matrix_cost(shape: tuple[int, ...]) -> float:
    """Return the cost of an update that multiplies a parameter's matrix by itself, as Muon's does; else its elements.

    >>> matrix_cost((1024, 256)), matrix_cost((1024,))
    (67108864, 1024)
    """
    num_elements = math.prod(shape)
    return num_elements * min(shape) if len(shape) == 2 else num_elements


def assign_parameters(
    topology: Topology,
    plans: Sequence[BucketPlan],
    shares: Sequence[float],
    *,
    cost: Cost = math.prod,
    most: Sequence[float] | None = None,
    cap: Literal["balanced"] | float | None = None,
) -> Owners:
    """Return for each bucket the owner of each of its parameters, in order; the same on every rank.

    ``shares`` is what each rank should have of the sum of costs, and ``most`` what it may have of all elements: a rank
    that is full gets no more, while others are not. With the cap "balanced" no rank has more than 1.25 / N of all
    elements, or the largest share, where parameters are small enough; as with parameters that are cut, this must not
    make the links take more than 10 % longer, else ranks own more. A number holds in any case. Raises
    :class:`ConfigurationError` for a cost that is no number of 0 or more, and where whole parameters exceed that
    number.
    """
    slots = [(plan.index, slot) for plan in plans for slot in plan.slots]
    costs = [_checked(cost, slot) for _, slot in slots]
    num_elements = sum(slot.num_elements for _, slot in slots)

    def assign(limits: Sequence[float]) -> Owners:
        tree = _Tree(topology, shares, [part * num_elements for part in limits])
        order = sorted(range(len(slots)), key=lambda place: (-costs[place], place))
        taken = {place: tree.take(costs[place], slots[place][1].num_elements) for place in order}
        in_order = iter(taken[place] for place in range(len(slots)))
        return tuple(tuple(next(in_order) for _ in plan.slots) for plan in plans)

    free = assign(most or [math.inf] * topology.num_ranks)
    if cap is None:
        return free
    limit = max(BALANCED / topology.num_ranks, *shares) if cap == "balanced" else cap / len(topology.speakers)
    even = assign([min(limit, part) for part in most or [1.0] * topology.num_ranks])
    if cap != "balanced":
        _check_cap(topology, plans, even, cap)
        return even
    if even == free or _links_s(topology, plans, even) <= MAY_TAKE * _links_s(topology, plans, free):
        return even
    return free


def _owned(topology: Topology, plans: Sequence[BucketPlan], owners: Owners) -> list[int]:
    """Return how many elements each rank owns."""
    owned = [0] * topology.num_ranks
    for plan, ranks in zip(plans, owners, strict=True):
        for slot, rank in zip(plan.slots, ranks, strict=True):
            owned[rank] += slot.num_elements
    return owned


def _check_cap(topology: Topology, plans: Sequence[BucketPlan], owners: Owners, cap: float) -> None:
    owned, num_owners = _owned(topology, plans, owners), len(topology.speakers)
    most, whole = max(owned), sum(owned)
    if most * num_owners > cap * whole + num_owners:
        raise ConfigurationError(
            f"with portions={cap:g} no rank owns more than {int(cap * whole / num_owners)} of {whole} elements, and "
            f"with whole parameters rank {owned.index(most)} owns {most}; take portions="
            f'{math.ceil(100 * most * num_owners / whole) / 100:g}, or align="element"'
        )


def _links_s(topology: Topology, plans: Sequence[BucketPlan], owners: Owners) -> float:
    """Return how long the links take at least for each byte of a step with these owners."""
    if not lower_bound(topology, Collective.REDUCE_SCATTER, 1):
        return 0.0
    owned = _owned(topology, plans, owners)
    shares = [owned[rank] / sum(owned) for rank in topology.speakers]
    return solve_step_flow(speaking(topology), [(share, share) for share in shares]).seconds


class _Tree:
    """How full each node is for its share, and what room its ranks have left."""

    def __init__(self, topology: Topology, shares: Sequence[float], room: Sequence[float]) -> None:
        self._root = topology.root
        self._room = list(room)
        self._shares: dict[str, float] = defaultdict(float)
        self._ranks: dict[str, list[int]] = defaultdict(list)
        self._load: dict[str, float] = defaultdict(float)
        for rank, share in enumerate(shares):
            for node in (*topology.path(rank), topology.root):
                self._shares[node.name] += share
                if share > 0:
                    self._ranks[node.name].append(rank)

    def take(self, cost: float, num_elements: int) -> int:
        """Return who takes a parameter, and count it."""
        largest = max(self._room[rank] for rank in self._ranks[self._root.name])
        needed = min(float(num_elements), largest)  # where it fits nowhere, whoever has the most room takes it
        node: Node = self._root
        while node.children:
            able = [one for one in node.children if any(self._room[rank] >= needed for rank in self._ranks[one.name])]
            node = min(able, key=lambda one: (self._load[one.name] + cost) / self._shares[one.name])
            self._load[node.name] += cost
        rank: int = node.rank  # type: ignore[union-attr]
        self._room[rank] -= num_elements
        return rank


def _checked(cost: Cost, slot: Slot) -> float:
    value = cost(slot.shape)
    if not 0 <= value < math.inf:
        raise ConfigurationError(
            f"cost gives the update of each parameter a number of 0 or more, but {value!r} for the shape {slot.shape} "
            f"of {slot.name!r}"
        )
    return value
