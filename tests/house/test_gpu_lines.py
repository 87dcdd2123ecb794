"""docs/gpu.md names each function of the library that has lines for a GPU, and what runs in its place without one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "syncline"
PAGE = ROOT / "docs" / "gpu.md"
WORDS = re.compile(r"(\b|_)cuda\b|\baccelerator\b|\bpin_memory\b|nccl|\bnvml", re.IGNORECASE)
CLASSES = re.compile(r"::(Cuda|Nccl|Gpu)\w*\.")
"""Those that are for a GPU as a whole."""
NOT_OF_A_GPU = {"_make_nccl_premul_sum"}
"""PyTorch's name for something that every backend has."""


def is_for_a_gpu(node: ast.AST) -> bool:
    """Whether a node of code, which no docstring and no annotation is, is for a GPU."""
    if isinstance(node, ast.Attribute):
        return bool(WORDS.search(node.attr)) and node.attr not in NOT_OF_A_GPU
    if isinstance(node, ast.Name):
        return bool(WORDS.search(node.id))
    if isinstance(node, ast.keyword):
        return bool(node.arg and WORDS.search(node.arg))
    return isinstance(node, ast.Constant) and node.value in ("cuda", "nccl")


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs of a node: no annotations, and no functions and classes within it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield child
                yield from code_of(child)


def functions_of(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    yield name, node
    for child in ast.walk(node) if isinstance(node, ast.Module) else ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        if is_named and (not isinstance(node, ast.Module) or child in node.body):
            yield from functions_of(child, f"{name}.{child.name}" if "::" in name else f"{name}::{child.name}")


def functions_for_a_gpu() -> set[str]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for name, node in functions_of(ast.parse(path.read_text()), path.relative_to(SOURCE).as_posix()):
            if any(map(is_for_a_gpu, code_of(node))):
                whole = CLASSES.search(name)
                found.add(name[: whole.end() - 1] if whole else name)
    return found


def rows() -> list[tuple[str, str]]:
    """Return the function and the last column of each row of the page's table."""
    found = re.findall(r"^\| `([\w/]+\.py(?:::[\w.]+)?)` \|.*\| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(found) > 10
    return found


def test_the_page_names_each_function_with_lines_for_a_gpu_and_no_other() -> None:
    named = [name for name, _ in rows()]
    assert len(named) == len(set(named))
    assert set(named) == functions_for_a_gpu()


def test_what_runs_in_its_place_is_there() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name, place in rows():
        for test in re.findall(r"`(test_\w+)`", place):
            assert f"def {test}(" in tests, f"{name}: there is no {test}"
        assert "`test_" in place or place.startswith("nothing"), f"{name}: what runs it, or nothing does"
