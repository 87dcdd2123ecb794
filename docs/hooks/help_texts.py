"""Fills the page of the command line: ``<!-- every command -->`` becomes what each command's ``--help`` prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MARK = "<!-- every command -->"
COMMAND = re.compile(r"^  ([a-z]+) +\S", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark of one page."""
    return markdown.replace(MARK, "\n\n".join(_sections())) if MARK in markdown else markdown


def _sections() -> list[str]:
    front = _help([])
    sections = [_block(front)]
    with ThreadPoolExecutor() as pool:
        names = _commands(front)
        for name, text in zip(names, pool.map(_help, ([name] for name in names)), strict=True):
            sections += [f"## {name}", _block(text)]
            for part in _commands(text):
                sections += [f"### {name} {part}", _block(_help([name, part]))]
    return sections


def _commands(text: str) -> list[str]:
    return COMMAND.findall(text.partition("\nCommands:\n")[2])


def _block(text: str) -> str:
    return f"```text\n{text}```"


def _help(command: list[str]) -> str:
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    call = [sys.executable, "-m", "syncline", *command, "--help"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.replace("Usage: python -m syncline", "Usage: syncline")
