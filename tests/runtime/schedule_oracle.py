"""What a schedule means, executed naively: one step after the other, on copies, without any engine."""

import random

import numpy as np

from syncline.schedule import After, Before
from syncline.topology import Host, Link, Rank, Switch, Topology


def replay(schedule, layout, buffers):
    """Return what each rank's buffer holds at the end, to the bit."""
    state = [buffer.copy() for buffer in buffers]
    for offsets in layout.slices:
        rows = list(schedule.transfers)
        for step in sorted({row.step for row in rows}):
            _replay_step([row for row in rows if row.step == step], offsets, state)
    return state


def _replay_step(rows, offsets, state):
    before = [buffer.copy() for buffer in state]
    atoms = range(len(offsets) - 1)
    for rank in range(len(state)):
        received = [row for row in rows if row.dst == rank]
        for atom in atoms:
            place = slice(offsets[atom], offsets[atom + 1])
            adds = [row.src for row in received if row.add and row.first <= atom < row.last]
            if adds:
                terms = [before[source][place] for source in sorted([*adds, rank])]
                total = terms[0].copy()
                with np.errstate(over="ignore", invalid="ignore"):
                    for term in terms[1:]:
                        total = (total + term).astype(total.dtype)
                state[rank][place] = total
            for row in received:
                if not row.add and row.first <= atom < row.last:
                    state[rank][place] = before[row.src][place]


def promised(schedule, layout, buffers, rank):
    """Return the element ranges that the collective promises to ``rank``, with the exact or nearly exact values."""
    collective = schedule.collective
    if collective.before is Before.CONTRIBUTION:
        values = np.sum([buffer.astype(np.float64) for buffer in buffers], axis=0)
    elif collective.before is Before.ROOT:
        values = buffers[schedule.root].astype(np.float64)
    else:
        values = np.empty(layout.num_elements)
        for owner, buffer in enumerate(buffers):
            for start, stop in layout.owned_ranges(schedule, owner):
                values[start:stop] = buffer[start:stop]
    everything = ((0, layout.num_elements),)
    ranges = everything if collective.after is After.EVERY_RANK else layout.owned_ranges(schedule, rank)
    return values, ranges


def random_topology(seed, *, max_ranks=9):
    """Return a tree of depth 1 to 4 with mixed children and at least one rank."""
    source = random.Random(seed)
    names = iter(range(10_000))
    left = [source.randint(1, max_ranks)]
    numbers = iter(range(10_000))

    def link():
        return Link(up_bytes_per_s=source.uniform(1e6, 1e8), down_bytes_per_s=source.uniform(1e6, 1e8))

    def host():
        num_ranks = min(left[0], source.choice([1, 1, 2, 3]))
        left[0] -= num_ranks
        return Host(
            name=f"h{next(names)}",
            link=link(),
            ranks=tuple(Rank(rank=next(numbers), link=link()) for _ in range(num_ranks)),
        )

    def switch(depth, top_link):
        name, children = f"s{next(names)}", []
        while not children or (left[0] > 0 and (depth == 0 or source.random() < 0.5)):
            if left[0] <= 0:
                break
            children.append(switch(depth + 1, link()) if depth < 3 and source.random() < 0.4 else host())
        children = [child for child in children if child is not None]
        return Switch(name=name, link=top_link, children=tuple(children)) if children else None

    return Topology(name=f"random-{seed}", root=switch(0, None))
