"""A rank in which a foreign call holds the interpreter's lock, or which is stopped, for longer than others wait."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import syncline
from syncline.errors import PeerLostError

HELD_S = 5


def held() -> None:
    """Rank 1 calls what does not release the lock; all go on."""
    with syncline.init() as fleet:
        fleet.barrier()
        if fleet.rank == 1:
            ctypes.PyDLL(None).sleep(HELD_S)
        fleet.barrier()
        print("all are there", flush=True)


def stopped(path: str) -> None:
    """Rank 1 is stopped; rank 0 is told, and ends it."""
    fleet = syncline.init()
    fleet.barrier()
    if fleet.rank == 1:
        Path(path).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        fleet.barrier()
    except PeerLostError as error:
        print("told:", error, flush=True)
    finally:
        if fleet.rank == 0:
            os.kill(int(Path(path).read_text()), signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
