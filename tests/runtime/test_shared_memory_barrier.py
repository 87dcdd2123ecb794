"""The rule by which a rank meets the others, without memory, threads or time."""

import math
from types import SimpleNamespace

import pytest

from syncline.observe import Trace
from syncline.runtime.shared_memory import collectives
from syncline.runtime.shared_memory.collectives import LOOK_S, Outcome, PutUp, SharedMemoryCollectives

NUMBER, SIGNATURE = 7, 123
BEFORE, BEGUN = 2 * NUMBER - 1, 2 * NUMBER


class ScriptedSlots:
    """Slots in which each wait is one entry of a script: what changes while a rank sleeps."""

    rank, world_size, payload_bytes = 0, 3, 0

    def __init__(self, *script):
        self.progresses = {1: BEFORE, 2: BEFORE}
        self.headers = {}
        self.now_s = 0.0
        self.is_troubled = False
        self.stalled = set()
        self.waits = []
        self._script = iter(script)

    def progress(self, rank):
        return self.progresses[rank]

    def has_header(self, rank, number, signature):
        return self.headers.get(rank) == (number, signature)

    def wait(self, rank, seen, timeout_s):
        assert seen == self.progresses[rank] < BEGUN, "nobody sleeps on a word that has changed"
        self.waits.append((rank, timeout_s))
        for event in next(self._script):
            event(self)

    def meet(self, deadline_s=10.0, stall_s=0.0):
        stalls = SimpleNamespace(stalled=self.stalled, limit_s=stall_s)
        links = SimpleNamespace(has_failed=lambda: self.is_troubled, stalls=stalls)
        call, part = SimpleNamespace(timeout_s=deadline_s), SimpleNamespace(signature=SIGNATURE)
        meeting = PutUp(number=NUMBER, call=call, work=None, part=part, start_ns=0, start_s=0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "time", SimpleNamespace(monotonic=lambda: self.now_s))
            return SharedMemoryCollectives(self, links, trace=Trace()).await_others(meeting, until_s=math.inf)


def puts_up(rank, signature=SIGNATURE):
    def event(slots):
        slots.headers[rank] = (NUMBER, signature)
        slots.progresses[rank] = BEGUN

    return event


def passes_by(rank):
    return lambda slots: slots.progresses.update({rank: BEGUN + 1})


def time_goes_by(seconds):
    def event(slots):
        slots.now_s += seconds

    return event


def trouble(slots):
    slots.is_troubled = True


@pytest.mark.parametrize(
    "script",
    [
        [[puts_up(1), puts_up(2)]],
        [[puts_up(2)], [puts_up(1)]],
        [[puts_up(1)], [puts_up(2)]],
        [[], [puts_up(1)], [], [], [puts_up(2)]],
    ],
)
def test_all_come_in_any_order(script):
    slots = ScriptedSlots(*script)
    assert slots.meet() is Outcome.MET
    assert len(slots.waits) == len(script)
    assert all(timeout_s <= LOOK_S for _, timeout_s in slots.waits)


def test_who_is_there_is_not_waited_for():
    slots = ScriptedSlots()
    puts_up(1)(slots)
    puts_up(2)(slots)
    slots.is_troubled = True  # a rank that met us may have left already
    assert slots.meet(deadline_s=0.0) is Outcome.MET


def test_a_rank_that_has_gone_on_was_here():
    slots = ScriptedSlots([puts_up(1), puts_up(2)])
    slots.progresses[1] = BEFORE
    puts_up(2)(slots)
    slots.progresses[2] = BEGUN + 3  # it makes the next call already, and its slot header of this one is still there
    assert slots.meet() is Outcome.MET


@pytest.mark.parametrize("other", [passes_by, lambda rank: puts_up(rank, SIGNATURE + 1)])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("is_last", [True, False])
def test_one_that_does_otherwise_sends_all_to_the_engine(other, rank, is_last):
    events = [other(rank), puts_up(3 - rank)]
    slots = ScriptedSlots(*([event] for event in (reversed(events) if is_last else events)), [])
    assert slots.meet() is Outcome.ELSEWHERE


def test_a_card_of_another_call_does_not_count():
    slots = ScriptedSlots()
    slots.headers = {1: (NUMBER - 2, SIGNATURE), 2: (NUMBER, SIGNATURE)}
    slots.progresses = {1: BEGUN + 1, 2: BEGUN}
    assert slots.meet() is Outcome.ELSEWHERE


def test_trouble_ends_the_wait_for_who_is_not_there():
    slots = ScriptedSlots([puts_up(1)], [trouble])
    assert slots.meet() is Outcome.TROUBLED


def test_trouble_that_comes_with_the_last_rank_does_not_count():
    slots = ScriptedSlots([puts_up(1)], [puts_up(2), trouble])
    assert slots.meet() is Outcome.MET


def test_time_is_over():
    slots = ScriptedSlots([puts_up(2)], [time_goes_by(9.98)], [time_goes_by(0.02)])
    assert slots.meet() is Outcome.LATE
    assert slots.waits[-1] == (1, pytest.approx(0.02))


def test_a_stalled_rank_is_late_at_once_when_its_limit_is_over():
    slots = ScriptedSlots([time_goes_by(4.0)], [time_goes_by(2.0)])
    slots.stalled = {1}
    assert slots.meet(deadline_s=600.0, stall_s=5.0) is Outcome.LATE
    assert slots.now_s == 6.0
    assert slots.meet(deadline_s=600.0, stall_s=5.0) is Outcome.LATE, "it is not waited for"
