"""A hostile peer for one transport: valid traffic on two or three connections, mutated, in one process and from a seed.

    python tests/fabric/fuzz_wire.py [--sequences 100000] [--first-seed 0]

A *sequence* is one peer from its first frame to its end. The peer knows the protocol: it announces, sends what was
granted, grants, copies and ends as a good one would, and then one frame in a few is changed, doubled on another
connection, cut in two with others in between, or damaged. Whatever it does, the rank must

- let no exception leave the loop, and end the peer with an error or go on;
- write to a destination only while its receive is posted, and never beside it;
- report a message whole only when each of its bytes came;
- hold no more than the credit of what nobody waits for, and let go of all memory in the end.

The run ends at the first sequence that breaks a rule, and prints its seed, which replays it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter

from frames_by_hand import HEADER_BYTES, decode_header, encode_header
from fuzz_victim import ADDRESS, CREDIT_BYTES, MAX_NUMBER, SIZES, SOURCE, Victim

from syncline.fabric.frames import CONTROL_CLASS, FrameType


class Attacker:
    """The peer: what it knows of its side, and the frames that it makes of it."""

    def __init__(self, victim: Victim, generator: random.Random) -> None:
        self._victim = victim
        self._generator = generator
        self._num_classes = len(victim.theirs) - 1
        self._inbox = b""
        self._granted: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._asked: dict[int, tuple[int, int, int]] = {}  # by the victim: size, address, what was granted
        self._begun: dict[int, bytes] = {}  # by connection: the rest of what was sent in part
        self._used: set[int] = set()
        self._credit_bytes = CREDIT_BYTES
        self._has_credit = False
        self._strange: set[int] = set()
        self._rate = generator.choice([0.01, 0.05, 0.2])

    def listen(self) -> None:
        """Read what the victim sent, and remember what it allows."""
        for number, sock in self._victim.theirs.items():
            try:
                while data := sock.recv(1 << 16):
                    self._inbox += data if number == CONTROL_CLASS else b""
            except OSError:
                continue
        while len(self._inbox) >= HEADER_BYTES:
            frame = decode_header(self._inbox)
            self._inbox = self._inbox[HEADER_BYTES + frame.chunk_bytes :]
            if frame.type == FrameType.GRANT:
                self._granted[frame.tag] = frame.message_bytes
            elif frame.type == FrameType.CREDIT and self._has_credit:
                self._credit_bytes += frame.message_bytes
            elif frame.type == FrameType.CREDIT:
                self._has_credit = True  # what it begins with
            elif frame.type == FrameType.REQUEST:
                self._asked[frame.tag] = (frame.message_bytes, frame.offset, 0)

    def attack(self) -> None:
        """Send one frame, most often in good order."""
        connection, fields, payload = self._next_frame()
        if self._generator.random() < self._rate:
            connection, payload = self._mutate(connection, fields, payload)
        if fields["kind"] == FrameType.REQUEST and fields.get("offset", 0) not in (0, ADDRESS):
            self._strange.add(fields["tag"])
        for destination in self._victim.destinations:
            destination.is_copied |= destination.tag in self._strange
        self._transmit(connection, fields, payload)
        if self._generator.random() < self._rate:
            other = self._generator.choice(list(self._victim.theirs))
            self._transmit(other, {**fields, "connection_class": other}, payload)

    def _transmit(self, connection: int, fields: dict[str, int], payload: bytes) -> None:
        """Send a frame on a connection, whole or in two parts, and now and then damaged."""
        named = {"connection_class": connection, **fields}
        kind, number = FrameType(named.pop("kind")), named.pop("connection_class")
        frame = bytearray(encode_header(kind, number, payload=payload, **named) + payload)
        if self._generator.random() < self._rate / 10:
            frame[self._generator.randrange(len(frame))] ^= 1 << self._generator.randrange(8)
        if self._generator.random() < 0.2 and not self._begun.get(connection):
            cut = self._generator.choice([HEADER_BYTES, self._generator.randrange(1, len(frame))])
            self._send(connection, bytes(frame[:cut]))
            self._begun[connection] = self._begun.get(connection, b"") + bytes(frame[cut:])
        else:
            self._send(connection, bytes(frame))

    def go_on(self) -> None:
        """Send the rest of what was begun on some connection."""
        open_connections = [connection for connection, rest in self._begun.items() if rest]
        if open_connections and self._generator.random() < 0.5:
            connection = self._generator.choice(open_connections)
            self._send(connection, self._begun.pop(connection))

    def _send(self, connection: int, data: bytes) -> None:
        """Send behind what was begun on the connection; what the kernel does not take is begun."""
        if self._begun.get(connection):
            self._begun[connection] += data
            return
        try:
            num_bytes = self._victim.theirs[connection].send(data)
        except BlockingIOError:
            num_bytes = 0
        except OSError:
            return
        self._begun[connection] = data[num_bytes:]

    def _next_frame(self) -> tuple[int, dict[str, int], bytes]:
        """Return a connection, a header's fields and a payload that a good peer might send now."""
        open_tags = [tag for tag, limit in self._granted.items() if self._sent.get(tag, 0) < limit]
        choice = self._generator.random()
        if open_tags and choice < 0.5:
            tag = self._generator.choice(open_tags)
            return tag % self._num_classes, *self._chunk(tag)
        if choice < 0.7:
            return self._announce()
        if choice < 0.8 and (self._credit_bytes > max(SIZES) + HEADER_BYTES or choice < 0.7 + self._rate / 10):
            return self._generator.randrange(self._num_classes), *self._small()
        return self._answer()

    def _chunk(self, tag: int) -> tuple[dict[str, int], bytes]:
        sent = self._sent.get(tag, 0)
        stop = min(self._granted[tag], sent + self._generator.choice([1, 500, 4096, 70_000]))
        self._sent[tag] = stop
        fields = {"kind": FrameType.DATA, "tag": tag, "signature": 7, "offset": sent}
        return {**fields, "message_bytes": self._sizes.get(tag, stop)}, bytes(SOURCE[sent:stop])

    def _announce(self) -> tuple[int, dict[str, int], bytes]:
        tag, num_bytes = self._tag_and_size()
        self._sizes[tag] = num_bytes
        is_fetched = self._victim.is_read and num_bytes and self._generator.random() < 0.5
        fields = {"kind": FrameType.REQUEST, "tag": tag, "signature": 7, "message_bytes": num_bytes}
        return CONTROL_CLASS, {**fields, "offset": ADDRESS if is_fetched else 0}, b""

    def _small(self) -> tuple[dict[str, int], bytes]:
        tag, num_bytes = self._tag_and_size()
        payload = bytes(SOURCE[:num_bytes])
        self._credit_bytes -= num_bytes + HEADER_BYTES
        return {"kind": FrameType.EAGER, "tag": tag, "signature": 7, "message_bytes": len(payload)}, payload

    def _tag_and_size(self) -> tuple[int, int]:
        """Return what a receive waits for, or will; now and then a message that was sent, or another size."""
        posted = self._victim.destinations
        fresh = [tag for tag in range(len(posted) + 3) if tag not in self._used]
        tag = self._generator.choice(fresh or [max(self._used) + 1])
        if self._used and self._generator.random() < self._rate / 5:
            tag = self._generator.choice(list(self._used))
        self._used.add(tag)
        size = posted[tag].num_bytes if tag < len(posted) else SIZES[tag % len(SIZES)]
        return tag, self._generator.choice(SIZES) if self._generator.random() < self._rate / 5 else size

    def _answer(self) -> tuple[int, dict[str, int], bytes]:
        """Answer a request of the victim, or say something that stands alone."""
        if self._asked and self._generator.random() < 0.7:
            tag = self._generator.choice(list(self._asked))
            num_bytes, address, granted = self._asked[tag]
            if address and not granted:
                del self._asked[tag]
                return CONTROL_CLASS, {"kind": FrameType.FETCHED, "tag": tag}, b""
            limit = num_bytes if self._generator.random() < 0.6 else self._generator.randint(granted, num_bytes)
            self._asked[tag] = (num_bytes, address, limit)
            if limit > granted and self._generator.random() < 0.8:
                if limit == num_bytes:
                    del self._asked[tag]
                return CONTROL_CLASS, {"kind": FrameType.GRANT, "tag": tag, "message_bytes": limit}, b""
            del self._asked[tag]
            return CONTROL_CLASS, {"kind": FrameType.DISCARD, "tag": tag}, b""
        kind = self._generator.choice([FrameType.CREDIT, FrameType.HEARTBEAT, FrameType.CONTROL])
        return CONTROL_CLASS, {"kind": kind, "message_bytes": 100}, b"x" * 10 if kind is FrameType.CONTROL else b""

    def _mutate(self, connection: int, fields: dict[str, int], payload: bytes) -> tuple[int, bytes]:
        """Change one thing; the checksums will be right."""
        name = self._generator.choice([*fields, "connection", "connection_class", "payload", "offset", "message_bytes"])
        if name == "connection":
            return self._generator.choice(list(self._victim.theirs)), payload
        if name == "payload":
            longer = payload + bytes(SOURCE[: self._generator.choice([1, 48, 5000])])
            return connection, self._generator.choice([b"", payload[:-1], payload[: len(payload) // 2], longer])
        if name == "kind":
            fields["kind"] = self._generator.choice(list(FrameType))
        elif name == "connection_class":
            fields[name] = self._generator.randrange(-3, 4)
        elif name == "signature":
            fields[name] = self._generator.choice([0, 8, (1 << 32) - 1])
        else:
            near = [fields.get(name, 0) + change for change in (-1, 1, 4096, -4096)]
            far = [0, 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, MAX_NUMBER, self._generator.getrandbits(64)]
            fields[name] = self._generator.choice([*near, *far]) & MAX_NUMBER
        return connection, payload


async def run_sequence(seed: int) -> str:
    """Run one peer from its first frame to its end; return how it ended, or raise the first fault."""
    generator = random.Random(seed)
    faults: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context.get("exception") or RuntimeError(str(context))))
    victim = Victim(generator, num_classes=generator.choice([1, 2]))
    attacker = Attacker(victim, generator)
    try:
        for _ in range(generator.choice([10, 30, 60])):
            if generator.random() < 0.4:
                victim.act()
            attacker.listen()
            attacker.attack()
            attacker.go_on()
            for _ in range(generator.randrange(4)):
                await asyncio.sleep(0)
            if faults or victim.outcome:
                break
        for _ in range(4):
            attacker.go_on()
            await asyncio.sleep(0)
        victim.check()
    finally:
        victim.close()
    for _ in range(3):  # what was scheduled before the end must not come back
        await asyncio.sleep(0)
    victim.check()
    if faults:
        raise faults[0]
    return victim.outcome


async def run_sequences(seeds: range) -> Counter[str]:
    """Run a sequence for each seed; return how many ended how. An error says which seed it came from."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes[await run_sequence(seed)] += 1
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return outcomes


def main() -> None:
    """Run as long as it was asked for, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    asked = parser.parse_args()
    started_s = time.monotonic()
    seeds = range(asked.first_seed, asked.first_seed + asked.sequences)
    outcomes = asyncio.run(run_sequences(seeds))
    took_s = time.monotonic() - started_s
    print(f"{asked.sequences} sequences in {took_s:.0f} s: {dict(outcomes)}")


if __name__ == "__main__":
    main()
