"""What a connection keeps until its peer has it, against a plain string of all bytes; no sockets."""

from hypothesis import given
from hypothesis import strategies as st

from syncline.fabric.send_stream import SendStream

ACTIONS = st.lists(st.tuples(st.sampled_from(["append", "sent", "acknowledge", "rewind"]), st.integers(0, 1 << 16)))


@given(ACTIONS)
def test_what_is_unsent_is_always_what_follows_in_the_stream(actions):
    stream, everything, acknowledged, sent, resent = SendStream(), b"", 0, 0, 0
    for kind, number in actions:
        if kind == "append":
            part = bytes((len(everything) + place) % 251 for place in range(number % 40))
            stream.append(part)
            everything += part
        elif kind == "sent":
            num_bytes = number % (len(everything) - sent + 1)
            stream.drop_sent(num_bytes)
            sent += num_bytes
        elif kind == "acknowledge":
            position = number % (len(everything) + 2)
            assert stream.acknowledge(position) == (position <= sent)
            acknowledged = max(acknowledged, position) if position <= sent else acknowledged
        else:
            position = number % (len(everything) + 2)
            is_possible = acknowledged <= position <= sent
            assert stream.rewind(position) == is_possible
            if is_possible:
                resent += sent - position
                acknowledged = sent = position
        assert b"".join(stream.unsent) == everything[sent:]
        assert stream.kept_bytes == len(everything) - acknowledged
        assert stream.resent_bytes == resent
    stream.clear()
    assert stream.kept_bytes == 0
    assert not stream.unsent
