"""Some thousand hostile peers of ``fuzz_wire``; its command line runs as many as one likes."""

import asyncio

from fuzz_wire import run_sequences

NUM_SEQUENCES = 3000


def test_a_hostile_peer_ends_in_an_error_or_goes_on_and_harms_nothing():
    outcomes = asyncio.run(run_sequences(range(NUM_SEQUENCES)))
    assert sum(outcomes.values()) == NUM_SEQUENCES
    assert outcomes["over"] > NUM_SEQUENCES // 5, "a good peer goes on"
    assert outcomes["FrameError"] > NUM_SEQUENCES // 5, "one that breaks the protocol does not"
    assert outcomes["DamagedFrameError"]
