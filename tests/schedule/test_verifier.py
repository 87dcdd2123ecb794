"""The verifier refuses every draft that is wrong, says what is wrong, and proves every draft that is right."""

from dataclasses import replace

import numpy as np
import pytest
import reference
from hypothesis import assume, given, settings as effort, strategies as st
from schedule_trees import trees

from syncline.errors import ScheduleError
from syncline.schedule import PLANNERS, UNOWNED, Collective, Draft, Layout, Transfer, Transfers, verify
from syncline.schedule.verifier import split_at_owners
from syncline.topology import Topology

RS, AG, AR, BC = Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_REDUCE, Collective.BROADCAST
PLANNED = [(name, each) for name, planner in PLANNERS.items() for each in sorted(planner.collectives)]


@st.composite
def valid_drafts(draw):
    name, collective = draw(st.sampled_from(PLANNED))
    topology = draw(trees(max_ranks=8))
    assume(topology.num_ranks > 1)
    return PLANNERS[name].draft(topology, collective, root=draw(st.integers(0, topology.num_ranks - 1)))


def with_rows(draft, rows):
    return replace(draft, transfers=Transfers.of(rows))


def pick(draft, data):
    rows = list(draft.transfers)
    return rows, data.draw(st.integers(0, len(rows) - 1))


def refused(draft):
    with pytest.raises(ScheduleError, match="is refused"):
        verify(draft)


@effort(max_examples=25)
@given(valid_drafts(), st.data())
def test_dropped_transfer_is_refused(draft, data):
    rows, row = pick(draft, data)
    refused(with_rows(draft, rows[:row] + rows[row + 1 :]))


@effort(max_examples=25)
@given(valid_drafts(), st.data())
def test_duplicated_transfer_is_refused(draft, data):
    rows, row = pick(draft, data)
    refused(with_rows(draft, [*rows, rows[row]]))


@effort(max_examples=25)
@given(valid_drafts(), st.data())
def test_retargeted_transfer_is_refused(draft, data):
    # A contribution may reach the sum by a detour; what is gathered or broadcast reaches each rank once, or not at all.
    draft = PLANNERS["tree"].draft(Topology.flat(draft.num_ranks), RS) if draft.collective.adds else draft
    rows, row = pick(draft, data)
    others = [rank for rank in range(draft.num_ranks) if rank not in {rows[row].src, rows[row].dst}]
    assume(others)
    elsewhere = rows[row]._replace(dst=data.draw(st.sampled_from(others)))
    refused(with_rows(draft, [*rows[:row], elsewhere, *rows[row + 1 :]]))


@effort(max_examples=25)
@given(valid_drafts(), st.data())
def test_flipped_kind_is_refused(draft, data):
    rows, row = pick(draft, data)
    flipped = [*rows[:row], rows[row]._replace(add=not rows[row].add), *rows[row + 1 :]]
    # To add to what was never written is to write it: only where contributions are added is there a difference.
    if draft.collective.adds:
        refused(with_rows(draft, flipped))


MUTATIONS = ("step", "src", "dst", "first", "last", "swap steps", "swap sources", "swap ranges")


def mutated(rows, one, other, kind, value):
    rows = list(rows)
    first, second = rows[one], rows[other]
    if kind.startswith("swap"):
        names = {"swap steps": ("step",), "swap sources": ("src",), "swap ranges": ("first", "last")}[kind]
        rows[one] = first._replace(**{name: getattr(second, name) for name in names})
        rows[other] = second._replace(**{name: getattr(first, name) for name in names})
    else:
        rows[one] = first._replace(**{kind: value})
    return rows


@effort(max_examples=75)
@given(valid_drafts(), st.sampled_from(MUTATIONS), st.integers(0, 8), st.data())
def test_whatever_is_proved_after_a_mutation_is_still_right(draft, kind, value, data):
    rows, one = pick(draft, data)
    other = data.draw(st.integers(0, len(rows) - 1))
    try:
        schedule = verify(with_rows(draft, mutated(rows, one, other, kind, value)))
    except ScheduleError:
        return
    reference.check(schedule, Layout.build(schedule, 3 * schedule.num_atoms, 10**6))


