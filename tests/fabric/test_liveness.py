"""Heartbeats, suspicion and death, and whether this process itself stood still, by a clock of the test's own."""

from syncline.fabric import FabricOptions
from syncline.fabric.liveness import Liveness, Suspect, describe_absence


def judge(liveness, times_s, heard=(), stuck=()):
    verdicts = []
    for now_s in times_s:
        tick = liveness.tick(now_s, heard=set(heard), stuck=set(stuck))
        verdicts += [(now_s, verdict) for verdict in tick.verdicts]
    return verdicts


def new(**settings):
    liveness = Liveness(FabricOptions(**settings), now_s=0.0)
    liveness.add(1)
    liveness.add(2)
    return liveness


def test_a_silent_peer_is_suspected_once_and_then_dead():
    liveness = new()
    verdicts = judge(liveness, range(1, 11), heard=[2])
    assert verdicts == [(3, Suspect(peer=1, silence_s=3.0)), (10, Suspect(peer=1, silence_s=10.0, is_dead=True))]
    assert liveness.suspects == {1}
    liveness.remove(1)
    assert not liveness.suspects
    assert judge(liveness, range(11, 30), heard=[2]) == []


def test_a_peer_of_which_three_heartbeats_are_missing_is_silent_however_long_others_wait_for_it():
    liveness = new(suspect_s=36.0, dead_s=120.0)
    assert judge(liveness, [1, 2], heard=[2]) == []
    assert not liveness.suspects
    assert judge(liveness, [3], heard=[2]) == []
    assert liveness.suspects == {1}


def test_a_peer_that_speaks_again_is_trusted_again():
    liveness = new()
    judge(liveness, range(1, 9), heard=[2])
    assert liveness.suspects == {1}
    judge(liveness, [9], heard=[1, 2])
    assert not liveness.suspects
    verdicts = judge(liveness, range(10, 19), heard=[2])
    assert verdicts == [(12, Suspect(peer=1, silence_s=3.0))]


def test_a_peer_that_is_heard_and_gets_no_data_is_lost_after_as_long():
    liveness = new()
    assert judge(liveness, range(1, 10), heard=[1, 2], stuck=[1]) == []
    assert judge(liveness, [10], heard=[1, 2]) == []
    verdicts = judge(liveness, range(11, 21), heard=[1, 2], stuck=[1])
    assert verdicts == [(20, Suspect(peer=1, silence_s=10.0, is_dead=True, is_heard=True))]


def test_data_that_waits_since_a_peer_was_silent_has_the_time_that_tcp_takes_to_send_it_again():
    liveness = new()
    assert judge(liveness, range(1, 3), heard=[2], stuck=[1]) == []
    judge(liveness, range(3, 9), heard=[2], stuck=[1])
    assert judge(liveness, range(9, 18), heard=[1, 2], stuck=[1]) == []


def test_a_loop_that_stood_still_does_not_blame_the_others():
    liveness = new()
    judge(liveness, range(1, 3))
    tick = liveness.tick(62.0, heard=set())
    assert tick.gap_s == 60.0
    assert tick.must_beat
    assert tick.verdicts == (Suspect(peer=1, silence_s=3.0), Suspect(peer=2, silence_s=3.0))
    verdicts = judge(liveness, range(63, 70), heard=[1])
    assert verdicts == [(69, Suspect(peer=2, silence_s=10.0, is_dead=True))]


def test_heartbeats_are_sent_at_once_and_then_at_their_interval():
    liveness = new(heartbeat_s=1.0, dead_s=3.0)
    assert liveness.interval_s == 0.3
    beats = [number for number in range(1, 14) if liveness.tick(number * 0.3, heard={1, 2}).must_beat]
    assert beats == [1, 5, 9, 13]


def test_no_peers_no_verdicts():
    liveness = Liveness(FabricOptions(), now_s=0.0)
    assert judge(liveness, range(1, 100)) == []


def test_a_loop_that_runs_was_never_away():
    liveness = new()
    for now_s in range(1, 50):
        liveness.tick(now_s, heard=set())
        assert liveness.away_s(now_s + 2.9) == 0.0


def test_an_absence_is_known_before_and_after_the_clock_was_looked_at_and_then_forgotten():
    liveness = new()
    liveness.tick(1.0, heard=set())
    assert liveness.away_s(61.0) == 60.0
    assert liveness.tick(61.0, heard=set()).gap_s == 60.0
    assert liveness.away_s(61.0) == 60.0
    for now_s in range(62, 72):
        liveness.tick(now_s, heard=set())
    assert liveness.away_s(71.0) == 60.0
    liveness.tick(72.0, heard=set())
    assert liveness.away_s(72.0) == 0.0


def test_an_absence_in_words():
    assert describe_absence(12.34).startswith("did not run for 12.3 s (it was stopped or suspended, or")


def test_a_user_is_told_once_what_a_gap_means_and_what_to_do():
    liveness = new()
    advice = liveness.advise(14.43)
    for part in ("did not run for 14.4 s", "suspended", "swapped out", "GIL", "silent for 10 s", "silence_s"):
        assert part in advice
    assert liveness.advise(3.0) == ""
