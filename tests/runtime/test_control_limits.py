"""What another rank tells is checked and bounded: it can neither fill this one's memory nor end it without a name."""

import json
import struct

import pytest

from syncline.errors import PeerLostError, SynclineError, escape_text
from syncline.runtime import control
from syncline.runtime.call import Description
from syncline.runtime.control import ControlError, Failure
from syncline.runtime.same_calls import COST_BYTES, MAX_EARLY_BYTES, RANK_BYTES, EarlyQuota, EarlyWaits, SameCalls


def test_calls_that_this_rank_never_makes_are_kept_up_to_a_bound():
    agreement, description = (
        SameCalls(predecessor=1, quota=EarlyQuota()),
        Description(identity="i" * 400, text="t" * 600),
    )
    num_kept = MAX_EARLY_BYTES // (COST_BYTES + 1000)
    for number in range(num_kept):
        agreement.heard((7, number), 1, description)
    with pytest.raises(ControlError, match="more than 16 MiB about calls that this rank has not made"):
        agreement.heard((8, 0), 1, description)
    agreement.heard((8, 0), 2, description)
    agreement.made((7, 0), description)
    agreement.heard((8, 0), 1, description)


def test_whom_others_wait_for_is_kept_up_to_a_bound_too():
    quota = EarlyQuota(max_bytes=10 * (COST_BYTES + 2 * RANK_BYTES + 4))
    waits = EarlyWaits(quota)
    for number in [*range(10), 3]:
        waits.note((0, number), 1, frozenset({4, number}), "call")
    with pytest.raises(ControlError, match="calls that this rank has not made"):
        waits.note((0, 10), 1, frozenset(), "call")
    assert waits.calls_of(1) == ["call"] * 10
    assert waits.take((0, 3)) == {1: {4, 3}}
    assert waits.take((0, 3)) == {}
    waits.note((0, 10), 1, frozenset(), "call")


HEAD = struct.Struct("<BHI")


def told(kind, body):
    return HEAD.pack(kind, 0, 0) + body


NESTED = b"[" * 16000
BROKEN = {
    "nothing": b"",
    "a part": b"\x01\x00",
    "an unknown kind": told(9, b""),
    "half an envelope": b"\xff\x01",
    "no failure": told(3, b"{}"),
    "a failure without end": told(3, NESTED),
    "a failure of nobody": told(3, json.dumps(["peer lost", "x", 1 << 40, [], ""]).encode()),
    "a failure of a text": told(3, json.dumps(["peer lost", "x", "1", [], ""]).encode()),
    "a wait for nobody": told(2, struct.pack("<II", 1, 2)),
    "a wait that is cut off": told(2, struct.pack("<II", 1 << 31, 0)),
    "an empty wait": told(2, b""),
}


@pytest.mark.parametrize("payload", BROKEN.values(), ids=BROKEN)
def test_what_is_no_control_message_ends_in_an_error_that_names_its_sender(in_memory, payload):
    communicators = in_memory(2)
    work = communicators[0].barrier()
    communicators[1]._loop.call_soon(communicators[1]._fabric.send_control, 0, payload)
    with pytest.raises(SynclineError) as caught:
        work.wait(60)
    assert isinstance(caught.value, PeerLostError)
    assert caught.value.rank == 1
    assert "rank 1 (host memory) broke the protocol: it told " in str(caught.value)


def test_what_a_rank_says_is_shown_in_one_line_and_bounded():
    text = "rank 3\x1b[2J\r\nERROR: all is well\u202e" + "x" * 9000
    failure = Failure(reason="peer lost", text=text, rank=1, remedy="\x07")
    *_, body = control.decode_head(control.encode_failure(failure))
    shown = control.decode_failure(body, world_size=2)
    assert shown.text.startswith("rank 3\\x1b[2J\\r\\nERROR: all is well\\u202exxx")
    assert len(shown.text) == 3000
    assert shown.remedy == "\\x07"
    *_, body = control.decode_head(control.encode_description(0, 0, Description(identity="a", text="b\x00" * 5000)))
    described = control.decode_description(body)
    assert described.identity == "a"
    assert described.text.startswith("b\\x00b")
    assert len(described.text) == 1000


def test_a_text_is_escaped_once():
    assert escape_text(b"caf\xc3\xa9 \xff\n") == "caf\u00e9 \ufffd\\n"
    assert escape_text(escape_text("a\tb")) == "a\\tb"
    assert escape_text("\ud800") == "\\ud800"
    assert escape_text("x" * 10, max_chars=10) == "x" * 10
    assert escape_text("x" * 11, max_chars=10) == "xxxxxxx..."
