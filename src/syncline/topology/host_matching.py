"""A topology's hosts matched with those that a job's ranks run on, by name: launchers number hosts as they like.

Two names are the same if they are equal, or if what stands before the first dot is (``a0`` and ``a0.cluster.example``,
whatever the case of letters) and no other host has it too. What cannot be matched is an error that shows both lists,
because a tree that is right but for the order of its hosts is slow in silence.

A job whose ranks all run on one machine that the topology does not know emulates it: its ranks stay as they are.

Lists of names as administrators write them, ``h[0-4]`` or ``node[01-03,7],login``, are expanded here too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product

from syncline.errors import TopologyError, name_ranks
from syncline.topology.tree import Host, Link, Rank, Switch, check_name
from syncline.units import counted

MAX_HOSTS_SHOWN = 16
UNKNOWN_NETWORK = "unknown-network"
"""So begins the name of the switch of a job's hosts where nothing is known of what is between them."""
_REMEDY = (
    "Give the topology the names that the hosts have, or tell each rank which host of the topology it runs on "
    "(SYNCLINE_HOST, or init(host=))"
)


def match_ranks(hosts: Sequence[Host], names: Sequence[str], *, label: str) -> list[int]:
    """Return an order for :meth:`.Topology.permuted`: which of the topology's ranks each rank of the job is.

    ``names[k]`` is the host of the job's rank k; there are as many as the topology has ranks. Ranks of one host take
    its ranks in ascending order. ``label`` names the topology in errors, which are :class:`TopologyError`.
    """
    ranks_on = ranks_by_host(names)
    found = {name: same_host(name, hosts) for name in ranks_on}
    if len(ranks_on) == 1 and not any(found.values()):
        return list(range(len(names)))
    problems = _describe_problems(found, ranks_on)
    if problems:
        raise TopologyError(
            f"{label} and the job do not have the same hosts: {'; '.join(problems[:MAX_HOSTS_SHOWN])}. The topology "
            f"has {_show({host.name: [rank.rank for rank in host.ranks] for host in hosts})}. The job has "
            f"{_show(ranks_on)}. {_REMEDY}"
        )
    order = [0] * len(names)
    for name, (host,) in found.items():
        for new, old in zip(ranks_on[name], sorted(rank.rank for rank in host.ranks), strict=True):
            order[new] = old
    return order


def ranks_by_host(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks on each host, hosts in the order of their first ranks."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(names):
        ranks[name].append(rank)
    return dict(ranks)


def flat_root(names: Sequence[str]) -> Switch:
    """Build one switch without rates over the hosts of a job; ``names[k]`` is the host of rank k.

    A host is called by the first part of its name where that is clear and can be a name, else h0, h1 ...
    """
    ranks_on = ranks_by_host(names)
    own = dict(zip(ranks_on, _plain_names(list(ranks_on)), strict=True))
    hosts = tuple(
        Host(name=own[name], link=Link.unlimited(), ranks=tuple(Rank(rank=rank) for rank in ranks))
        for name, ranks in ranks_on.items()
    )
    taken = {host.name for host in hosts}
    return Switch(name=next(name for name in _root_names() if name not in taken), link=None, children=hosts)


def same_host(name: str, hosts: Sequence[Host]) -> list[Host]:
    """Return the host of that name; else all that are called alike up to the first dot."""
    exact = [host for host in hosts if host.name == name]
    return exact or [host for host in hosts if _first_part(host.name) == _first_part(name)]


def _first_part(name: str) -> str:
    first = name.partition(".")[0]
    return name if first.isdecimal() else first.lower()  # an address has no parts that name anything


def _describe_problems(found: Mapping[str, Sequence[Host]], ranks_on: Mapping[str, Sequence[int]]) -> list[str]:
    problems = []
    claims: dict[str, list[str]] = defaultdict(list)
    for name, candidates in found.items():
        if not candidates:
            problems.append(f"{name!r} is no host of the topology")
        elif len(candidates) > 1:
            problems.append(f"{name!r} may be {' or '.join(repr(host.name) for host in candidates)}")
        for host in candidates:
            claims[host.name].append(name)
    problems += [
        f"{' and '.join(map(repr, names))} may be {host!r}" for host, names in claims.items() if len(names) > 1
    ]
    for name, candidates in found.items():
        if len(candidates) == 1 and len(ranks_on[name]) != len(candidates[0].ranks):
            there, here = (counted(len(ranks), "rank") for ranks in (candidates[0].ranks, ranks_on[name]))
            problems.append(f"{name!r} has {there} in the topology and {here} in the job")
    return problems


def _show(ranks_on: Mapping[str, Sequence[int]]) -> str:
    shown = [f"{name} ({name_ranks(ranks)})" for name, ranks in list(ranks_on.items())[:MAX_HOSTS_SHOWN]]
    return ", ".join(shown) + (", ..." if len(ranks_on) > len(shown) else "")


def _plain_names(names: Sequence[str]) -> list[str]:
    firsts = [plain_name(name) for name in names]
    if len(set(firsts)) == len(names) and all(firsts):
        return firsts
    return [f"h{place}" for place in range(len(names))]


def plain_name(name: str) -> str:
    """Return the first part of a machine's name, if a host can be called so; else nothing."""
    first = _first_part(name)
    try:
        check_name(first, "host")
    except TopologyError:
        return ""
    return first


def _root_names() -> Iterator[str]:
    yield UNKNOWN_NETWORK
    yield from (f"{UNKNOWN_NETWORK}-{number}" for number in count())


MAX_NAMES = 100_000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names of a list, in its order; numbers keep their leading zeros."""
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        names += _expand_item(item.strip(), text)
        _check_count(len(names), text)
    return tuple(names)


def _expand_item(item: str, text: str) -> list[str]:
    parts = _BRACKETS.split(item)  # plain, bracketed, plain, bracketed, ..., plain
    if not item or any(mark in part for part in parts[::2] for mark in "[]"):
        raise TopologyError(f"{text!r} is not a list of names; write for example 'h[0-4]' or 'a,b,c'")
    choices = [[part] if k % 2 == 0 else _expand_ranges(part, text) for k, part in enumerate(parts)]
    count = 1
    for choice in choices:
        count *= len(choice)
        _check_count(count, text)
    return ["".join(pieces) for pieces in product(*choices)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None or len(item) > 2 * 9 + 1:
            raise TopologyError(f"{item!r} in {text!r} is not a range of numbers; write for example '0-4'")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise TopologyError(f"range {item!r} in {text!r} runs backwards; write '{last}-{first}'")
        _check_count(int(last) - int(first), text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _check_count(count: int, text: str) -> None:
    if count > MAX_NAMES:
        raise TopologyError(f"{text!r} stands for more than {MAX_NAMES} names; write a shorter list")
