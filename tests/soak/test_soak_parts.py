"""What a soak is made of: schedules that a seed gives again, and an oracle that misses nothing it is to find."""

import copy
from collections import Counter

import pytest
from soak_job import JobRecord
from soak_oracle import LONGEST_STALL_S, Oracle, invalid, longest_stall_s
from soak_plan import KINDS, RULES, TOLERANT, Fault, JobPlan, Outcome, plan_job
from soak_run import MIN_FAULTS_PER_MINUTE, WARM_JOBS, Tally, judge_soak
from soak_training import replay

NUM_SEEDS = 600
HELD = {"files": ["/dev/null", "pipe"], "threads": ["MainThread"]}
NUM_STEPS = 4


def test_a_seed_gives_a_schedule_again():
    assert [plan_job(seed) for seed in range(50)] == [plan_job(seed) for seed in range(50)]
    assert len({plan_job(seed) for seed in range(50)}) == 50


def test_schedules_hold_every_kind_and_every_rule_and_leave_enough_ranks():
    plans = [plan_job(seed) for seed in range(NUM_SEEDS)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(KINDS)
    assert {plan.rule for plan in plans} == set(RULES)
    for plan in plans:
        assert 4 <= plan.world_size <= 8
        assert all(fault.victim != fault.other for fault in plan.faults)
        lost = {rank for fault in plan.faults for rank in plan.struck(fault)}
        if plan.rule in TOLERANT and not any(fault.outcome is Outcome.REFUSED for fault in plan.faults):
            assert 2 * len(lost) <= plan.world_size
            assert 2 * len(lost) < plan.world_size or 0 not in lost or plan.world_size == 4


def make_record(kind="killed", rule="allreduce", *, victim=2):
    """Make what is known of a job of three ranks that ended as it may, after a fault after the second step."""
    fault = Fault(kind=kind, victim=victim, other=0, at_step=2)
    plan = JobPlan(seed=0, rule=rule, world_size=3, num_steps=NUM_STEPS, faults=(fault,))
    record = JobRecord(plan=plan, statuses={0: 0, 1: 0, 2: 0}, outputs={0: "", 1: "", 2: ""}, began_s=0.0, ended_s=9.0)
    running = replay()
    values = [next(running), *(running.send(range(3)) for _ in range(NUM_STEPS))]
    is_harmless = KINDS[kind].outcome is Outcome.HARMLESS
    last = NUM_STEPS if is_harmless else 2
    for rank in range(3):
        tell(record, rank, "ready", rss_kib=1000)
        for step in range(1, last + 1):
            tell(record, rank, "step", step=step, digest=f"bits {step}", value=values[step], members=[0, 1, 2])
        if is_harmless:
            tell(record, rank, "done", step=last, digest=f"bits {last}", value=values[last], rss_kib=1000)
        elif rank != victim:
            text = (
                f"rank {victim} (host b0) is lost: it died, during all_reduce of bucket 0, step 3; rank 0 waits for it"
            )
            tell(record, rank, "error", kind="PeerLostError", is_own=True, lost=victim, text=text)
        tell(record, rank, "closed", before=HELD, after=copy.deepcopy(HELD))
    record.injected.append({"at_s": 1.0, "rank": victim, "kind": kind})
    if kind == "killed":
        record.statuses[victim] = -9
    return record


def tell(record, rank, event, **fields):
    record.events.append({"rank": rank, "at_s": 1.0, "event": event, **fields})


def event_of(record, rank, kind, number=-1):
    return record.of(rank, kind)[number]


@pytest.mark.parametrize("kind", ["killed", "stopped-briefly", "reset"])
def test_what_is_right_passes(kind):
    record = make_record(kind)
    assert Oracle().judge(record) == []
    assert invalid(record) is None


def differ(record):
    event_of(record, 1, "step")["digest"] = "others"


def compute_something_else(record):
    for rank in range(3):
        event_of(record, rank, "step")["value"] *= 1 + 1e-6


def hang(record):
    record.hanging = (1,)


def leave_a_connection(record):
    record.left_behind.append("connection ESTAB")


def leave_a_thread(record):
    event_of(record, 0, "closed")["after"]["threads"].append("syncline")


def leave_a_file(record):
    event_of(record, 0, "closed")["after"]["files"].append("socket")


def die_too(record):
    record.statuses[1] = -11


def end_without_a_word(record):
    record.events.remove(event_of(record, 1, "error"))


def blame_another(record):
    event_of(record, 1, "error").update(lost=0, text="rank 0 (host a0) is lost, during all_reduce of bucket 0, step 3")


def name_no_step(record):
    event_of(record, 1, "error")["text"] = "rank 2 (host b0) is lost, during all_reduce of bucket 0"


def name_no_call(record):
    event_of(record, 1, "error")["text"] = "rank 2 (host b0) is lost in step 3"


def raise_something_else(record):
    event_of(record, 1, "error").update(is_own=False, kind="OSError")


def stall(record):
    event_of(record, 1, "error")["at_s"] = LONGEST_STALL_S + 2


STRUCK = [
    differ,
    compute_something_else,
    hang,
    leave_a_connection,
    leave_a_thread,
    leave_a_file,
    die_too,
    end_without_a_word,
    blame_another,
    name_no_step,
    name_no_call,
    raise_something_else,
    stall,
]


@pytest.mark.parametrize("spoil", STRUCK)
def test_what_is_wrong_after_a_loss_is_found(spoil):
    record = make_record()
    spoil(record)
    assert len(Oracle().judge(record)) >= 1


def test_a_rank_that_ends_though_nothing_forced_it_is_found():
    record = make_record("stopped-briefly")
    record.events.remove(event_of(record, 0, "done"))
    tell(
        record, 0, "error", kind="PeerLostError", is_own=True, lost=2, text="rank 2 is lost, during all_reduce, step 3"
    )
    assert any("had to go on" in sentence for sentence in Oracle().judge(record))


def test_other_bits_than_before_are_found():
    oracle = Oracle()
    assert oracle.judge(make_record()) == []
    record = make_record("stopped-briefly")
    for rank in range(3):
        event_of(record, rank, "step", 0)["digest"] = "equal on all, and new"
    assert any("other bits than in an earlier run" in sentence for sentence in oracle.judge(record))


def test_growth_is_found():
    record = make_record("stopped-briefly")
    event_of(record, 1, "done")["rss_kib"] += 1 << 20
    assert any("grew" in sentence for sentence in Oracle().judge(record))


def test_nan_must_be_told_and_is_compared_no_more():
    record = make_record("not-a-number")
    for rank in range(3):
        for step in (2, 3):
            event_of(record, rank, "step", step)["value"] = float("nan")
    assert {"not told" in sentence for sentence in Oracle().judge(record)} == {True}
    for rank in (0, 2):
        tell(record, rank, "warning", text="NaN or infinity began in the gradients of rank 2 at step 3")
    assert Oracle().judge(record) == []


def test_ranks_of_a_rule_that_goes_on_end_alike():
    record = make_record("stopped-briefly", "overlapped")
    assert Oracle().judge(record) == []
    event_of(record, 1, "done")["digest"] = "others"
    assert any("different parameters" in sentence for sentence in Oracle().judge(record))


def test_a_run_in_which_nothing_took_place_is_invalid():
    record = make_record("stopped-briefly")
    record.injected.clear()
    assert invalid(record) == "nothing of stopped-briefly took place"


def test_only_ranks_that_were_not_struck_stall():
    record = make_record()
    event_of(record, 2, "step")["at_s"] = 1000.0
    assert longest_stall_s(record) == 1.0


def test_a_soak_of_too_little_is_invalid_and_what_grows_is_told():
    tally = Tally(jobs=Counter(allreduce=20), faults=Counter(killed=MIN_FAULTS_PER_MINUTE), steps=10_000)
    tally.sizes = [{"rss_kib": 1000, "num_files": 9, "num_threads": 2}] * 20
    assert judge_soak(tally, 1.0) == []
    assert len(judge_soak(tally, 100.0)) == 2
    tally.sizes = [{"rss_kib": 1000 + number * 10_000, "num_files": number, "num_threads": 2} for number in range(20)]
    assert len(tally.sizes) > WARM_JOBS
    assert len(judge_soak(tally, 1.0)) == 2
    tally.failures.append({})
    assert "1 jobs did not end as they may" in judge_soak(tally, 1.0)
