"""Links between pages, and what code says of pages: the file is there, and so is the heading."""

import re
from pathlib import Path

import pytest
from markdown_pages import ROOT, anchors, links, prose, slug, written_pages

CODE = [path for folder in ("src", "tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGE = re.compile(r"docs/[\w/-]+\.md")
DECISION = re.compile(r"(?:docs/decisions/|decision )(\d{4})")
MECHANISM = re.compile(r"docs/mechanisms\.md`*,\s+([A-Z].{0,40})")

HERE = Path(__file__).parent


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = [f"{place}: {target}" for place, target in links(page) if not leads_somewhere(page, target)]
    assert not wrong, "\n".join(wrong)


PAGES = [page for page in written_pages() if "records" not in page.parts]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_as_short_as_those_of_code(page: Path) -> None:
    cannot_be_broken = ("|", "![", "[", "    ")  # tables, images, links, code
    long = [number for number, line in prose(page) if len(line) > 120 and not line.startswith(cannot_be_broken)]
    assert not long, f"{page.relative_to(ROOT)}: lines {long}"


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
    assert {"docs/guide/README.md", "docs/benchmarks.md"} <= {target for _, target in links(readme)}
    assert leads_somewhere(readme, "docs/guide/security.md#security")
    assert not leads_somewhere(readme, "docs/guide/security.md#no-such-heading")
    assert not leads_somewhere(readme, "docs/no-such-page.md")


def test_pages_that_code_names_exist() -> None:
    numbers = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("0*.md")}
    mechanisms = tuple(anchors(ROOT / "docs" / "mechanisms.md"))
    wrong = []
    for path in CODE:
        text = path.read_text()
        wrong += [
            f"{path}: {page}" for page in PAGE.findall(text) if not (ROOT / page).exists() and path.parent != HERE
        ]
        wrong += [f"{path}: decision {number}" for number in DECISION.findall(text) if number not in numbers]
        wrong += [
            f"{path}: mechanism {name}" for name in MECHANISM.findall(text) if not slug(name).startswith(mechanisms)
        ]
    assert not wrong, "\n".join(wrong)


def test_modules_that_the_architecture_names_exist() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (`.*`) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    paths = [ROOT / "src/syncline" / room / name for room, names in rows for name in re.findall(r"`([^`]+)`", names)]
    assert not [path for path in paths if not path.exists()]


def test_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    packages = {path.parent.name for path in (ROOT / "src" / "syncline").glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}`" in page} == packages
    assert {name for name in packages if f">{name}<" in picture} == packages - {"demo"}
