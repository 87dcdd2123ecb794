"""From a trace to a report's file."""

from __future__ import annotations

from pathlib import Path

from syncline.errors import ConfigurationError
from syncline.report.explanation import explain
from syncline.report.job_trace import read_job_trace
from syncline.report.page import build_page


def write_report(trace: Path, target: Path, *, title: str) -> None:
    """Read ``trace`` and write what it tells to ``target``; :class:`ConfigurationError` where either cannot be.

    >>> trace = syncline.observe.Trace(path="trace-0.json"); trace.close()
    >>> write_report(Path("trace-0.json"), Path("run.html"), title="train.py")
    """
    page = build_page(explain(read_job_trace(trace)), title=title)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"a report must be a file in a folder that can be written to; '{target}' is not: {error.strerror}"
        ) from error
