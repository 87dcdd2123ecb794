"""Transfers in columns: order, reversal, and the merging of what touches."""

from hypothesis import given, strategies as st

from syncline.schedule import Transfer, Transfers

ROWS = st.lists(
    st.builds(
        lambda step, src, dst, first, length, add: Transfer(step, src, dst, first, first + length, add),
        *(st.integers(0, 2) for _ in range(4)),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=20,
)


def row(step, src, dst, first, last, add=True):
    return Transfer(step, src, dst, first, last, add)


def atoms_moved(rows):
    return sorted((*one[:3], atom, one.add) for one in rows for atom in range(one.first, one.last))


def test_rows_go_in_and_come_out():
    rows = [row(1, 0, 1, 0, 1), row(0, 1, 2, 3, 4, False)]
    assert list(Transfers.of(rows)) == rows[::-1]
    assert list(Transfers.of([])) == []
    assert len(Transfers.concatenate([])) == 0


def test_touching_rows_are_merged_and_others_are_not():
    rows = [
        row(0, 0, 1, 2, 3),
        row(0, 0, 2, 0, 1),
        row(0, 0, 1, 0, 2),
        row(0, 0, 1, 3, 4, False),
        row(0, 0, 1, 5, 6),
        row(1, 0, 1, 4, 5),
    ]
    assert list(Transfers.of(rows).merged()) == [
        row(0, 0, 1, 0, 3),
        row(0, 0, 2, 0, 1),
        row(0, 0, 1, 3, 4, False),
        row(0, 0, 1, 5, 6),
        row(1, 0, 1, 4, 5),
    ]


@given(ROWS)
def test_merging_moves_the_same_atoms(rows):
    transfers = Transfers.of(rows)
    merged = transfers.merged()
    assert atoms_moved(merged) == atoms_moved(transfers)
    assert len(merged) <= len(transfers)
    assert list(merged.in_order()) == list(merged)


@given(ROWS)
def test_reversal_swaps_senders_and_receivers(rows):
    transfers = Transfers.of([one._replace(add=False) for one in rows])
    twice = transfers.reversed().reversed()
    first_step = int(transfers.step[0]) if len(transfers) else 0
    assert list(twice.shifted(first_step)) == list(transfers)
