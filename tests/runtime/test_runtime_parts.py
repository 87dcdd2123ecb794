"""The parts of the engine that decide without doing: dataflows, tags, agreement, slice order, culprits."""

import pytest
from hypothesis import given, strategies as st

from syncline.errors import ConfigurationError, name_ranks
from syncline.fabric.slice_executor import CALL_TAGS, Kind, check_tags_fit, first_tag
from syncline.runtime import control
from syncline.runtime.call import Description
from syncline.runtime.dataflow import compile_dataflow
from syncline.runtime.failures import find_culprits, heard_from, wait_for
from syncline.runtime.same_calls import EarlyQuota, SameCalls
from syncline.schedule import Phase, Receive, Send


def compile_phases(*phases, rank=2, num_atoms=8, window=None):
    numbered = tuple(Phase(step=step, sends=sends, receives=receives) for step, (sends, receives) in enumerate(phases))
    return compile_dataflow(numbered, rank=rank, num_atoms=num_atoms, window=window)


def add(peer, first, last, index=0):
    return Receive(peer, first, last, index, True)


def copy(peer, first, last, index=0):
    return Receive(peer, first, last, index, False)


def kinds(dataflow):
    return [operation.kind for operation in dataflow.operations]


def test_contributions_stand_in_rank_order_around_the_own_one():
    dataflow = compile_phases(((), (add(5, 0, 8), add(0, 0, 8), add(1, 0, 8))))
    apply = dataflow.operations[-1]
    peers = [dataflow.operations[landing].peer for landing in apply.before + apply.after]
    assert (peers, len(apply.before)) == ([0, 1, 5], 2)


def test_contributions_that_overlap_in_part_are_cut_where_they_differ():
    dataflow = compile_phases(((), (add(0, 0, 5), add(1, 3, 8))))
    applies = [operation for operation in dataflow.operations if operation.kind is Kind.APPLY]
    assert [(a.first, a.last, len(a.before)) for a in applies] == [(0, 3, 1), (3, 5, 2), (5, 8, 1)]


def test_a_send_waits_for_what_wrote_its_range_and_for_nothing_else():
    dataflow = compile_phases(((), (add(0, 0, 2), add(1, 2, 4))), ((Send(5, 0, 2, 0),), ()))
    send = next(i for i, operation in enumerate(dataflow.operations) if operation.kind is Kind.SEND)
    waits_for = [i for i, operation in enumerate(dataflow.operations) if send in operation.then]
    assert [(dataflow.operations[i].kind, dataflow.operations[i].first) for i in waits_for] == [(Kind.APPLY, 0)]


def test_a_copy_waits_for_earlier_sends_of_its_range():
    dataflow = compile_phases(((Send(5, 0, 4, 0),), ()), ((), (copy(5, 0, 4), copy(1, 4, 8))))
    assert kinds(dataflow) == [Kind.SEND, Kind.COPY, Kind.COPY]
    assert dataflow.num_waits == (0, 1, 0)
    assert dataflow.first == (2, 0)


def test_a_copy_over_what_its_own_step_sends_lands_elsewhere_first():
    dataflow = compile_phases(((Send(5, 0, 4, 0),), (copy(5, 0, 4),)))
    assert kinds(dataflow) == [Kind.SEND, Kind.LAND, Kind.APPLY]
    assert dataflow.num_waits == (0, 0, 1)
    assert dataflow.operations[2].replaces


def test_an_apply_waits_for_the_send_of_its_own_step():
    dataflow = compile_phases(((Send(3, 0, 8, 0),), (add(3, 0, 8),)))
    assert dataflow.num_waits[kinds(dataflow).index(Kind.APPLY)] == 1


def test_a_window_leaves_out_what_lies_outside():
    dataflow = compile_phases(((Send(1, 0, 4, 0), Send(3, 4, 8, 0)), (add(1, 2, 6),)), window=(3, 4))
    assert [(o.kind, o.first, o.last) for o in dataflow.operations] == [
        (Kind.SEND, 3, 4),
        (Kind.LAND, 3, 4),
        (Kind.APPLY, 3, 4),
    ]


@given(st.integers(0, 65535), st.integers(0, (1 << 18) - 1), st.integers(0, 65535), st.integers(0, (1 << 14) - 1))
def test_tags_fit_in_64_bits_and_name_their_call(stream, number, slice_number, index):
    tag = first_tag(stream, number, slice_number) + index
    assert tag < 1 << 64
    assert (
        tag // CALL_TAGS == first_tag(stream, number, 0) // CALL_TAGS != first_tag(stream, number + 1, 0) // CALL_TAGS
    )


