"""The committed page is what the declarations say."""

from __future__ import annotations

from conformance_page import PAGE, page


def test_the_page_is_what_the_declarations_say() -> None:
    assert PAGE.read_text() == page(), "run python tests/conformance/conformance_page.py"


def test_every_group_is_on_the_page() -> None:
    assert page().count("\n## ") >= 12
