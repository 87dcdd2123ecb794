"""A process that stood still knows it by its own clock."""

from syncline.fabric.standstill import Standstill, describe_absence


def test_a_loop_that_runs_was_never_away():
    standstill = Standstill(interval_s=1.0, remembered_s=10.0, now_s=0.0)
    for now_s in range(1, 50):
        standstill.ran(now_s)
        assert standstill.away_s(now_s + 2.9) == 0.0


def test_an_absence_is_known_before_and_after_the_clock_was_looked_at_and_then_forgotten():
    standstill = Standstill(interval_s=1.0, remembered_s=10.0, now_s=0.0)
    standstill.ran(1.0)
    assert standstill.away_s(61.0) == 60.0
    standstill.ran(61.0)
    assert standstill.away_s(61.0) == 60.0
    for now_s in range(62, 72):
        standstill.ran(now_s)
    assert standstill.away_s(71.0) == 60.0
    standstill.ran(72.0)
    assert standstill.away_s(72.0) == 0.0


def test_an_absence_in_words():
    assert describe_absence(12.34).startswith("did not run for 12.3 s (it was stopped or suspended, or")


def test_a_user_is_told_once_what_a_gap_means_and_what_to_do():
    standstill = Standstill(interval_s=1.0, remembered_s=10.0, now_s=0.0)
    advice = standstill.advise(14.43)
    for part in ("did not run for 14.4 s", "suspended", "swapped out", "GIL", "silent for 10 s", "silence_s"):
        assert part in advice
    assert standstill.advise(3.0) == ""
