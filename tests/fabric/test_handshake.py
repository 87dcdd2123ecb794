"""The handshake: who is let in, and what everyone else is told. No sockets."""

import itertools

import pytest
from hypothesis import given, strategies as st

from syncline.fabric.handshake import (
    FINISH_BYTES,
    HELLO_BYTES,
    MAGIC,
    REPLY_BYTES,
    WELCOME_BYTES,
    Dialer,
    Greeter,
    Refusal,
    RefusedError,
    Resumption,
    Terms,
    derive_key,
)

KEY = derive_key(b"k" * 32, job_id="job")


def terms(rank, **changes):
    counter = itertools.count(rank * 1000)
    nonce = changes.pop("nonce", lambda num_bytes: next(counter).to_bytes(num_bytes, "big"))
    values = {"rank": rank, "world_size": 4, "job_id": "job", "epoch": 77, "key": KEY, "num_classes": 2, "nonce": nonce}
    return Terms(**(values | changes))


def dialer(peer=1, connection_class=0, rank=3, **changes):
    return Dialer(terms(rank, **changes), peer=peer, connection_class=connection_class)


def greeter(is_taken=lambda rank, connection_class: False, rank=1, **changes):
    return Greeter(terms(rank, **changes), is_taken=is_taken)


def refusal(call, *arguments):
    with pytest.raises(RefusedError) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize("connection_class", [-1, 0, 1])
def test_two_ranks_of_a_job_agree(connection_class):
    one, other = dialer(connection_class=connection_class), greeter()
    hello = one.hello
    reply = other.reply(hello)
    finish = one.finish(reply)
    assert (len(hello), len(reply), len(finish)) == (HELLO_BYTES, REPLY_BYTES, FINISH_BYTES)
    assert max(HELLO_BYTES, REPLY_BYTES, FINISH_BYTES, WELCOME_BYTES) <= 256
    assert other.finish(finish) == (3, connection_class, None, one.connection_id, None)
    assert one.enter(other.welcome) == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"versions": (7, 8)}, Refusal.VERSION),
        ({"job_id": "another"}, Refusal.JOB),
        ({"epoch": 78}, Refusal.EPOCH),
        ({"authenticates_frames": True}, Refusal.FRAMES),
        ({"num_classes": 3}, Refusal.CLASSES),
        ({"connection_class": 2}, Refusal.CLASSES),
        ({"connection_class": -2}, Refusal.CLASSES),
        ({"peer": 2}, Refusal.RANK),
        ({"rank": 1}, Refusal.RANK),
        ({"rank": 0}, Refusal.RANK),
        ({"rank": 4}, Refusal.RANK),
    ],
)
def test_what_does_not_fit_is_refused_and_the_dialer_learns_why(changes, expected):
    one = dialer(**changes)
    refused = refusal(greeter().reply, one.hello)
    assert refused.refusal is expected
    assert len(refused.answer) == REPLY_BYTES
    assert refusal(one.finish, refused.answer).refusal is expected


def test_versions_that_overlap_agree_on_the_newest_common_one():
    one, other = dialer(versions=(1, 5)), greeter(versions=(3, 4))
    reply = other.reply(one.hello)
    assert reply[8:10] == (4).to_bytes(2, "little")
    assert other.finish(one.finish(reply))[:3] == (3, 0, None)


def test_a_rank_that_is_connected_already_is_refused():
    one = dialer()
    refused = refusal(
        greeter(is_taken=lambda rank, connection_class: (rank, connection_class) == (3, 0)).reply, one.hello
    )
    assert refused.refusal is Refusal.DUPLICATE
    assert "same RANK" in str(refusal(one.finish, refused.answer))


def test_the_second_of_two_at_once_is_refused():
    taken = set()
    first, second = (greeter(is_taken=lambda *identity: identity in taken) for _ in range(2))
    one, other = dialer(), dialer(nonce=lambda num_bytes: b"z" * num_bytes)
    finish_one = one.finish(first.reply(one.hello))
    finish_other = other.finish(second.reply(other.hello))
    taken.add(first.finish(finish_one)[:2])
    refused = refusal(second.finish, finish_other)
    assert refused.refusal is Refusal.DUPLICATE
    assert "same RANK" in str(refusal(other.enter, refused.answer)), "it is told, though it has sent its last message"


def test_another_secret_is_refused_on_both_sides():
    one, other = dialer(key=derive_key(b"x" * 32, job_id="job")), greeter()
    refused = refusal(one.finish, other.reply(one.hello))
    assert refused.refusal is Refusal.SECRET
    assert refusal(other.finish, refused.answer).refusal is Refusal.SECRET


def test_a_dialer_that_lies_about_the_secret_is_refused():
    one, other = dialer(), greeter()
    other.reply(one.hello)
    forged = dialer(key=bytes(32))
    lie = one.finish(greeter(nonce=b"other nonce".ljust).reply(one.hello))
    assert refusal(other.finish, lie).refusal is Refusal.SECRET
    assert forged.hello == one.hello


def test_replayed_messages_are_refused():
    one, other = dialer(), greeter()
    hello = one.hello
    finish = one.finish(other.reply(hello))
    again = greeter(nonce=b"fresh".ljust)
    again.reply(hello)
    assert refusal(again.finish, finish).refusal is Refusal.SECRET


