"""Puts the traces of several ranks into one file, on one time line.

Ranks that booted together share the monotonic clock, so their times are compared as they are; between machines only
the wall clocks can be compared, and the merged trace is as exact as these agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from syncline.errors import ConfigurationError


def merge_traces(paths: Iterable[str | Path], out: str | Path) -> int:
    """Write the events of all ``paths`` to ``out`` (Chrome trace JSON), times from zero; returns how many.

    A file that ends in the middle of a line, because its rank was killed, gives what it has.

    >>> traces = [Trace(rank=rank, path=f"trace-{rank}.json") for rank in range(2)]
    >>> for trace in traces:
    ...     trace.instant("here", "compute"); trace.close()
    >>> merge_traces(["trace-0.json", "trace-1.json"], "trace.json")
    2
    """
    moved = gather_events(paths)
    with Path(out).open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": moved, "displayTimeUnit": "ms"}, file)
    return sum("ts" in event for event in moved)


def gather_events(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Return the events of all ``paths`` as the Chrome format has them, times (in us) from zero.

    Raises :class:`ConfigurationError` for what is no trace.

    >>> gather_events([])
    []
    """
    return align_events(_read(Path(path)) for path in paths)


def align_events(ranks: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the events of several ranks, each as its trace has them, with times (in us) from zero.

    >>> align_events([])
    []
    """
    anchors_ns: dict[str, int] = {}
    moved = [event for events in ranks for event in _on_wall_clock(events, anchors_ns)]
    first_us = min((event["ts"] for event in moved if "ts" in event), default=0.0)
    for event in moved:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first_us, 3)
    return moved


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"A trace must be a readable file; '{path}' is not: {error}") from error
    if not lines or lines[0] != "[":
        raise ConfigurationError(f"'{path}' is not a trace that syncline wrote; its first line must be '['")
    events = [_event(line) for line in lines[1:]]
    return [event for event in events if event is not None]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line.rstrip(","))
    except ValueError:  # the closing bracket, or a line that was cut when the rank was killed
        return None
    return event if isinstance(event, dict) else None


def _on_wall_clock(events: list[dict[str, Any]], anchors_ns: dict[str, int]) -> list[dict[str, Any]]:
    """Move monotonic times to wall time; the first anchor of a boot serves all its ranks."""
    clocks = [event["args"] for event in events if event["name"] == "syncline_clock"]
    clock: dict[str, Any] = clocks[0] if clocks else {"monotonic_ns": 0, "wall_ns": 0, "boot": ""}
    own_ns = clock["wall_ns"] - clock["monotonic_ns"]
    offset_ns = anchors_ns.setdefault(clock["boot"], own_ns) if clock["boot"] else own_ns
    return [{**event, "ts": event["ts"] + offset_ns / 1000} if "ts" in event else event for event in events]
