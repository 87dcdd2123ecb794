"""Links between pages: the file is there, and so is the heading."""

from pathlib import Path

import pytest
from markdown_pages import ROOT, anchors, links, written_pages


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = [f"{place}: {target}" for place, target in links(page) if not leads_somewhere(page, target)]
    assert not wrong, "\n".join(wrong)


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    if "://" in path:
        return True  # nothing is fetched in tests
    other = (page.parent / path).resolve() if path else page
    if not other.is_relative_to(ROOT) or not other.exists():
        return False
    return not anchor or anchor in anchors(other)


def test_a_wrong_link_is_noticed() -> None:
    readme = ROOT / "README.md"
    assert leads_somewhere(readme, "docs/guide.md#security")
    assert not leads_somewhere(readme, "docs/guide.md#no-such-heading")
    assert not leads_somewhere(readme, "docs/no-such-page.md")