def test_reflected_messages_are_refused():
    one, other = dialer(), greeter()
    hello = one.hello
    reply = other.reply(hello)
    one.finish(reply)
    mac = reply[-32:]
    reflected = one.finish(reply)[:-32] + mac
    assert refusal(other.finish, reflected).refusal is Refusal.SECRET


def test_garbage_is_told_nothing():
    refused = refusal(greeter().reply, b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES))
    assert refused.refusal is Refusal.GARBAGE
    assert refused.answer == b""
    assert refusal(dialer().finish, b"220 mail.example ESMTP".ljust(REPLY_BYTES)).refusal is Refusal.GARBAGE
    other = greeter()
    other.reply(dialer().hello)
    assert refusal(other.finish, bytes(FINISH_BYTES)).refusal is Refusal.GARBAGE


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES), st.booleans())
def test_no_garbage_passes_for_a_hello(garbage, has_magic):
    hello = MAGIC + garbage[len(MAGIC) :] if has_magic else garbage
    refusal(greeter().reply, hello)


@given(place=st.integers(0, HELLO_BYTES * 8 - 1))
def test_a_changed_hello_lets_no_one_in(place):
    one, other = dialer(), greeter()
    changed = bytearray(one.hello)
    changed[place // 8] ^= 1 << place % 8
    try:
        reply = other.reply(bytes(changed))
    except RefusedError:
        return
    refusal(one.finish, reply)


@given(place=st.integers(0, REPLY_BYTES * 8 - 1))
def test_a_changed_reply_is_refused(place):
    one, other = dialer(), greeter()
    changed = bytearray(other.reply(one.hello))
    changed[place // 8] ^= 1 << place % 8
    refusal(one.finish, bytes(changed))


@given(place=st.integers(12 * 8, FINISH_BYTES * 8 - 1))
def test_a_changed_finish_is_refused(place):
    one, other = dialer(), greeter()
    changed = bytearray(one.finish(other.reply(one.hello)))
    changed[place // 8] ^= 1 << place % 8
    refusal(other.finish, bytes(changed))


def test_keys_differ_by_job_and_secret():
    keys = {derive_key(secret, job_id=job) for secret in (b"a" * 32, b"b" * 32) for job in ("one", "two")}
    assert len(keys) == 4


def again(one, number=1, position=500, **changes):
    """Return who dials the connection of ``one`` again."""
    resumption = Resumption(number, changes.pop("connection_id", one.connection_id), position)
    nonces = itertools.count(50_000 + number)
    changes = {"nonce": lambda num_bytes: next(nonces).to_bytes(num_bytes, "big")} | changes
    return Dialer(terms(3, **changes), peer=1, connection_class=0, resumption=resumption)


def opened():
    """Return a dialer whose connection was let in."""
    one, other = dialer(), greeter()
    admission = other.finish(one.finish(other.reply(one.hello)))
    assert admission.connection_id == one.connection_id != bytes(16)
    return one


def test_a_connection_that_is_opened_again_says_what_has_arrived_at_both_ends():
    asked = []

    def resume(*identity):
        asked.append(identity)
        return 77_000

    one = again(opened(), number=4, position=123_456)
    other = Greeter(terms(1), is_taken=lambda *_: True, resume=resume)  # it is there, so the first handshake is refused
    admission = other.finish(one.finish(other.reply(one.hello)))
    assert asked == [(3, 0, Resumption(4, one.connection_id, 123_456))]
    assert admission.resumption == asked[0][2]
    assert admission.frame_keys is None
    assert one.enter(other.welcome) == 77_000
    assert len(other.welcome) == WELCOME_BYTES


def test_a_connection_that_is_not_known_is_not_opened_again_and_the_dialer_learns_why():
    one, other = again(opened()), greeter()
    finish = one.finish(other.reply(one.hello))
    refused = refusal(other.finish, finish)
    assert refused.refusal is Refusal.GONE
    assert "given up this rank" in str(refusal(one.enter, refused.answer))


def test_nobody_without_the_key_can_have_a_socket_given_up():
    asked = []
    one = again(opened(), key=derive_key(b"x" * 32, job_id="job"))
    settings = {"is_taken": lambda *_: False, "resume": lambda *identity: asked.append(identity)}
    other = Greeter(terms(1, nonce=b"fresh".ljust), **settings)
    refused = refusal(one.finish, other.reply(one.hello))
    refusal(other.finish, refused.answer)
    replayed = again(opened())
    finish = replayed.finish(greeter().reply(replayed.hello))
    assert refusal(other.finish, finish).refusal is Refusal.SECRET
    assert not asked


@given(place=st.integers(0, WELCOME_BYTES * 8 - 1))
def test_a_changed_welcome_is_refused(place):
    one, other = again(opened()), Greeter(terms(1), is_taken=lambda *_: False, resume=lambda *_: 9)
    other.finish(one.finish(other.reply(one.hello)))
    changed = bytearray(other.welcome)
    changed[place // 8] ^= 1 << place % 8
    refusal(one.enter, bytes(changed))
