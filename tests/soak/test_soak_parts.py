"""What a soak is made of: schedules that a seed gives again, and an oracle that misses nothing it is to find."""

import copy
import os
from collections import Counter

import pytest
from soak_forker import Forker
from soak_growth import Growth
from soak_kinds import KINDS, Outcome
from soak_memory import LEAST_SAMPLES, MOST_GROWTH_KIB, WARM_STEPS, growth_kib
from soak_numbers import Numbers, by_step
from soak_oracle import LONGEST_STALL_S, NO_ROOM, Oracle, invalid, judge_what_is_held, longest_stall_s, struck_s
from soak_pairs import replay_pairs
from soak_plan import GROWING, RULES, SAMPLE_EVERY, TOLERANT, Fault, JobPlan, plan_job
from soak_record import JobRecord
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
        steps = [fault.at_step for fault in plan.faults]
        assert max(steps) < plan.num_steps
        assert len(plan.proxied) <= 2
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
        tell(record, rank, "ready")
        for step in range(1, last + 1):
            tell(record, rank, "step", step=step, digest=f"bits {step}", value=values[step], members=[0, 1, 2])
        if is_harmless:
            tell(record, rank, "done", step=last, digest=f"bits {last}", value=values[last])
        elif rank != victim:
            text = (
                f"rank {victim} (host b0) is lost: it died, during all_reduce of bucket 0, step 3; rank 0 waits for it"
            )
            tell(record, rank, "error", kind="PeerLostError", is_own=True, lost=victim, text=text)
        tell(record, rank, "closed", before=HELD, after=copy.deepcopy(HELD))
    blamed = [] if is_harmless else [victim]
    record.injected.append({"at_s": 1.0, "rank": victim, "kind": kind, "lasts_s": 0.0, "blamed": blamed})
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


@pytest.mark.parametrize(
    ("sockets", "is_right"), [([], True), (["socket"], True), (["socket", "socket"], False), (["pipe"], False)]
)
def test_where_a_start_failed_torch_may_still_look_for_the_store_with_one_socket(sockets, is_right):
    record = make_record("killed-at-start")
    held = event_of(record, 0, "closed")["after"]
    held["threads"].append("syncline-store")
    held["files"].extend(sockets)
    assert (judge_what_is_held(record) == []) == is_right


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


def test_memory_that_grows_is_found_and_what_comes_early_or_once_is_not():
    flat = [1000] * LEAST_SAMPLES
    assert growth_kib(flat) == 0
    assert growth_kib(flat[1:]) is None
    assert growth_kib([*flat[:4], 90_000, *flat[5:]]) == 0
    assert growth_kib([*flat, *([1000 + MOST_GROWTH_KIB + 1] * LEAST_SAMPLES)]) == MOST_GROWTH_KIB + 1
    record = make_record("stopped-briefly")
    samples = [(step, 1000 + 200 * step) for step in range(1, WARM_STEPS + 20 * SAMPLE_EVERY, SAMPLE_EVERY)]
    for event, (step, size) in zip(grow(record, 1, len(samples)), samples, strict=True):
        event.update(step=step, rss_kib=min(size, 1000 + 200 * WARM_STEPS))
    assert not any("grew" in sentence for sentence in Oracle().judge(record))
    for event, (_, size) in zip(record.of(1, "step")[-len(samples) :], samples, strict=True):
        event["rss_kib"] = size
    assert any("rank 1 grew" in sentence for sentence in Oracle().judge(record))


def grow(record, rank, number):
    """Tell so many more steps, and return them."""
    for _ in range(number):
        tell(record, rank, "step", step=0, digest="", value=0.0, members=[0, 1, 2])
    return record.of(rank, "step")[-number:]


def test_nan_must_be_told_and_is_compared_no_more():
    record = make_record("not-a-number")
    for rank in range(3):
        for step in (2, 3):
            event_of(record, rank, "step", step)["value"] = float("nan")
    assert {"not told" in sentence for sentence in Oracle().judge(record)} == {True}
    for rank in (0, 2):
        tell(record, rank, "warning", text="NaN or infinity began in the gradients of rank 2 at step 3")
    tell(record, -1, "loaded", step=3, value=float("nan"))
    assert Oracle().judge(record) == []
    event_of(record, -1, "loaded")["step"] = 2
    assert "the checkpoint: parameters are not those" in Oracle().judge(record)[0]


@pytest.mark.parametrize("kinds", [["full-disk"], ["file-size-limit"], ["file-size-limit", "full-disk"]])
def test_what_cannot_be_saved_is_told_to_all_for_any_of_its_reasons(kinds):
    record = make_record(kinds[0])
    for rank, kind in enumerate(kinds):
        tell(record, rank, "struck", kind=kind, step=2)
    for rank in range(3):
        tell(record, rank, "unsaved", step=2, text=f"a rank cannot write its part: rank 0: {NO_ROOM[kinds[-1]]}")
    assert Oracle().judge(record) == []
    event_of(record, 1, "unsaved")["step"] = 1
    assert ["rank 1 was not told" in sentence for sentence in Oracle().judge(record)] == [True]
    event_of(record, 1, "unsaved").update(step=2, text="a rank cannot write its part: rank 0: Input/output error")
    assert ["rank 1 was not told" in sentence for sentence in Oracle().judge(record)] == [True]


