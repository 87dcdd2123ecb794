"""Lines about what takes long, and none about what does not."""

from __future__ import annotations

import threading

import pytest

from syncline import observe
from syncline.observe import tell_if_long


def test_what_takes_long_is_told_again_and_again_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "FIRST_S", 0.01)
    monkeypatch.setattr(observe, "EVERY_S", 0.01)
    told = threading.Semaphore(0)

    class Lines:
        def write(self, text: str) -> int:
            assert text.startswith("syncline: planning for 9 ranks (") or text == "\n"
            if text != "\n":
                told.release()
            return len(text)

        def flush(self) -> None: ...

    monkeypatch.setattr(observe.sys, "stderr", Lines())
    before = threading.active_count()
    with tell_if_long("planning for 9 ranks"):
        assert all(told.acquire(timeout=60) for _ in range(3))
    assert threading.active_count() == before


def test_what_is_short_or_not_for_this_rank_to_tell_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with tell_if_long("planning"):
        pass
    before = threading.active_count()
    with tell_if_long("planning", is_told=False):
        assert threading.active_count() == before
    assert capsys.readouterr().err == ""
