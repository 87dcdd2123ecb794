"""The site's plan: every page is in it, the reference names what exists, and what builds it is pinned."""

import re
import tomllib
from importlib import import_module
from typing import Any

import pytest
import yaml
from markdown_pages import ROOT

import syncline

DOCS = ROOT / "docs"
REFERENCE = {
    name: page
    for page in sorted((DOCS / "reference").glob("*.md"))
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
}


def nav_pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for part in entries for page in nav_pages(part)]


def test_readme_keeps_to_a_hundred_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_readme_counts_the_programs_of_the_conformance_page() -> None:
    (claimed,) = re.findall(r"\[(\d+) scripts\]", (ROOT / "README.md").read_text())
    assert f"of the {claimed} programs" in (DOCS / "conformance.md").read_text()


def test_every_page_is_in_the_navigation() -> None:
    pages = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert all((DOCS / page).exists() or (ROOT / page).exists() for page in pages)
    decisions = DOCS / "decisions"
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent != decisions}
    assert written <= set(pages), f"not in mkdocs.yml: {written - set(pages)}"


def test_the_index_of_decisions_has_them_all() -> None:
    index = (DOCS / "decisions" / "README.md").read_text()
    written = {path.name for path in (DOCS / "decisions").glob("*.md")} - {"README.md"}
    assert written
    assert not [name for name in sorted(written) if f"]({name})" not in index]


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_names_what_exists(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return
    pytest.fail(f"{REFERENCE[name]}: {name} cannot be imported")


def test_the_reference_has_every_public_name() -> None:
    errors = import_module("syncline.errors")
    missing = [
        name
        for name in syncline.__all__
        if f"syncline.{name}" not in REFERENCE and not hasattr(errors, name) and name != "data"
    ]
    assert not missing


def test_what_builds_the_site_is_pinned() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in extra}  # type: ignore[index]
    assert names <= pinned
