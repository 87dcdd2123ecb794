"""Puts pages of the repository that lie outside ``docs/`` on the site, and turns links between them into the site's.

In the repository every link is relative to its file, so that it works there too. On the site ``docs/backend.md`` is
``backend.md``, while ``CHANGELOG.md``, the examples' page and the records of benchmarks keep their places. A link to a
folder leads to its page. A link to anything that is not on the site, such as a source file, becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RECORDS = "benchmarks/records/*/**/"
OUTSIDE = ("CHANGELOG.md", "examples/README.md", RECORDS + "*.md", RECORDS + "*.txt", RECORDS + "*.png")
LINK = re.compile(r"(?P<bang>!?)\[(?P<text>[^\]\[]*)\]\((?P<target>[^()\s]+)\)")
ROOT = Path(__file__).parents[2]
FOLDER_PAGES = ("", "/README.md", "/table.txt")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside ``docs/``, each under its path in the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Rewrite the links of one page, but none inside code."""
    is_inside_docs = page.file.generated_by is None
    source = posixpath.join("docs", page.file.src_uri) if is_inside_docs else page.file.src_uri
    lines, in_code = [], False
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        lines.append(line if in_code else LINK.sub(lambda match: _on_site(match, source, page, files), line))
    return "\n".join(lines)


def _on_site(match: re.Match[str], source: str, page: Page, files: Files) -> str:
    path, hash_sign, anchor = match["target"].partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return match[0]
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    found = _find(wanted.removeprefix("docs/"), files)
    if found is None:
        # A missing page is left as it is, so that the strict build refuses it; a missing file would be one in the tree.
        return match["text"] if (ROOT / wanted).exists() else match[0]
    target = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
    return f"{match['bang']}[{match['text']}]({target}{hash_sign}{anchor})"


def _find(wanted: str, files: Files) -> str | None:
    uris = (f"{wanted}{suffix}" for suffix in FOLDER_PAGES)
    return next((uri for uri in uris if files.get_file_from_path(uri) is not None), None)
