"""Several receivers draw over one link whose queue is shorter than their parts of it: a model, counted in packets."""

import pytest
from incast_model import Clock

from syncline.fabric._native import GrantScheduler
from syncline.fabric.sizing import GrantWindow, LinkShare

SEGMENT_BYTES = 1448
BYTES_PER_S = 25e6
NUM_RECEIVERS = 5
PART_BYTES = 75_000
PACKET_BYTES = 11 * SEGMENT_BYTES
ANSWER_S, RESEND_S = 0.0005, 0.005
MESSAGE_BYTES = 500_000
NUM_MESSAGES = 40


class Queue:
    """A first-in-first-out queue of ``limit_bytes`` before a link; what finds it full is lost."""

    def __init__(self, clock, limit_bytes):
        self.clock, self.limit_bytes = clock, limit_bytes
        self.free_s = 0.0
        self.num_dropped = 0
        self.most_bytes = 0

    def put(self, num_bytes, deliver):
        """Return whether there was room."""
        waiting_bytes = max(0.0, self.free_s - self.clock.now_s) * BYTES_PER_S
        if waiting_bytes + num_bytes > self.limit_bytes:
            self.num_dropped += 1
            return False
        self.most_bytes = max(self.most_bytes, waiting_bytes + num_bytes)
        self.free_s = max(self.free_s, self.clock.now_s) + num_bytes / BYTES_PER_S
        self.clock.later(self.free_s - self.clock.now_s, deliver)
        return True


class Receiver:
    """One rank that a sender has much to send to; what is lost is sent again and told with what comes next."""

    def __init__(self, clock, queue, least_bytes):
        self.clock, self.queue = clock, queue
        share = LinkShare(part_bytes=PART_BYTES, most_bytes=5 * PART_BYTES, least_bytes=least_bytes, target_s=0.02)
        self.scheduler = GrantScheduler(
            window=GrantWindow.fixed(1_250_000), quantum_bytes=250_000, shares={1: (share,)}
        )
        self.granted, self.left_bytes, self.num_lost = {}, NUM_MESSAGES * MESSAGE_BYTES, 0
        for tag in range(NUM_MESSAGES):
            self.scheduler.wish(1, tag, num_bytes=MESSAGE_BYTES, urgency=0)
        self.grant()

    def grant(self):
        for _, tag, limit_bytes in self.scheduler.grants(now_s=self.clock.now_s):
            start, self.granted[tag] = self.granted.get(tag, 0), limit_bytes
            self.clock.later(ANSWER_S, lambda num_bytes=limit_bytes - start: self.send(num_bytes))

    def send(self, num_bytes):
        while num_bytes:
            size = min(PACKET_BYTES, num_bytes)
            num_bytes -= size
            self.send_packet(size)

    def send_packet(self, size):
        if not self.queue.put(size, lambda: self.arrive(size)):
            self.num_lost += -(-size // SEGMENT_BYTES)
            self.clock.later(RESEND_S, lambda: self.send_packet(size))

    def arrive(self, size):
        self.scheduler.lost(1, self.num_lost)
        self.num_lost = 0
        self.scheduler.arrived(1, num_bytes=size, urgency=0, now_s=self.clock.now_s)
        self.left_bytes -= size
        self.grant()


def transfer(*, queue_bytes, least_bytes):
    """Move all messages; return the queue, and which part of the time the link was busy."""
    clock = Clock()
    queue = Queue(clock, queue_bytes)
    receivers = [Receiver(clock, queue, least_bytes) for _ in range(NUM_RECEIVERS)]
    clock.run(lambda: not any(receiver.left_bytes for receiver in receivers))
    return queue, NUM_RECEIVERS * NUM_MESSAGES * MESSAGE_BYTES / BYTES_PER_S / clock.now_s


@pytest.mark.parametrize("queue_bytes", [128 << 10, 250_000, 500_000])
def test_little_is_lost_in_a_short_queue_where_shares_heed_losses(queue_bytes):
    heeding, busy = transfer(queue_bytes=queue_bytes, least_bytes=16 << 10)
    deaf, _ = transfer(queue_bytes=queue_bytes, least_bytes=PART_BYTES)
    assert heeding.num_dropped * 8 < deaf.num_dropped, (heeding.num_dropped, deaf.num_dropped)
    assert busy > 0.97


def test_where_nothing_is_lost_a_share_is_as_it_was():
    heeding, busy = transfer(queue_bytes=750_000, least_bytes=16 << 10)
    deaf, busy_too = transfer(queue_bytes=750_000, least_bytes=PART_BYTES)
    assert heeding.num_dropped == deaf.num_dropped == 0
    assert (heeding.most_bytes, busy) == (deaf.most_bytes, busy_too)
