"""Who is still, and who is stalled, from what heartbeats carry; without heartbeats and without time."""

import threading

import pytest

from syncline.fabric.progress import BACKWARD, ELSEWHERE, FORWARD, STEP, MemberStalls, Progress, Stalls


def test_a_value_changes_with_every_call_and_is_odd_while_a_thread_waits():
    progress = Progress()
    values = [progress.value]
    progress.touch()
    values.append(progress.value)
    with progress.waiting():
        values.append(progress.value)
        with progress.waiting():
            values.append(progress.value)
        assert progress.is_waiting, "the outer wait goes on"
    values.append(progress.value)
    assert len(set(values)) == len(values)
    assert [value & 1 for value in values] == [0, 0, 1, 1, 0]


def test_a_wait_that_is_not_seen_counts_until_it_is_released():
    progress = Progress()
    progress.hold()
    progress.hold()
    progress.release()
    assert progress.value & 1
    progress.release()
    assert not progress.is_waiting


def test_the_wait_of_another_thread_counts_too():
    progress = Progress()
    is_waiting, may_go = threading.Event(), threading.Event()

    def wait():
        with progress.waiting():
            is_waiting.set()
            may_go.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_waiting.wait(60)
    assert progress.value & 1
    may_go.set()
    thread.join(60)
    assert not progress.value & 1


def spans_of(progress):
    told = []
    progress.on_span = lambda name, category, start_ns, end_ns: told.append((category, name))
    return told


def test_a_wait_is_named_by_where_the_thread_is_or_by_its_reason():
    progress = Progress()
    told = spans_of(progress)
    with progress.waiting():
        pass
    progress.enter(FORWARD)
    with progress.waiting():
        progress.touch()
    progress.leave()
    with progress.stepping(7), progress.waiting("period"), progress.waiting():
        pass
    assert told == [
        ("wait", "elsewhere"),
        ("wait", "forward"),
        ("compute", "forward"),
        ("wait", "period"),
        ("step", "step 7"),
        ("compute", "step"),
    ]
    assert progress.waited_s.keys() == {"elsewhere", "forward", "period"}
    assert progress.num_steps == 1
    assert progress.steps_s >= progress.phase_s[FORWARD] + progress.waited_s["period"]
    assert progress.total_s >= sum(progress.phase_s.values()) >= progress.steps_s


def test_a_step_that_raises_is_not_finished():
    progress = Progress()
    with pytest.raises(ValueError, match="no memory"), progress.stepping(0):
        raise ValueError("no memory")
    assert (progress.num_steps, progress.phase) == (0, ELSEWHERE)


def test_nobody_is_waited_for_while_this_rank_works_itself():
    progress = Progress()
    told = spans_of(progress)
    progress.enter(STEP)
    with progress.waiting():
        with progress.working():
            assert told == [("wait", "step")]
            assert progress.is_waiting, "the training thread makes no call"
        assert len(told) == 1
    assert told == [("wait", "step")] * 2


def test_foreign_code_that_is_held_waits_from_the_end_of_a_pass_until_it_is_released():
    progress = Progress()
    told = spans_of(progress)
    progress.enter(BACKWARD)
    for _ in range(2):
        progress.hold()
    progress.leave()
    progress.release()
    assert told == [("compute", "backward")]
    progress.release()
    assert told == [("compute", "backward"), ("wait", "backward")]
    progress.hold()
    progress.leave()
    progress.enter(STEP)
    assert told[2:] == [("wait", "elsewhere")], "it has gone on, whatever it held"


def test_a_rank_is_stalled_after_the_limit_and_moves_with_its_next_call():
    told = []
    stalls = Stalls(3.0, lambda: told.append(stalls.stalled))
    stalls.tick(1.0, {1: 10, 2: 11})
    for _ in range(3):
        assert not told
        stalls.tick(1.0, {1: 10, 2: 11})
    assert told == [{1}], "rank 2 waits for others"
    assert (stalls.stalled, stalls.still_s(1), stalls.still_s(2)) == ({1}, 3.0, 0.0)
    stalls.tick(1.0, {1: 12, 2: 11})
    assert told == [{1}]
    assert (stalls.stalled, stalls.still_s(1)) == (set(), 0.0)


def test_a_rank_that_is_lost_is_stalled_no_more():
    told = []
    stalls = Stalls(1.0, lambda: told.append(stalls.stalled))
    stalls.tick(1.0, {1: 2})
    stalls.tick(1.0, {1: 2})
    stalls.tick(1.0, {})
    assert told == [{1}], "its loss is told by others"
    assert not stalls.stalled


def test_a_group_numbers_its_members():
    stalls = Stalls(1.0, lambda: None)
    members = MemberStalls(stalls, [4, 2])
    stalls.tick(1.0, {2: 6, 3: 0, 4: 8})
    stalls.tick(1.0, {2: 6, 3: 0, 4: 10})
    assert members.stalled == {1}
    assert (members.still_s(1), members.still_s(0), members.limit_s) == (1.0, 0.0, 1.0)
