"""No garbage is looked for while some thread asks for that, in whatever order they come and go."""

import gc
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


def test_a_program_that_wants_none_gets_none() -> None:
    gc.disable()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
