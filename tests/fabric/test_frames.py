"""Frames survive the trip, and nothing else passes for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.fabric.frames import (
    HEADER_BYTES,
    MAX_FLAGS,
    DamagedFrameError,
    FrameError,
    FrameType,
    check_payload,
    decode_header,
    encode_header,
    on_word_of,
    read_loss,
)
from syncline.fabric.options import MAX_CHUNK_BYTES

HEADERS = st.builds(
    encode_header,
    st.sampled_from(FrameType),
    st.integers(-1, 15),
    tag=st.integers(0, (1 << 64) - 1),
    signature=st.integers(0, (1 << 32) - 1),
    message_bytes=st.integers(0, (1 << 64) - 1),
    offset=st.integers(0, (1 << 64) - 1),
    payload=st.binary(max_size=100),
)


@given(
    kind=st.sampled_from(FrameType),
    connection_class=st.integers(-1, 15),
    tag=st.integers(0, (1 << 64) - 1),
    signature=st.integers(0, (1 << 32) - 1),
    message_bytes=st.integers(0, (1 << 64) - 1),
    offset=st.integers(0, (1 << 64) - 1),
    payload=st.binary(max_size=2000),
)
def test_what_is_encoded_is_decoded(kind, connection_class, tag, signature, message_bytes, offset, payload):
    header = encode_header(
        kind,
        connection_class,
        tag=tag,
        signature=signature,
        message_bytes=message_bytes,
        offset=offset,
        payload=memoryview(payload),
    )
    assert len(header) == HEADER_BYTES
    frame = decode_header(memoryview(header))
    assert (frame.type, frame.connection_class, frame.tag, frame.signature) == (kind, connection_class, tag, signature)
    assert (frame.message_bytes, frame.offset, frame.chunk_bytes) == (message_bytes, offset, len(payload))
    check_payload(frame, payload)


def test_a_loss_says_whose_word_it_is():
    assert read_loss(7, teller=3) == (7, 3)
    for accuser in (0, 5, 2**32 - 2):
        assert read_loss(on_word_of(accuser, 7), teller=3) == (7, accuser)


@given(header=HEADERS, place=st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_in_a_header_is_found(header, place):
    damaged = bytearray(header)
    damaged[place // 8] ^= 1 << place % 8
    with pytest.raises(FrameError):
        decode_header(memoryview(damaged))


@given(payload=st.binary(min_size=1, max_size=500), data=st.data())
def test_a_flipped_bit_in_a_payload_is_found(payload, data):
    frame = decode_header(memoryview(encode_header(FrameType.DATA, 0, payload=payload)))
    place = data.draw(st.integers(0, len(payload) * 8 - 1))
    damaged = bytearray(payload)
    damaged[place // 8] ^= 1 << place % 8
    with pytest.raises(DamagedFrameError, match="check memory, cable"):
        check_payload(frame, damaged)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_is_no_frame(garbage):
    with pytest.raises(FrameError):
        decode_header(memoryview(garbage))


def test_a_chunk_above_the_limit_is_refused():
    header = encode_header(FrameType.DATA, 0, payload=bytes(MAX_CHUNK_BYTES + 1))
    with pytest.raises(FrameError, match="not allowed"):
        decode_header(memoryview(header))


def test_only_chunks_say_what_was_sent_again():
    assert decode_header(memoryview(encode_header(FrameType.DATA, 0, flags=MAX_FLAGS))).flags == MAX_FLAGS
    for kind in set(FrameType) - {FrameType.DATA}:
        with pytest.raises(FrameError, match="flags 1 is not allowed"):
            decode_header(memoryview(encode_header(kind, 0, flags=1)))
