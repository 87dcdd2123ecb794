"""One word for one thing: nouns of classes that other rooms see stand in the glossary; replaced words stay away."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "syncline"
FILES = sorted(SOURCE.rglob("*.py"))
REPLACED = {
    "agenda",
    "audience",
    "board",
    "chronicle",
    "council",
    "crew",
    "fitting",
    "lane",
    "meeting",
    "patient",
    "piece",
    "review",
    "scribe",
    "seat",
    "shelf",
    "sounding",
    "steering",
    "survey",
    "turn",
    "walk",
    "walker",
    "waypoint",
    "wire",
    "wiring",
}
"""Words that meant several things, or nothing to a reader who knows the field."""


@cache
def glossary() -> frozenset[str]:
    """All words that the first columns of the glossary's tables define, in the singular."""
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line[:1] == "|"]
    return frozenset(singular(word) for row in rows for word in re.findall(r"[a-z]+", row.lower()))


def singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[a-z]+", name)]


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def classes_seen_by_other_rooms() -> set[str]:
    """Names of classes that a package exports, or that a module of another room imports."""
    defined: dict[str, str] = {}
    imported: list[tuple[str, str, bool]] = []
    for path in FILES:
        room = room_of(".".join(("syncline", *path.relative_to(SOURCE).with_suffix("").parts)))
        text = path.read_text()
        defined |= dict.fromkeys(re.findall(r"^class (\w+)", text, re.MULTILINE), room)
        for names in re.findall(r"^ *from \S+ import +(\([^)]*\)|.*)", text, re.MULTILINE):
            imported += [(name, room, path.name == "__init__.py") for name in re.findall(r"\w+", names)]
    seen = {name for name, room, is_export in imported if name in defined and (is_export or defined[name] != room)}
    return {name for name in seen if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(classes_seen_by_other_rooms()))
def test_the_noun_of_a_class_is_in_the_glossary(name: str) -> None:
    *_, noun = words_of(name)
    assert singular(noun) in glossary(), (
        f"{name}: docs/glossary.md does not say what a {noun} is; use its words, or add it"
    )


def test_no_row_of_the_glossary_is_dead() -> None:
    """Each of its nouns stands in the code: in a name, a comment or a text."""
    files = [path for pattern in ("*.py", "*.[ch]pp") for path in SOURCE.rglob(pattern)]
    used = f" {' '.join(singular(word) for path in files for word in words_of(path.read_text()))} "
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line[:1] == "|"]
    nouns = [" ".join(map(singular, words_of(noun))) for row in rows if "--" not in row for noun in row.split(",")]
    assert len(nouns) > 100
    assert not [noun for noun in nouns if f" {noun} " not in used]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_replaced_words_stay_away_from_names(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = [path.stem, *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    found = {name for name in names if REPLACED.intersection(words_of(name))}
    assert not found, f"{path}: {sorted(found)} use words that the glossary has replaced"