def draft_of(collective, rows, *, num_ranks=3, cuts=(0, 1), owners=None, root=0):
    owners = [0] * (len(cuts) - 1) if owners is None else owners
    return Draft(
        collective=collective,
        num_ranks=num_ranks,
        cuts=cuts,
        transfers=Transfers.of([Transfer(*row) for row in rows]),
        owners=np.array(owners),
        planner="hand",
        root=root,
    )


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (
            draft_of(RS, [(0, 1, 0, 0, 1, True), (1, 2, 0, 0, 1, True), (2, 1, 0, 0, 1, True)]),
            r"rank 0, atom 0 \(\[0, 1\) of the data\) rank 1 is counted 2 times instead of 1",
        ),
        (
            draft_of(RS, [(0, 1, 0, 0, 2, True), (1, 2, 0, 0, 1, True)], cuts=(0, 1, 4)),
            r"in rank 0, atom 1 \(\[1/4, 1\) of the data\) rank 2 is counted 0 times instead of 1",
        ),
        (
            draft_of(RS, [(0, 0, 1, 0, 1, True), (1, 1, 2, 0, 1, True), (2, 2, 0, 0, 1, True)]),
            "rank 0 is counted 2 times instead of 1",
        ),
        (draft_of(AG, [(0, 0, 1, 0, 1, False)]), "rank 2, atom 0 .* was never written"),
        (
            draft_of(AG, [(0, 1, 2, 0, 1, False), (1, 0, 1, 0, 1, False)]),
            "nothing may be read before it was written, but rank 1, atom 0 .* is sent in step 0",
        ),
        (
            draft_of(BC, [(0, 0, 1, 0, 1, False), (0, 1, 2, 0, 1, False)]),
            "read before it was written, but rank 1, atom 0",
        ),
        (
            draft_of(AG, [(0, 0, 1, 0, 1, False), (1, 0, 2, 0, 1, False), (1, 1, 2, 0, 1, False)]),
            "in step 1 rank 2, atom 0 .* is overwritten from rank 0 and also written from rank 1",
        ),
        (
            draft_of(AR, [(0, 0, 1, 0, 1, False), (0, 2, 1, 0, 1, True)]),
            "rank 1, atom 0 .* is overwritten from rank 0 and also written from rank 2",
        ),
        (draft_of(RS, [], num_ranks=1, owners=[UNOWNED]), r"atom 0 \(\[0, 1\) of the data\) has rank -1 as its owner"),
        (draft_of(AR, [], num_ranks=1, owners=[1]), "has rank 1 as its owner"),
        (draft_of(RS, [], num_ranks=1, owners=[0, 0]), "each of the 1 atoms needs an owner"),
        (draft_of(RS, [], num_ranks=1, cuts=(0, 2, 2)), "cuts must rise"),
        (draft_of(RS, [], num_ranks=1, cuts=(1, 2)), "cuts must rise from 0"),
        (draft_of(BC, [], root=3), "the root must be one of the ranks, not 3"),
        (draft_of(RS, [(0, 0, 0, 0, 1, True)]), "no rank sends to itself, but transfer 0 is Transfer"),
        (draft_of(RS, [(0, 3, 0, 0, 1, True)]), "sources are ranks"),
        (draft_of(RS, [(0, 0, -1, 0, 1, True)]), "destinations are ranks"),
        (draft_of(RS, [(0, 0, 1, 0, 2, True)]), "atoms exist and no transfer is empty"),
        (draft_of(RS, [(0, 0, 1, 0, 0, True)]), "atoms exist and no transfer is empty"),
        (draft_of(RS, [(-1, 0, 1, 0, 1, True)]), "steps begin at 0"),
    ],
)
def test_refusal_names_the_rule_the_rank_and_the_atom(draft, reason):
    with pytest.raises(ScheduleError, match=reason) as refusal:
        verify(draft)
    assert str(refusal.value).startswith("the hand draft for ")
    assert "choose another one" in str(refusal.value)


def all_to_all(groupings):
    """Rank k adds the others' contributions in the steps that its grouping gives them."""
    rows = [(step, src, dst, 0, 1, True) for dst, steps in enumerate(groupings) for src, step in steps.items()]
    return draft_of(AR, rows, num_ranks=len(groupings), owners=[UNOWNED])


def test_ranks_that_add_in_another_order_are_refused():
    # In step 0 everyone still holds its own contribution alone; what is added together there is added in rank order.
    verify(all_to_all([{1: 0, 2: 0}, {0: 0, 2: 0}, {0: 0, 1: 0}]))
    # Ranks 0, 1 and 2 make (0 + 1) + (2 + 3), rank 3 makes 0 + 1 + 2 + 3.
    groupings = [{1: 0, 2: 1}, {0: 0, 2: 1}, {3: 0, 0: 1}, {0: 0, 1: 0, 2: 0}]
    reason = r"same bits, but rank 3 adds atom 0 \(\[0, 1\) of the data\) in another order than rank 0"
    with pytest.raises(ScheduleError, match=reason):
        verify(all_to_all(groupings))


def test_owner_that_is_sent_its_result_is_no_owner_to_split_at():
    schedule = verify(draft_of(AR, [(0, 0, 1, 0, 1, True), (1, 1, 0, 0, 1, False)], num_ranks=2))
    with pytest.raises(ScheduleError, match=r"in rank 0, atom 0 .* rank 1 is counted 0 times"):
        [verify(half) for half in split_at_owners(schedule.draft)]


def test_many_wrong_counts_are_cut_short():
    with pytest.raises(ScheduleError, match="rank 6 is counted 0 times instead of 1 and 3 more"):
        verify(draft_of(RS, [], num_ranks=10))


def test_unordered_rows_are_refused():
    rows = draft_of(AR, [(0, 0, 1, 0, 1, True), (1, 1, 0, 0, 1, False)], num_ranks=2).transfers
    draft = draft_of(AR, [], num_ranks=2, owners=[1])
    refused(replace(draft, transfers=rows.take(np.array([1, 0]))))
    verify(replace(draft, transfers=rows))


def test_long_transfers_and_several_blocks_are_replayed_alike(monkeypatch):
    topology = Topology.load("deep-asymmetric")
    drafts = [
        PLANNERS["tree"].draft(topology, collective, root=3, target=target)
        for collective in Collective
        for target in ("balanced", "rank_order")
    ]
    monkeypatch.setattr("syncline.schedule.replay._LONG_ATOMS", 3)
    monkeypatch.setattr("syncline.schedule.replay._MAX_BLOCK_CELLS", 10 * 17)
    for draft in drafts:
        verify(draft)
        rows = list(draft.transfers)
        for row in range(0, len(rows), 7):
            refused(with_rows(draft, rows[:row] + rows[row + 1 :]))