def test_running_numbers_wrap_around():
    assert first_tag(3, (1 << 18) + 5, 0) == first_tag(3, 5, 0)


def test_too_many_slices_or_messages_are_refused():
    with pytest.raises(ConfigurationError, match="cut larger slices"):
        check_tags_fit(label="x", stream=0, num_slices=65537, num_messages=1)
    with pytest.raises(ConfigurationError, match="choose a planner"):
        check_tags_fit(label="x", stream=0, num_slices=1, num_messages=16385)


def description(identity):
    return Description(identity=identity, text=f"call {identity}")


def test_agreement_is_found_in_either_order():
    calls = SameCalls(predecessor=1, quota=EarlyQuota())
    assert calls.heard((0, 0), 1, description("a")) == (False, None)
    assert calls.made((0, 0), description("a")) == (True, None)
    assert calls.made((0, 1), description("b")) == (False, None)
    assert calls.heard((0, 1), 1, description("b")) == (True, None)


def test_another_rank_than_the_one_before_does_not_make_an_agreement():
    calls = SameCalls(predecessor=1, quota=EarlyQuota())
    calls.made((0, 0), description("a"))
    assert calls.heard((0, 0), 3, description("a")) == (False, None)


def test_a_disagreement_is_found_also_after_the_own_call_has_ended():
    calls = SameCalls(predecessor=1, quota=EarlyQuota())
    calls.made((0, 0), description("a"))
    calls.ended((0, 0))
    _, disagreement = calls.heard((0, 0), 3, description("b"))
    assert (disagreement.peer, disagreement.theirs.text, disagreement.ours.text) == (3, "call b", "call a")


def test_only_the_latest_ended_calls_are_remembered():
    calls = SameCalls(predecessor=1, quota=EarlyQuota())
    calls.made((9, 9), description("still open"))
    for number in range(1000):
        calls.made((0, number), description("a"))
        calls.ended((0, number))
    assert len(calls._own) == 257
    assert calls.heard((9, 9), 1, description("still open")) == (True, None)


@pytest.mark.parametrize(
    ("awaited", "start", "culprits"),
    [
        ({0: {3}}, 0, {3: [0]}),
        ({0: {1}, 1: {2}, 2: {3}}, 0, {3: [2]}),
        ({0: {1, 3}, 1: {3}}, 0, {3: [0, 1]}),
        ({0: {1}, 1: {0}}, 0, {1: [0]}),
        ({0: set()}, 0, {}),
    ],
)
def test_culprits_are_waited_for_and_wait_for_nobody(awaited, start, culprits):
    assert find_culprits(awaited, start) == culprits


def test_ranks_are_named_for_people():
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([6, 5, 1]) == "ranks 1, 5 and 6"
    assert name_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert wait_for([5, 6], "it") == "ranks 5 and 6 wait for it"
    assert wait_for([5], "it") == "rank 5 waits for it"
    assert wait_for([], "it") == "no rank waits for it"


def test_a_loss_that_another_rank_tells_names_it_once_as_it_may_live():
    lost = control.Failure(reason="peer lost", text="rank 1 sent nothing for 10.0 s", rank=1)
    here = heard_from(lost, 2, "rank {}".format)
    assert (here.text, here.is_hearsay) == (f"{lost.text} (as rank 2 reports)", True)
    assert heard_from(here, 3, "rank {}".format).text == here.text
    assert heard_from(lost, 1, "rank {}".format) == lost


def test_control_messages_survive_the_wire():
    kind, stream, number, body = control.decode_head(control.encode_description(7, 1 << 20, description("ä b")))
    assert (kind, stream, number) == (control.ControlKind.DESCRIBE, 7, 1 << 20)
    assert control.decode_description(body) == description("ä b")
    failure = control.Failure(reason="deadline", text="x" * 10_000, rank=3)
    *_, body = control.decode_head(control.encode_failure(failure))
    assert control.decode_failure(body, 4).text == "x" * 3000
    *_, body = control.decode_head(control.encode_waiting(1, 2, {5, 3}, "a call"))
    assert control.decode_waiting(body, 6) == ({3, 5}, "a call")


def test_leaving_many_streams_takes_several_messages():
    completed = {stream: stream * 2 for stream in range(6000)}
    payloads = list(control.encode_leaving(completed))
    assert [control.decode_head(payload)[2] for payload in payloads] == [2, 1, 0]
    assert all(len(payload) <= 16384 for payload in payloads)
    merged = {}
    for payload in payloads:
        merged |= control.decode_leaving(control.decode_head(payload)[3])
    assert merged == completed
