"""Private names of PyTorch stand in ``updates.private_torch`` alone, each with its reason."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "syncline"
THE_PLACE = SOURCE / "updates" / "private_torch.py"
PRIVATE = re.compile(r"_(?!_)\w+")
OF_TORCH = re.compile(
    r"_opt_called|_orig_mod|_compiled_call_impl|_execution_engine|_version|_amp_\w+|_optimizer_\w+_hooks"
    r"|_(forward|backward|state_dict|load_state_dict)\w*_hooks|_post_accumulate_grad_hooks|_check_input_dim"
    r"|_check_non_zero_input_channels|_parameters|_buffers|_modules|_opt_called|_base|_grad"
)
"""Names that torch's own objects carry, and ours do not; an attribute of ``self`` is ours."""


def root_of(node: ast.AST) -> str:
    """Return the name with which a chain of attributes begins."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"line {node.lineno}: {part}" for part in parts if PRIVATE.fullmatch(part)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
            found += [f"line {node.lineno}: {name}" for name in names if "._" in name]
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            root = root_of(node)
            if root in {"torch", "nn", "dist"} or (root != "self" and OF_TORCH.fullmatch(node.attr)):
                found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OF_TORCH.fullmatch(node.value):
            found.append(f"line {node.lineno}: {node.value!r}")
    return found


def test_no_other_file_names_one() -> None:
    found = {
        str(path.relative_to(SOURCE)): uses
        for path in sorted(SOURCE.rglob("*.py"))
        if path != THE_PLACE and (uses := private_uses(ast.parse(path.read_text())))
    }
    assert not found, f"name them in {THE_PLACE.name}, with the reason: {found}"


def test_the_search_finds_them() -> None:
    code = "import torch\nfrom torch.utils import _pytree\nx._opt_called\ntorch._C.f()\ngetattr(m, '_orig_mod')\n"
    assert len(private_uses(ast.parse(code))) == 4
    assert private_uses(ast.parse(THE_PLACE.read_text()))


def test_each_function_there_says_why() -> None:
    """In more than its first line, which says what it does."""
    functions = [node for node in ast.parse(THE_PLACE.read_text()).body if isinstance(node, ast.FunctionDef)]
    short = [one.name for one in functions if "\n\n" not in (ast.get_docstring(one) or "")]
    assert [name for name in short if name != "note_step"] == []
