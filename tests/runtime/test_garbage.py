"""No garbage is looked for while some thread asks for that, in whatever order they come and go."""

import gc
import subprocess
import sys
from contextlib import ExitStack

from syncline.late_imports import without_collections


def test_who_came_first_and_goes_first_leaves_it_off_for_who_is_still_there() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_collections())
    second.enter_context(without_collections())
    first.close()
    assert not gc.isenabled()
    second.close()
    assert gc.isenabled()


FORKED = """
import gc, os, signal
from syncline.late_imports import _lock, without_collections
with without_collections(), _lock:  # as if another thread were about to come in
    child = os.fork()
    if not child:
        signal.alarm(10)
        with without_collections():
            pass
        os._exit(0 if gc.isenabled() else 1)
    assert not os.waitpid(child, 0)[1]
"""


def test_a_forked_child_looks_for_garbage_again() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)


def test_a_program_that_wants_none_gets_none() -> None:
    gc.disable()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
