"""Fills the page of the command line: ``<!-- help: lab run -->`` becomes what ``syncline lab run --help`` prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MARK = re.compile(r"<!-- help:(?P<command>[a-z ]*)-->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of one page."""
    commands = [match["command"].split() for match in MARK.finditer(markdown)]
    if not commands:
        return markdown
    with ThreadPoolExecutor() as pool:
        texts = iter(list(pool.map(_help, commands)))
    return MARK.sub(lambda _: f"```text\n{next(texts)}```", markdown)


def _help(command: list[str]) -> str:
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    call = [sys.executable, "-m", "syncline.cli.main", *command, "--help"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.replace("Usage: python -m syncline.cli.main", "Usage: syncline")