def test_ranks_of_a_rule_that_goes_on_end_alike():
    record = make_record("stopped-briefly", "overlapped")
    assert Oracle().judge(record) == []
    event_of(record, 1, "done")["digest"] = "others"
    assert any("different parameters" in sentence for sentence in Oracle().judge(record))


def test_what_was_made_before_all_of_its_makers_were_lost_counts():
    record = make_record("killed", GROWING)
    record.events.clear()
    running = replay()
    next(running)
    places = dict(enumerate([(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5), (3, 4, 5)], start=1))
    for step, members in places.items():
        value = running.send(members)
        for rank in members:
            tell(record, rank, "step", step=step, digest=f"bits {step}", value=value, members=[*members])
            record.events[-1]["at_s"] = 10.0 * step
    struck = {0: 15.0, 1: 25.0, 2: 35.0}
    record.injected = [{**record.injected[0], "at_s": at_s, "blamed": [rank]} for rank, at_s in struck.items()]
    numbers = Numbers()
    assert numbers.judge(record, struck_s(record)) == []
    counted = [sorted(told) for told in by_step(record, struck).values()]
    assert counted == [[1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 4, 5]]
    event_of(record, 1, "step", 0)["value"] += 1.0
    assert "step 1: parameters are not those" in numbers.judge(record, struck_s(record))[0]
    record.events = [event for event in record.events if event["step"] != 2]
    assert numbers.judge(record, struck_s(record))[-1] == "step 2: nobody who was there told of it"


def make_newcomer(began_s):
    """Make what is known of a job in which rank 2 was killed after a second, and another asked to come in its place."""
    record = make_record("killed", GROWING)
    for rank in (0, 1):
        record.events.remove(event_of(record, rank, "error"))
        tell(record, rank, "done", step=NUM_STEPS, digest="bits")
        event_of(record, rank, "done")["at_s"] = 20.0
    record.newcomers[3], record.statuses[3], record.outputs[3] = began_s, 0, ""
    return record


def test_a_newcomer_is_let_in_or_told_why_not():
    record = make_newcomer(began_s=0.5)
    tell(record, 3, "closed", before=HELD, after=HELD)
    assert any("newcomer 3 was told nothing" in sentence for sentence in Oracle().judge(record))
    tell(record, 3, "error", kind="RendezvousError", is_own=True, lost=None, text="a rank of the job was lost")
    assert Oracle().judge(record) == []
    record.newcomers[3] = 5.0
    event_of(record, 3, "error")["at_s"] = 6.0
    assert any("newcomer 3 had to come in" in sentence for sentence in Oracle().judge(record))
    event_of(record, 3, "error")["at_s"] = 21.0  # the job was over
    assert Oracle().judge(record) == []


def test_a_newcomer_comes_for_whoever_is_lost_and_one_after_the_other():
    growth = Growth(3)
    for rank in range(3):
        growth.hear({"event": "ready", "rank": rank, "number": rank, "join": f"a{rank}"})
    assert not growth.is_whole()
    growth.hear({"event": "step", "rank": 0, "step": 1, "members": [0, 1, 2]})
    assert growth.is_whole()
    growth.strike(1)
    assert not growth.is_whole()
    assert growth.vacant({1}) == []  # the others have not noticed yet
    growth.hear({"event": "step", "rank": 0, "step": 2, "members": [0, 2]})
    growth.broken.add(1)
    assert growth.vacant({1}) == []  # its link is cut still
    growth.broken.clear()
    assert growth.vacant({1}) == [1]
    assert growth.addresses({1}) == "a0,a2"
    growth.on[1] = 3
    assert growth.vacant({1}) == []
    assert growth.vacant({1, 3}) == [1]  # it did not come in
    growth.hear({"event": "ready", "rank": 3, "number": 4, "join": "b0"})
    growth.hear({"event": "step", "rank": 0, "step": 9, "members": [0, 2, 4]})
    assert growth.is_whole()
    growth.hear({"event": "done", "rank": 0})
    assert growth.vacant({3}) == []


def test_a_process_with_the_number_of_one_that_has_ended_lives(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setattr(Forker, "handle", reading)
    forker = Forker.__new__(Forker)
    forker.ended, forker._rest = {}, b""
    try:
        os.write(writing, b'{"begun": {"0": 7}}\n{"ended": 7, "status": 0}\n')
        forker.read()
        assert forker.ended == {7: 0}
        os.write(writing, b'{"begun": {"5": 7}}\n')
        forker.read()
        assert forker.ended == {}
    finally:
        os.close(reading)
        os.close(writing)


def test_pairs_have_the_losses_of_one_process_and_the_same_stages():
    record = make_record("stopped-briefly", "phase")
    losses = replay_pairs()
    by_step = {step: next(losses) for step in range(1, NUM_STEPS + 1)}
    for event in record.events:
        if event["event"] == "step":
            event["value"] = by_step[event["step"]][event["rank"] // 2]
        if event["event"] == "done":
            event["stages"] = {"0": "bits"}
    assert Oracle().judge(record) == []
    event_of(record, 2, "done")["stages"] = {"0": "others"}
    event_of(record, 1, "step", 2)["value"] *= 1 + 1e-6
    assert {"stage" in sentence or "loss of rank 1" in sentence for sentence in Oracle().judge(record)} == {True}
    assert len(Oracle().judge(record)) == 2


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
