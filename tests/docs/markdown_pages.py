"""Markdown pages as the tests of documents see them: blocks of code, inline code, links, headings, and their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
INLINE_CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"#{1,6} (.*)")
FENCE = re.compile(r"```(\w*)(?: title=\"([^\"]+)\")?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code; ``title`` is the file that the reader is told to save it as, empty if none."""

    place: str
    language: str
    title: str
    text: str


def written_pages() -> list[Path]:
    """Return every page that people write: README, docs, examples, changelog, records."""
    patterns = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/records/*/**/*.md")
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    found: list[Block] = []
    opening: re.Match[str] | None = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if opening is None and line.startswith("```"):
            opening, place, lines = FENCE.match(line), f"{page.relative_to(ROOT)}:{number}", []
            assert opening, f'{place}: a fence is ```language, or ```language title="file", not {line}'
        elif opening is not None and line == "```":
            text = "\n".join(lines) + "\n"
            found.append(Block(place=place, language=opening[1], title=opening[2] or "", text=text))
            opening = None
        elif opening is not None:
            lines.append(line)
    assert opening is None, f"{page.name}: the last block has no end"
    return found


def inline_code(page: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of each piece of inline code."""
    for number, line in prose(page):
        for match in INLINE_CODE.finditer(line):
            yield f"{page.relative_to(ROOT)}:{number}", match[1]


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield place and target of each link."""
    for number, line in prose(page):
        for match in LINK.finditer(INLINE_CODE.sub("", line) if "`](" not in line else line):
            yield f"{page.relative_to(ROOT)}:{number}", match[1]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = (HEADING.fullmatch(line) for _, line in prose(page))
    return {slug(heading[1]) for heading in headings if heading}


def slug(heading: str) -> str:
    """Return the anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not in a block of code."""
    is_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def rows_of(page: str, first: str) -> list[str]:
    """Return the rows of all tables of a page whose first column is called ``first``."""
    tables = re.findall(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [row for table in tables for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)]


def check_row(row: str) -> None:
    """Check that four columns say something, and that the last names tests that exist."""
    *said, tested = row.split(" | ")
    assert len(said) == 3
    assert all(said)
    names = INLINE_CODE.findall(tested)
    assert names
    for name in names:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name
