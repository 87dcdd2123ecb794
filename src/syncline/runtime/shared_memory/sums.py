"""In which order a schedule adds: followed over shared memory too, so that a sum has the same bits on either way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TypeAlias

from syncline.runtime.reduction import Reduction
from syncline.schedule import Schedule, Transfer

Sum: TypeAlias = "int | tuple[Sum, ...]"
"""A rank's contribution, or sums that are added from left to right: ``((0, 1), (2, 3))``."""


def find_sums(schedule: Schedule, *, owned_only: bool) -> list[Sum | None]:
    """Return how each rank comes to its result; None for those whose ranges differ in it, or that have none.

    ``owned_only``: of the ranges that a rank owns, as a reduce-scatter leaves them; else of all. Complexity:
    transfers times the atoms of each.
    """
    found: list[Sum | None] = []
    for rank, values in enumerate(_replay(schedule)):
        atoms = [atom for atom in range(schedule.num_atoms) if not owned_only or rank in schedule.owners[:, atom]]
        sums = {values[atom] for atom in atoms}
        found.append(sums.pop() if len(sums) == 1 else None)
    return found


def leads(terms: Sum, own: int) -> bool:
    """Whether the contribution of ``own`` is among the first two that are added, so that it may be where the sum goes.

    >>> leads((0, 1, 2), 1), leads((0, 1, 2), 2)
    (True, False)
    """
    if isinstance(terms, int):
        return terms == own
    first, second = terms[:2]
    return own in (first, second) if isinstance(first, int) else leads(first, own)


def _replay(schedule: Schedule) -> list[list[Sum]]:
    """Return what each rank holds of each atom in the end, step by step as :class:`Schedule` defines it."""
    values: list[list[Sum]] = [[rank] * schedule.num_atoms for rank in range(schedule.num_ranks)]
    for _, rows in groupby(schedule.transfers, key=lambda row: row.step):
        _replay_step(values, list(rows))
    return values


def _replay_step(values: list[list[Sum]], rows: list[Transfer]) -> None:
    """Send what was there before the step; what is added is added in rank order, and the rest replaces."""
    received = [(row, atom, values[row.src][atom]) for row in rows for atom in range(row.first, row.last)]
    added: dict[tuple[int, int], list[tuple[int, Sum]]] = {}
    for row, atom, value in received:
        if row.add:
            added.setdefault((row.dst, atom), [(row.dst, values[row.dst][atom])]).append((row.src, value))
    for (rank, atom), terms in added.items():
        values[rank][atom] = tuple(term for _, term in sorted(terms, key=lambda term: term[0]))
    for row, atom, value in received:
        if not row.add:
            values[row.dst][atom] = value


def add_up(
    terms: Sum, into: memoryview, contribution: Callable[[int], memoryview], reduction: Reduction, *, own: int
) -> None:
    """Make ``into`` the sum; it holds the contribution of rank ``own`` at first, which others can be asked for too.

    A sum within a sum takes a temporary, unless it leads.
    """

    def value(term: Sum) -> memoryview:
        if isinstance(term, int):
            return contribution(term)
        partial = memoryview(bytearray(len(into)))
        add_up(term, partial, contribution, reduction, own=-1)
        return partial

    if isinstance(terms, int):
        if terms != own:
            into[:] = contribution(terms)
        return
    first, second, *rest = terms
    if isinstance(first, int):
        left, right = (into if term == own else value(term) for term in (first, second))
        reduction.add_both(into, left, right)
    else:
        add_up(first, into, contribution, reduction, own=own)
        reduction.add(into, value(second))
    for term in rest:
        reduction.add(into, value(term))
