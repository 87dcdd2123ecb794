"""Every code block and every command of the pages below: executed, or read by its own program."""

from pathlib import Path

import commands
import pytest
from markdown_pages import ROOT, Block, blocks, inline_code
from story import Story

GUIDE = {
    f"docs/guide/{path.name}": path for path in sorted((ROOT / "docs/guide").glob("*.md")) if path.name != "README.md"
}
"""Each page may use the files that a reader of the others has."""
PAGES = GUIDE | {
    name: ROOT / name for name in ("README.md", "docs/frameworks.md", "docs/contributing.md", "docs/benchmarks.md")
}
LAUNCHERS = {f"docs/launchers/{path.name}": path for path in sorted((ROOT / "docs/launchers").glob("*.md"))}
"""They start the guide's first script; what they show of launchers is read, and what is Python runs."""
PROGRAMS = ("syncline ", "make ", "python ", "pip ")


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    write_files_of_guide(tmp_path)
    story = Story(tmp_path)
    found = blocks(PAGES[page])
    assert found or page in {"docs/guide/security.md", "docs/guide/combinations.md"}
    for block in found:
        try:
            story.follow(block)
        except BaseException as error:
            error.add_note(f"{block.place}: as a reader would follow it")
            raise
    story.end()


def write_files_of_guide(folder: Path) -> None:
    for page in GUIDE.values():
        for block in blocks(page):
            if block.title:
                (folder / block.title).write_text(block.text)


@pytest.mark.parametrize("page", LAUNCHERS)
def test_the_blocks_of_a_launchers_page_can_be_followed(page: str, tmp_path: Path) -> None:
    write_files_of_guide(tmp_path)
    story = Story(tmp_path)
    for block in blocks(LAUNCHERS[page]):
        try:
            story.follow(block)
        except BaseException as error:
            error.add_note(f"{block.place}: as a reader would follow it")
            raise
    story.end()


@pytest.mark.parametrize("page", [*PAGES, *LAUNCHERS])
def test_commands_in_sentences_exist(page: str, tmp_path: Path) -> None:
    write_files_of_guide(tmp_path)
    pages = PAGES | LAUNCHERS
    mentioned = [(place, text) for place, text in inline_code(pages[page]) if text.startswith(PROGRAMS)]
    assert mentioned or page.startswith("docs/")
    for place, text in mentioned:
        try:
            commands.check_names(commands.split(text), tmp_path)
        except (AssertionError, KeyError) as error:
            pytest.fail(f"{place}: `{text}`: {error}")


@pytest.mark.parametrize(
    "line",
    [
        "syncline fly",
        "syncline run --rank 4 train.py",
        "syncline run --ranks 4 missing.py",
        "syncline lab run nowhere -- syncline run --ranks 4 missing.py",
        "make coffee",
        "pip install 'syncline[coffee]'",
        "pip install dist/syncline-0.0.1-cp311-cp311-linux_x86_64.whl",
        "python benchmarks/incast.py --no-such-option",
        "curl example.org",
        ".venv/bin/python -m pytest tests/missing.py",
        "torchrun --nproc-per-node 4 missing.py",
        "SYNCLINE_SECRET_FILE=secret srun python missing.py",
        "kubectl apply -f examples/missing.yaml",
    ],
)
def test_a_wrong_command_is_noticed(line: str, tmp_path: Path) -> None:
    with pytest.raises(
        Exception,
        match=r"no rule|no command|(?i:no such option)|no option|no extra|no block|no target|not exist|no topol",
    ):
        Story(tmp_path).do(line)


@pytest.mark.parametrize("line", ["syncline fly", "syncline plan --colour", "syncline lab fly", "make coffee"])
def test_a_wrong_command_in_a_sentence_is_noticed(line: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        commands.check_names(commands.split(line))


def test_a_block_of_an_unknown_kind_and_a_failing_program_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no rule for a block of console"):
        Story(tmp_path).follow(Block(place="here", language="console", title="", text="$ ls\n"))
    story = Story(tmp_path)
    story.follow(Block(place="here", language="python", title="wrong.py", text="raise SystemExit(3)\n"))
    with pytest.raises(AssertionError, match=r"wrong\.py on 1 ranks"):
        story.end()
