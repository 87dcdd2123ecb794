"""The smallest thing that can run a schedule: every rank's program in one process, step by step, on numpy arrays.

It follows the semantics in :class:`syncline.schedule.Schedule` to the letter and is slow; engines are compared with it.
"""

import numpy as np

from syncline.schedule import After, Before


def run(schedule, layout, buffers):
    """Run the schedule on one buffer per rank, in place; every slice by itself, every step on all ranks at once."""
    programs = {rank: schedule.program(rank) for rank in range(schedule.num_ranks)}
    for offsets in layout.slices:
        for step in range(schedule.num_steps):
            phases = {rank: phase for rank, program in programs.items() for phase in program if phase.step == step}
            _run_step(phases, offsets, buffers)
    return buffers


def _run_step(phases, offsets, buffers):
    messages = {}
    for rank, phase in phases.items():
        for send in phase.sends:
            data = buffers[rank][offsets[send.first] : offsets[send.last]].copy()
            messages[rank, send.peer, send.index] = (send.first, send.last, data)
    for rank, phase in phases.items():
        parts = []
        for receive in phase.receives:
            first, last, data = messages.pop((receive.peer, rank, receive.index))
            assert (first, last) == (receive.first, receive.last), "both sides name the same atoms"
            parts.append((receive, data))
        _apply(rank, parts, offsets, buffers[rank])
    assert not messages, "every message is received in the step in which it is sent"


def _apply(rank, parts, offsets, buffer):
    adds = [(receive, data) for receive, data in parts if receive.add]
    for atom in sorted({atom for receive, _ in adds for atom in range(receive.first, receive.last)}):
        start, stop = offsets[atom], offsets[atom + 1]
        terms = [(rank, buffer[start:stop].copy())]
        for receive, data in adds:
            if receive.first <= atom < receive.last:
                base = offsets[receive.first]
                terms.append((receive.peer, data[start - base : stop - base]))
        terms.sort(key=lambda term: term[0])
        total = terms[0][1].copy()
        for _, term in terms[1:]:
            total += term
        buffer[start:stop] = total
    for receive, data in parts:
        if not receive.add:
            buffer[offsets[receive.first] : offsets[receive.last]] = data


def initial_buffers(schedule, layout, dtype=np.int64, seed=0):
    """Make what the collective begins with, owners of a range alike; what nobody may read is a large odd number."""
    rng = np.random.default_rng(seed)
    num_elements = layout.num_elements
    data = [rng.integers(-1000, 1000, num_elements).astype(dtype) for _ in range(schedule.num_ranks)]
    if schedule.collective.before is Before.CONTRIBUTION:
        return data
    poison = [np.full(num_elements, 10**9 + 7, dtype=dtype) for _ in data]
    for rank, buffer in enumerate(poison):
        if schedule.collective.before is Before.SHARD:
            for start, stop in layout.owned_ranges(schedule, rank):
                buffer[start:stop] = data[0][start:stop]
        elif rank == schedule.root:
            buffer[:] = data[rank]
    return poison


def expected_result(schedule, layout, begun):
    """Return the one true result, from what the ranks began with."""
    if schedule.collective.before is Before.CONTRIBUTION:
        return sum(begun[1:], start=begun[0].copy())
    if schedule.collective.before is Before.ROOT:
        return begun[schedule.root].copy()
    result = np.empty_like(begun[0])
    for rank in range(schedule.num_ranks):
        for start, stop in layout.owned_ranges(schedule, rank):
            result[start:stop] = begun[rank][start:stop]
    return result


def check(schedule, layout, seed=0):
    """Run the schedule on random numbers and compare all that it promises."""
    buffers = initial_buffers(schedule, layout, seed=seed)
    expected = expected_result(schedule, layout, buffers)
    run(schedule, layout, buffers)
    for rank, buffer in enumerate(buffers):
        ranges = [(0, layout.num_elements)]
        if schedule.collective.after is After.OWNERS:
            ranges = layout.owned_ranges(schedule, rank)
        for start, stop in ranges:
            np.testing.assert_array_equal(buffer[start:stop], expected[start:stop], err_msg=f"rank {rank}")


def owns_everything_once(schedule, layout):
    """Whether the owned ranges of all ranks cover the buffer without overlap."""
    ranges = sorted(pair for rank in range(schedule.num_ranks) for pair in layout.owned_ranges(schedule, rank))
    ends = [0, *(stop for _, stop in ranges)]
    return ends[-1] == layout.num_elements and all(start == end for (start, _), end in zip(ranges, ends, strict=False))
