"""The supervisor's decisions, as lists of instructions: no processes, no sockets, no waiting."""

import math
import signal

from syncline.cli.launcher.supervisor import (
    Announce,
    Exit,
    Limits,
    RestartBudget,
    RestartLimits,
    SendSignal,
    StartAgain,
    Supervisor,
)

LIMITS = Limits(grace_s=5.0, stubborn_s=3.0, interrupt_s=30.0)


def supervisor(num_ranks=3):
    return Supervisor(range(num_ranks), LIMITS)


def ended(rank, code=0):
    return rank, Exit(code=code)


def sent(signal_number, *ranks):
    return tuple(SendSignal(rank=rank, signal_number=signal_number) for rank in ranks)


def test_ranks_that_end_well_end_the_job_well():
    job = supervisor()
    assert [job.on_exit(*ended(rank), 1.0) for rank in range(3)] == [(), (), ()]
    assert job.is_finished
    assert job.exit_code == 0


def test_survivors_of_a_failure_get_grace_then_sigterm_then_sigkill_within_ten_seconds():
    job = supervisor()
    assert job.wake_at_s is None
    assert job.on_exit(*ended(1, code=3), 100.0) == (Announce(reason="failure", rank=1),)
    assert job.wake_at_s == 105.0
    assert job.on_time(105.0) == sent(signal.SIGTERM, 0, 2)
    assert job.wake_at_s == 108.0
    assert job.on_exit(0, Exit(signal_number=signal.SIGTERM), 106.0) == ()
    assert job.on_time(108.0) == sent(signal.SIGKILL, 2)
    job.on_exit(2, Exit(signal_number=signal.SIGKILL), 108.1)
    assert job.is_finished
    assert job.exit_code == 3
    assert [(failure.rank, failure.was_signalled) for failure in job.failures] == [(1, False), (0, True), (2, True)]


def test_default_limits_end_everybody_within_ten_seconds():
    assert Limits().grace_s + Limits().stubborn_s < 10.0


def test_survivors_that_may_go_on_are_not_signalled_and_decide_how_the_job_ends():
    job = Supervisor(range(3), Limits(grace_s=math.inf))
    assert job.on_exit(1, Exit(signal_number=signal.SIGKILL), 100.0) == (Announce(reason="failure", rank=1),)
    assert job.wake_at_s is None
    assert job.on_exit(*ended(0), 200.0) == ()
    assert job.on_exit(*ended(2, code=5), 300.0) == ()
    assert job.went_on
    assert job.exit_code == 0


def went_on(*codes):
    """Whether a job may go on whose ranks end with these codes, negative ones being signals."""
    job = Supervisor(range(len(codes)), Limits(grace_s=math.inf))
    for rank, code in enumerate(codes):
        how = Exit(code=code) if code >= 0 else Exit(signal_number=-code)
        job.on_exit(rank, how, float(rank))
    assert (job.exit_code == 0) == job.went_on
    return job.went_on


def test_a_job_outlives_any_number_of_lost_ranks_but_not_the_failure_of_most_others():
    assert went_on(-signal.SIGKILL, -signal.SIGKILL, -signal.SIGTERM, 0)
    assert went_on(1, 0)
    assert not went_on(1, 1, 0)
    assert not went_on(-signal.SIGKILL, 1, 1, 0)
    assert not went_on(-signal.SIGSEGV, -signal.SIGSEGV, 0), "a crash is the process's own fault"
    assert not went_on(-signal.SIGKILL, -signal.SIGKILL), "nobody ended well"


def test_a_job_that_nobody_ends_well_has_failed_also_where_survivors_may_go_on():
    job = Supervisor(range(2), Limits(grace_s=math.inf))
    job.on_exit(*ended(1, code=3), 1.0)
    job.on_exit(*ended(0, code=4), 2.0)
    assert not job.went_on
    assert job.exit_code == 3


def test_ctrl_c_ends_survivors_that_may_go_on():
    job = Supervisor(range(2), Limits(grace_s=math.inf, interrupt_s=30.0))
    job.on_exit(*ended(1, code=3), 1.0)
    assert job.on_signal(signal.SIGINT, 2.0) == (
        Announce(reason="interrupt"),
        *sent(signal.SIGINT, 0),
    )
    assert job.wake_at_s == 32.0


def test_a_second_failure_neither_shortens_nor_prolongs_the_grace():
    job = supervisor()
    job.on_exit(*ended(1, code=1), 100.0)
    assert job.on_exit(*ended(2, code=1), 104.0) == ()
    assert job.wake_at_s == 105.0


