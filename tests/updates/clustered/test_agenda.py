import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigurationError
from syncline.updates.clustered.agenda import Agenda, Kind

AGENDAS = st.builds(
    lambda period, reelect_every, choice: Agenda(
        period=period, reelect_every=reelect_every, exchanges=choice > 0, averages=choice > 1
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2),
)


@given(AGENDAS)
def test_entries_are_as_the_order_says(agenda: Agenda) -> None:
    index = 0
    for term in range(3):
        for period in range(term * agenda.reelect_every, (term + 1) * agenda.reelect_every):
            for batch in range(period * agenda.period, (period + 1) * agenda.period):
                entry = agenda.entry(index)
                assert (entry.kind, entry.term, entry.period, entry.batch) == (Kind.MEAN, term, period, batch)
                index += 1
            if agenda.exchanges:
                assert agenda.entry(index).kind is Kind.RESULT
                assert (agenda.entry(index).period, agenda.entry(index).batch) == (period, batch)
                index += 1
        if agenda.averages:
            assert agenda.entry(index).kind is Kind.AVERAGE
            index += 1
        assert agenda.last_of_term(term) == index - 1


@given(AGENDAS, st.integers(0, 60))
def test_last_exchange_is_the_newest(agenda: Agenda, index: int) -> None:
    before = [agenda.entry(number) for number in range(index + 1)]
    exchanges = [entry for entry in before if entry.is_exchange]
    assert agenda.last_exchange(index) == (exchanges[-1] if exchanges else None)


@pytest.mark.parametrize(("period", "reelect_every"), [(0, 1), (1, 0)])
def test_counts_are_at_least_one(period: int, reelect_every: int) -> None:
    with pytest.raises(ConfigurationError):
        Agenda(period=period, reelect_every=reelect_every)


def test_one_cluster_has_nothing_to_average() -> None:
    with pytest.raises(ConfigurationError):
        Agenda(period=1, reelect_every=1, exchanges=False, averages=True)
