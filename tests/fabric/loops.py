"""The event loop that the fabrics of a test run on."""

import asyncio

from syncline.fabric import new_event_loop

factory = new_event_loop
"""What makes it: the one that communicators use, which serves transports, unless a test asks for another."""


def run(main):
    """Run a coroutine on a loop of its own."""
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
