"""Size promises: files of at most 800 lines, C++ too; functions of 50 (docstrings apart), nesting of at most 3."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "syncline"
TESTS = Path(__file__).parents[1]
FUZZ = TESTS / "fabric" / "native"
FILES = sorted(SOURCE.rglob("*.py"))
NATIVE_FILES = sorted(path for folder in (SOURCE, FUZZ) for path in folder.rglob("*.[ch]pp"))
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 50
MAX_NESTING = 3
ROOMS_WITHOUT_A_NOUN = {"utils", "util", "common", "core", "helpers", "misc"}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)


def nesting(node: ast.AST, depth: int = 0) -> int:
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
            deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A docstring has an example and all that users ask; it is not what makes a function hard to follow."""
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(node) else 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_file_keeps_the_size_promises(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path} does not say in its first lines what it is for"
    assert text.count("\n") <= MAX_FILE_LINES
    assert not ROOMS_WITHOUT_A_NOUN & {path.stem, *path.relative_to(SOURCE).parts}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {lines} lines"
            assert nesting(node) <= MAX_NESTING, f"{path}:{node.lineno} {node.name} nests {nesting(node)} deep"


def longest_function(text: str) -> tuple[int, int]:
    """Return the lines of the longest function, and where it begins; the formatter puts its braces where they are."""
    longest = (0, 0)
    begun: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        indent = len(line) - len(line.lstrip())
        if re.search(r"\)( const| noexcept| override)* \{$", line):
            begun[indent] = number
        elif line.strip() == "}" and indent in begun:
            longest = max(longest, (number - begun[indent] + 1, begun.pop(indent)))
    return longest


@pytest.mark.parametrize("path", NATIVE_FILES, ids=lambda path: path.name)
def test_native_file_keeps_the_size_promises(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("// "), f"{path} does not say in its first lines what it is for"
    assert text.count("\n") <= MAX_FILE_LINES
    assert path.stem not in ROOMS_WITHOUT_A_NOUN
    lines, begun = longest_function(text)
    assert lines <= MAX_FUNCTION_LINES, f"{path}:{begun} a function has {lines} lines"


def test_native_files_are_found() -> None:
    assert {"transport.cpp", "receiver.hpp", "fuzz_frames.cpp"} <= {path.name for path in NATIVE_FILES}


def test_each_test_module_has_a_name_of_its_own():
    """Folders of tests are no packages: of two that are called alike pytest collects one, and fails at the other."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