def test_a_killed_rank_gives_the_exit_code_of_a_shell():
    job = supervisor(1)
    job.on_exit(0, Exit(signal_number=signal.SIGKILL), 0.0)
    assert job.exit_code == 137


def test_ctrl_c_is_passed_on_once_and_the_second_one_kills():
    job = supervisor(2)
    assert job.on_signal(signal.SIGINT, 10.0) == (
        Announce(reason="interrupt"),
        *sent(signal.SIGINT, 0, 1),
    )
    assert job.wake_at_s == 40.0
    assert job.on_exit(*ended(0), 11.0) == ()
    assert job.on_signal(signal.SIGINT, 12.0) == sent(signal.SIGKILL, 1)
    job.on_exit(1, Exit(signal_number=signal.SIGKILL), 12.1)
    assert job.exit_code == 130


def test_after_ctrl_c_a_rank_that_ends_badly_starts_the_grace_of_the_others():
    job = supervisor(2)
    job.on_signal(signal.SIGINT, 10.0)
    assert job.on_exit(*ended(0, code=1), 11.0) == ()
    assert job.wake_at_s == 16.0
    assert job.on_time(16.0) == sent(signal.SIGTERM, 1)
    assert job.on_time(19.0) == sent(signal.SIGKILL, 1)


def test_ctrl_c_during_the_grace_does_not_prolong_it():
    job = supervisor(2)
    job.on_exit(*ended(0, code=1), 10.0)
    job.on_signal(signal.SIGINT, 12.0)
    assert job.wake_at_s == 15.0


def test_ctrl_c_after_sigterm_does_not_put_sigkill_off():
    job = supervisor(2)
    job.on_exit(*ended(0, code=1), 10.0)
    job.on_time(15.0)
    job.on_signal(signal.SIGINT, 16.0)
    assert job.wake_at_s == 18.0


def test_a_launcher_that_is_told_to_end_ends_its_ranks():
    job = supervisor(2)
    assert job.on_signal(signal.SIGTERM, 10.0) == (Announce(reason="termination"), *sent(signal.SIGTERM, 0, 1))
    assert job.wake_at_s == 13.0
    assert job.on_signal(signal.SIGTERM, 11.0) == ()
    job.on_exit(*ended(0, code=1), 11.0)
    assert job.wake_at_s == 13.0
    job.on_exit(*ended(1, code=1), 11.0)
    assert job.exit_code == 143
    assert job.wake_at_s is None


REJOINING = Limits(grace_s=math.inf, rejoins=RestartLimits(count=2, period_s=100.0, first_pause_s=1.0), min_ranks=2)


def killed(rank):
    return rank, Exit(signal_number=signal.SIGKILL)


def test_a_rank_of_an_elastic_job_starts_again_after_a_pause_and_joins_who_has_lived_longest():
    job = Supervisor(range(3), REJOINING)
    assert job.on_exit(*killed(0), 10.0) == (Announce(reason="failure", rank=0, pause_s=1.0),)
    assert job.wake_at_s == 11.0
    assert job.on_time(11.0) == (StartAgain(rank=0, living=(1, 2)),)
    assert job.living == {0, 1, 2}
    assert job.on_exit(*killed(1), 12.0) == (Announce(reason="failure", rank=1, pause_s=1.0),)
    assert job.on_time(13.0) == (StartAgain(rank=1, living=(2, 0)),)
    for rank in range(3):
        job.on_exit(*ended(rank), 20.0)
    assert (job.exit_code, job.num_missing, job.num_restarts) == (0, 0, 2)


def test_pauses_double_and_after_as_many_restarts_as_the_period_may_have_a_rank_stays_away():
    job = Supervisor(range(3), REJOINING)
    for now_s, pause_s in ((0.0, 1.0), (10.0, 2.0)):
        assert job.on_exit(*killed(1), now_s) == (Announce(reason="failure", rank=1, pause_s=pause_s),)
        job.on_time(now_s + pause_s)
    assert job.on_exit(*killed(1), 99.0) == ()
    assert job.wake_at_s is None
    job.on_exit(*ended(0), 200.0)
    job.on_exit(*ended(2), 200.0)
    assert (job.exit_code, job.num_missing) == (0, 1)


def test_restarts_that_lie_back_a_period_are_forgotten():
    budget = RestartBudget(RestartLimits(count=2, period_s=100.0, first_pause_s=1.0, longest_pause_s=1.5))
    times_s = (0.0, 50.0, 99.0, 100.0, 149.0)
    assert [budget.take(now_s, ran_s=0.0) for now_s in times_s] == [1.0, 1.5, None, 1.5, None]


