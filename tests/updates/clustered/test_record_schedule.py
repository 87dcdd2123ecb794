from hypothesis import given, strategies as st

from syncline.updates.clustered.messages import Kind, RecordSchedule

AGENDAS = st.builds(
    lambda period, reelect_every, choice: RecordSchedule(
        period=period,
        reelect_every=reelect_every,
        has_means=choice < 3,
        has_outer_rounds=choice > 0,
        averages=choice in (2, 4),
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 4),
)


@given(AGENDAS)
def test_records_are_as_the_order_says(record_schedule: RecordSchedule) -> None:
    index = 0
    for term in range(3):
        for period in range(term * record_schedule.reelect_every, (term + 1) * record_schedule.reelect_every):
            for batch in range(period * record_schedule.period, (period + 1) * record_schedule.period):
                record = record_schedule.record(index)
                if record_schedule.has_means:
                    assert (record.kind, record.term, record.period, record.batch) == (Kind.MEAN, term, period, batch)
                    index += 1
            if record_schedule.has_outer_rounds:
                assert record_schedule.record(index).kind is Kind.RESULT
                assert (record_schedule.record(index).period, record_schedule.record(index).batch) == (period, batch)
                index += 1
        if record_schedule.averages:
            assert record_schedule.record(index).kind is Kind.AVERAGE
            index += 1
        assert record_schedule.last_of_term(term) == index - 1


@given(AGENDAS)
def test_parameters_are_level_once_in_a_term_or_with_each_result(record_schedule: RecordSchedule) -> None:
    of_term = [record_schedule.record(index) for index in range(record_schedule.records_of_term)]
    level = [record for record in of_term if record_schedule.levels(record)]
    assert all(record.is_outer_round for record in level)
    if record_schedule.averages:
        assert level == of_term[-1:]
    else:
        assert len(level) == record_schedule.reelect_every * record_schedule.has_outer_rounds


@given(AGENDAS, st.integers(0, 60))
def test_last_outer_round_is_the_newest(record_schedule: RecordSchedule, index: int) -> None:
    before = [record_schedule.record(number) for number in range(index + 1)]
    exchanges = [record for record in before if record.is_outer_round]
    assert record_schedule.last_outer_round(index) == (exchanges[-1] if exchanges else None)
