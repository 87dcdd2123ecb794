"""A page's code as a story: its blocks in order, in one folder, as a reader would follow it.

Every block has a rule: one with a title becomes a file of that name; Python without a title is a program of its own,
YAML and INI without one a part of somebody else's file; ``bash`` is commands, line by line, each read by
:mod:`commands`. A block of another kind is an error. What happens beside reading them:

- ``syncline run`` of the page's own script on this machine: it runs on as many ranks;
- ``syncline plan``, ``advise``, ``cluster`` and ``doctor``: executed;
- the making of a secret: executed, and its file is private and long enough;
- what needs other hosts (``--host``, ``--join``, ``--path``, ``srun`` ...), the lab, benchmarks, ``make``:
  nothing, as other tests run these.

A titled program that no command runs is run on one rank in the end, so no Python is only read.
"""

from __future__ import annotations

import stat
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import commands
import yaml
from markdown_pages import Block

from rank_scripts import run_python, run_script
from syncline.topology import Topology

EXECUTED = {"plan", "advise", "cluster", "doctor"}
ELSEWHERE = {"host", "path", "listen", "join"}
DEADLINE_S = 180.0


class Story:
    """Follows one page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._not_run: dict[str, Block] = {}

    def follow(self, block: Block) -> None:
        """Do what a reader does with this block."""
        if block.title:
            assert block.language in {"python", "yaml"}, f"{block.place}: files are Python or YAML"
            (self.folder / block.title).write_text(block.text)
            if block.language == "python":
                self._not_run[block.title] = block
            else:
                Topology.load(self.folder / block.title)
        elif block.language == "python":
            path = self.folder / "untitled.py"
            path.write_text(block.text)
            self._run_python(path)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), f"{block.place}: a part of a file is keys and values"
        elif block.language == "ini":
            ConfigParser().read_string(block.text)
        else:
            assert block.language == "bash", f"{block.place}: no rule for a block of {block.language or 'no language'}"
            for line in block.text.splitlines():
                self.do(line)

    def end(self) -> None:
        """Run the programs that no command has run."""
        for title in list(self._not_run):
            self._run_ranks(1, [title])

    def do(self, line: str) -> None:
        """Execute or read one command."""
        if line.startswith(commands.SECRET):
            subprocess.run(["bash", "-c", line], cwd=self.folder, check=True, timeout=DEADLINE_S)
            secret = self.folder / "secret"
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600
            assert len(secret.read_bytes()) >= 32
            return
        words = commands.split(line)
        context = commands.read(words, self.folder)
        is_elsewhere = context is not None and any(context.params.get(name) for name in ELSEWHERE)
        if words[0] != "syncline" or is_elsewhere:
            return
        if words[1] in EXECUTED:
            self._run_python("-m", "syncline", *words[1:])
            for word in words:  # --model FILE.py:FUNCTION runs the file
                self._not_run.pop(word.partition(":")[0], None)
        elif words[1] == "run" and (self.folder / context.params["script"]).exists():
            self._run(context.params)

    def _run(self, given: dict[str, Any]) -> None:
        environment = {}
        ranks = given["num_ranks"]
        if given["topology"]:
            ranks = Topology.load(self.folder / given["topology"]).num_ranks
            environment["SYNCLINE_TOPOLOGY"] = given["topology"]
        if given["trace"]:
            environment["SYNCLINE_TRACE"] = str(given["trace"])  # a folder, in place of the launcher's one file
        self._run_ranks(ranks, [given["script"], *given["args"]], environment)

    def _run_ranks(self, num_ranks: int, call: list[str], environment: dict[str, str] | None = None) -> None:
        self._not_run.pop(call[0], None)
        results = run_script(Path(call[0]), num_ranks, *call[1:], extra=environment, folder=self.folder)
        failed = {rank: text for rank, (status, text) in enumerate(results) if status != 0}
        assert not failed, f"{' '.join(call)} on {num_ranks} ranks: {failed}"

    def _run_python(self, *words: object) -> None:
        done = run_python(*words, folder=self.folder)
        assert done.returncode == 0, f"python {' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}"
