"""Look from outside at a thread that calls and returns, while garbage that lets it go on is collected all the time."""

import gc
import threading
import time

from syncline.runtime.whereabouts import training_place

NUM_LOOKS = 300


class Garbage:
    """A cycle, which lets other threads run when it is collected."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        time.sleep(0.0005)


def inner() -> None:
    with condition:
        time.sleep(0.0001)


def outer(depth: int) -> None:
    if depth:
        outer(depth - 1)
    inner()


def call_for_ever() -> None:
    while True:
        outer(8)


condition = threading.Condition()
thread = threading.Thread(target=call_for_ever, daemon=True)
thread.start()
gc.set_threshold(7, 1, 1)
for _ in range(NUM_LOOKS):
    Garbage()
    Garbage()
    assert training_place(thread.ident)[1].startswith("in ")
assert gc.isenabled()
