"""Who is still, and who is stalled, from what heartbeats carry; without heartbeats and without time."""

import threading

from syncline.fabric.progress import MemberStalls, Progress, Stalls


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


def test_a_rank_is_stalled_after_the_limit_and_moves_with_its_next_call():
    stalls, told = Stalls(3.0), []
    stalls.watch(lambda peer, is_stalled: told.append((peer, is_stalled)))
    stalls.tick(1.0, {1: 10, 2: 11})
    for _ in range(3):
        assert not told
        stalls.tick(1.0, {1: 10, 2: 11})
    assert told == [(1, True)], "rank 2 waits for others"
    assert (stalls.stalled, stalls.still_s(1), stalls.still_s(2)) == ({1}, 3.0, 0.0)
    assert (stalls.progress_of(1), stalls.progress_of(2), stalls.progress_of(7)) == (5, 5, 0)
    stalls.tick(1.0, {1: 12, 2: 11})
    assert told == [(1, True), (1, False)]
    assert stalls.still_s(1) == 0.0


def test_a_rank_that_is_lost_is_stalled_no_more():
    stalls, told = Stalls(1.0), []
    stalls.watch(lambda *news: told.append(news))
    stalls.tick(1.0, {1: 2})
    stalls.tick(1.0, {1: 2})
    stalls.tick(1.0, {})
    assert told == [(1, True)], "its loss is told by others"
    assert not stalls.stalled


def test_a_group_numbers_its_members():
    stalls, told = Stalls(1.0), []
    members = MemberStalls(stalls, [4, 2])
    members.watch(lambda *news: told.append(news))
    stalls.tick(1.0, {2: 6, 3: 0, 4: 8})
    stalls.tick(1.0, {2: 6, 3: 0, 4: 10})
    assert told == [(1, True)]
    assert members.stalled == {1}
    assert (members.progress_of(1), members.still_s(1), members.still_s(0), members.limit_s) == (3, 1.0, 0.0, 1.0)
    members.close()
    stalls.tick(1.0, {2: 8, 4: 12})
    assert told == [(1, True)]
