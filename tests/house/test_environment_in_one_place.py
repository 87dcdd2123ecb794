"""``syncline.variables`` alone reads the environment, and a page explains every variable of Syncline's own."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "syncline"
PAGE = ROOT / "docs" / "reference" / "variables.md"
THE_PLACE = SOURCE / "variables.py"
OWN = re.compile(r"SYNCLINE_[A-Z_]+[A-Z]")
SET_BY_THE_LAB = {"SYNCLINE_LAB", "SYNCLINE_LAST_WORDS"}


def reads(tree: ast.AST) -> list[str]:
    """Say where ``os.environ`` or ``os.getenv`` is used other than to set a variable."""
    set_here = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    found = [
        f"line {node.lineno}: {node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "environb", "getenv"}
        and id(node) not in set_here
    ]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "os"]
    return found + [
        f"line {node.lineno}: import of {name.name}"
        for node in imports
        for name in node.names
        if name.name in {"environ", "environb", "getenv"}
    ]


def test_nobody_else_reads_the_environment() -> None:
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in sorted(SOURCE.rglob("*.py"))
        if path != THE_PLACE and (lines := reads(ast.parse(path.read_text())))
    }
    assert not found, f"use syncline.variables.process_variables(), and explain the variable in {PAGE.name}: {found}"


def test_the_search_finds_readers_and_not_writers() -> None:
    lines = ["import os", "from os import environ", "os.environ['A'] = '1'", "os.environ.get('B')", "os.getenv('C')"]
    found = reads(ast.parse("\n".join(lines)))
    assert sorted(line.partition(":")[0] for line in found) == ["line 2", "line 4", "line 5"]
    assert reads(ast.parse(THE_PLACE.read_text()))


def test_every_variable_of_ours_is_explained() -> None:
    named = {name for path in SOURCE.rglob("*.py") for name in OWN.findall(path.read_text())}
    explained = re.findall(r"^\| `(SYNCLINE_\w+)`", PAGE.read_text(), re.MULTILINE)
    assert named - SET_BY_THE_LAB == set(explained)
    assert len(set(explained)) == len(explained)