def test_what_ran_for_twice_the_longest_pause_starts_again_after_the_shortest():
    limits = RestartLimits(count=9, first_pause_s=1.0, longest_pause_s=5.0)
    job = Supervisor(range(2), Limits(grace_s=math.inf, rejoins=limits))
    now_s, pauses_s = 0.0, []
    for ran_s in (1.0, 1.0, 9.9, 1.0, 10.0, 1.0):
        (announcement,) = job.on_exit(*killed(1), now_s := now_s + ran_s)
        pauses_s.append(announcement.pause_s)
        job.on_time(now_s := now_s + announcement.pause_s)
    assert pauses_s == [1.0, 2.0, 4.0, 5.0, 1.0, 2.0]


def test_a_newcomer_that_waited_in_vain_has_not_run_well():
    job = Supervisor(range(2), Limits(grace_s=math.inf, rejoins=RestartLimits(count=9)))
    pauses_s = []
    for now_s in (1000.0, 2000.0, 3000.0):
        (announcement,) = job.on_exit(1, Exit(code=1), now_s, outside=frozenset({1}))
        pauses_s.append(announcement.pause_s)
        job.on_time(now_s + announcement.pause_s)
    assert pauses_s == [1.0, 2.0, 4.0]


def test_newcomers_that_wait_when_all_members_have_ended_well_end_at_once_and_are_not_started_again():
    job = Supervisor(range(3), REJOINING)
    job.on_exit(*killed(2), 10.0)
    job.on_time(11.0)
    outside = frozenset({2})
    assert job.on_exit(0, Exit(code=0), 12.0, outside=outside) == ()
    assert job.on_exit(1, Exit(code=0), 12.1, outside=outside) == (
        Announce(reason="over"),
        *sent(signal.SIGTERM, 2),
    )
    assert job.wake_at_s == 15.1, "one that stays is killed"
    how = Exit(signal_number=signal.SIGTERM)
    assert job.on_exit(2, how, 12.2, outside=outside) == ()
    assert job.is_finished
    assert (job.exit_code, job.num_missing, job.num_restarts) == (0, 1, 1)


def test_a_newcomer_that_ends_well_outside_has_not_come_back():
    job = Supervisor(range(3), REJOINING)
    job.on_exit(*killed(2), 10.0)
    job.on_time(11.0)
    for rank in (2, 0, 1):
        assert job.on_exit(rank, Exit(code=0), 12.0, outside=frozenset({2})) == ()
    assert (job.exit_code, job.num_missing) == (0, 1)


def test_newcomers_whose_members_are_all_lost_end_so_that_the_job_can_start_anew():
    job = Supervisor(range(2), REJOINING)
    job.on_exit(*killed(1), 10.0)
    job.on_time(11.0)
    told = job.on_exit(0, Exit(code=3), 12.0, outside=frozenset({1}))
    assert told == (Announce(reason="alone"), *sent(signal.SIGTERM, 1))
    job.on_exit(1, Exit(signal_number=signal.SIGTERM), 12.1, outside=frozenset({1}))
    assert job.is_finished
    assert job.exit_code == 137


def test_newcomers_of_a_job_that_has_ranks_elsewhere_wait_for_those():
    job = Supervisor(range(2), Limits(grace_s=math.inf, rejoins=RestartLimits(count=2), is_whole=False))
    job.on_exit(*killed(1), 10.0)
    job.on_time(11.0)
    assert job.on_exit(0, Exit(code=0), 12.0, outside=frozenset({1})) == ()
    assert job.living == {1}


def test_nobody_starts_again_when_the_others_have_ended_or_the_user_ends_the_job():
    job = Supervisor(range(2), REJOINING)
    job.on_exit(*killed(1), 10.0)
    assert job.on_exit(*ended(0), 10.5) == ()
    assert job.is_finished
    assert job.exit_code == 137, "two had to end well"
    job = Supervisor(range(2), REJOINING)
    job.on_exit(*killed(1), 10.0)
    job.on_signal(signal.SIGINT, 10.5)
    assert job.on_time(11.0) == ()
    assert job.living == {0}


def test_fewer_than_the_fewest_ranks_that_end_well_are_a_failure():
    job = Supervisor(range(3), Limits(grace_s=math.inf, min_ranks=2))
    job.on_exit(*killed(0), 1.0)
    job.on_exit(*killed(1), 1.0)
    job.on_exit(*ended(2), 2.0)
    assert job.exit_code == 137
