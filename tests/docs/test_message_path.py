"""The table of the files between a gradient's hook and compiled code is what `benchmarks/calls.py` finds."""

import re
import subprocess
import sys

from markdown_pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
NUMBERS = ("hook to compiled code", "arrival to end")
TIMEOUT_S = 900.0


def paths_found():
    """Return the numbers of calls and files of each path, and the calls of each in order."""
    command = (sys.executable, str(ROOT / "benchmarks" / "calls.py"), "--paths")
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
    counts, calls, path = {}, {}, ""
    for line in text.partition("\n\nroom")[0].splitlines()[1:]:
        if line.startswith(" "):
            file, _, name = line.strip().partition(": ")
            calls[path].append((file, name.rpartition(".")[2]))
        else:
            path, num_calls, num_files, *_ = re.split(r"\s{2,}", line)
            counts[path], calls[path] = (int(num_calls), int(num_files)), []
    return counts, calls


def test_the_page_tells_the_path_as_it_is():
    counts, calls = paths_found()
    section = PAGE.partition("## From a hook to compiled code")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?\.py)` \| (.+?) \|", section, re.MULTILINE)
    told = [(file, name) for file, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert told == calls[NUMBERS[0]]
    numbers = [(int(a), int(b)) for a, b in re.findall(r"\b(\d+)(?: calls)? in (\d+)(?: files)?", section)]
    assert numbers == [counts[name] for name in NUMBERS]
