"""What happened and when: spans, instants and counters of one rank, written so that Perfetto opens them.

Recording is an append to a list, because it happens between two messages; encoding waits until some thousand events
are together, or somebody flushes, as a communicator does every second. With a path, events go to the file as they are
encoded, so that a process that is killed loses no more than the last second: the JSON array form of the Chrome trace
format needs no closing bracket. Memory and file are bounded
by ``max_events``; what comes after is dropped and counted.

Times are ``time.monotonic_ns``, which all processes of a host share. An anchor ties them to the wall clock, so that
:func:`syncline.observe.merge_traces` can lay ranks of different hosts side by side.

Each category is a row, and spans that overlap get rows of their own: Perfetto draws the spans of one row as a stack of
calls, so two that overlap without nesting would be drawn wrong. Collectives do overlap: ``communication`` therefore has
as many rows as there were collectives at once, and so have the pushes and pulls of the buckets of an overlapped update.

The traces of several ranks are put into one file, on one time line. Ranks of one boot and one time namespace share
the monotonic clock, so their times are compared as they are; between others only the wall clocks can be compared, and
the merged trace is as exact as these agree.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from syncline.errors import ConfigurationError

FIRST_ROWS = ("step", "compute", "wait", "update", "call", "communication")
"""In the order in which they are shown; other categories follow as they come."""

_LANED = frozenset({"call", "communication", "from device", "to device", "push", "pull"})
FLUSH_EVENTS = 4096
"""Events that are encoded together at the latest; that many take some 10 ms."""
_log = logging.getLogger(__name__)
_CLOCK = "syncline_clock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")
_Event = tuple[str, str, str, int, int, dict[str, Any]]
"""Phase letter of the format, name, category, start, end (both in ns), arguments."""


class _Rows:
    """Gives each event of one rank the number of its row; call with the events in chunks, in any order within one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[tuple[str, int], int] = {}
        self._lane_ends_ns: dict[str, list[int]] = {}
        self._new: list[dict[str, Any]] = []

    def place(self, events: Sequence[_Event]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Metadata of rows that are new, and the events in the Chrome format, ordered by their start."""
        placed = [self._place(*event) for event in sorted(events, key=lambda event: (event[3], -event[4]))]
        new, self._new = self._new, []
        return new, placed

    def _place(
        self, phase: str, name: str, category: str, start_ns: int, end_ns: int, args: dict[str, Any]
    ) -> dict[str, Any]:
        event: dict[str, Any] = {"ph": phase, "name": name, "pid": self._rank, "ts": start_ns / 1000}
        if category:
            event["cat"] = category
            event["tid"] = self._row(category, self._lane(phase, category, start_ns, end_ns))
        if phase == "X":
            event["dur"] = (end_ns - start_ns) / 1000
        elif phase == "i":
            event["s"] = "t"
        if args:
            event["args"] = args
        return event

    def _lane(self, phase: str, category: str, start_ns: int, end_ns: int) -> int:
        """Find the first lane that is free; spans come in chunks, so an older one may open a lane late."""
        if phase != "X" or category not in _LANED:
            return 0
        ends_ns = self._lane_ends_ns.setdefault(category, [])
        for lane, lane_end_ns in enumerate(ends_ns):
            if lane_end_ns <= start_ns:
                ends_ns[lane] = end_ns
                return lane
        ends_ns.append(end_ns)
        return len(ends_ns) - 1

    def _row(self, category: str, lane: int) -> int:
        if (known := self._numbers.get((category, lane))) is not None:
            return known
        order = FIRST_ROWS.index(category) if category in FIRST_ROWS else len(FIRST_ROWS)
        number = len(self._numbers) + 1
        self._numbers[category, lane] = number
        name = category if lane == 0 else f"{category} {lane + 1}"
        for key, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": 100 * order + lane})):
            self._new.append({"ph": "M", "name": key, "pid": self._rank, "tid": number, "args": args})
        return number


class Trace:
    """Records the events of one rank; any thread may call any method.

    ``path``: where events are written as the run goes on; without one a trace is off but while somebody hears, and
    every call returns at once. ``max_events``: how many are kept at most; the rest is counted in :attr:`num_dropped`.

    >>> trace = Trace(rank=0, path="trace.json")
    >>> start_ns = trace.now_ns()
    >>> trace.span("load", "compute", start_ns, trace.now_ns(), batch=3); trace.close()
    """

    def __init__(
        self, *, rank: int = 0, host: str = "", path: str | Path | None = None, max_events: int = 2_000_000
    ) -> None:
        self.rank = rank
        self.host = host
        self.num_dropped = 0
        self._events: list[_Event] = []
        self._num_left = max_events
        self._rows = _Rows(rank)
        self._lock = threading.Lock()
        self._anchor = (time.monotonic_ns(), time.time_ns())
        self._path = Path(path).absolute() if path is not None else None
        self._process = os.getpid()
        self._heard: deque[_Event] | None = None
        self._heard_ns = 0
        if self._path is not None:
            self._begin(self._path)
            atexit.register(self.close)

    def _begin(self, path: Path) -> None:
        try:
            path.write_text("[\n" + _lines(self._about_rank(self.rank, self.host)), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"A trace must be a file that can be written; '{path}' is not: {error.strerror}; name another (trace=, "
                "or SYNCLINE_TRACE)"
            ) from error

    @property
    def enabled(self) -> bool:
        """Whether anybody reads what is recorded; who would compute it for that alone asks first."""
        return self._path is not None or self._heard is not None

    @staticmethod
    def now_ns() -> int:
        """Read the clock of the trace: monotonic, and the same in all processes of a host."""
        return time.monotonic_ns()

    def span(self, name: str, category: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Something that took from ``start_ns`` to ``end_ns``; ``category`` is its row."""
        self._record("X", name, category, args, (start_ns, end_ns))

    def instant(self, name: str, category: str, **args: Any) -> None:
        """Something that happened now."""
        self._record("i", name, category, args)

    def counter(self, name: str, value: float | Mapping[str, float]) -> None:
        """Record a quantity that has ``value`` from now on, or several by their names."""
        self._record("C", name, "", dict(value) if isinstance(value, Mapping) else {"value": value})

    def about(self, kind: str, **facts: Any) -> None:
        """Record what readers of the trace need to know of the job, and viewers leave out; the last one counts."""
        self._record("M", f"syncline_{kind}", "", facts)

    def flush(self) -> None:
        """Write what was recorded to the file, if there is one."""
        with self._lock:
            self._write_out()

    def begin_hearing(self, max_events: int) -> None:
        """Keep the last events from now on, beside what happens to them anyway, until :meth:`end_hearing`."""
        self._heard_ns, self._heard = time.monotonic_ns(), deque(maxlen=max_events)

    def end_hearing(self, *, rank: int, host: str) -> list[dict[str, Any]]:
        """Return what was heard as a trace file of that rank has it, without a step that had begun before.

        >>> trace = Trace()
        >>> trace.begin_hearing(100); trace.instant("here", "compute"); trace.enabled
        True
        >>> trace.end_hearing(rank=3, host="b1")[-1]["name"], trace.enabled
        ('here', False)
        """
        heard, self._heard = self._heard or (), None
        whole = [event for event in tuple(heard) if event[2] != "step" or event[3] >= self._heard_ns]
        new_rows, encoded = _Rows(rank).place(whole)
        return [*self._about_rank(rank, host), *new_rows, *encoded]

    def close(self) -> None:
        """Write what is left and complete the file; what is recorded later is dropped.

        Nothing happens in a forked child, where the interpreter's end calls this too: the file is its parent's.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._write_out()
            if self._path is not None:
                self._append(self._tail())
                self._path = None
        with contextlib.suppress(Exception):  # the interpreter may be ending already
            atexit.unregister(self.close)

    def _record(
        self, phase: str, name: str, category: str, args: dict[str, Any], span_ns: tuple[int, int] | None = None
    ) -> None:
        if not self.enabled:
            return
        start_ns, end_ns = span_ns or (time.monotonic_ns(),) * 2
        event = (phase, name, category, start_ns, end_ns, args)
        if (heard := self._heard) is not None:
            heard.append(event)
        if self._path is None:
            return
        if self._num_left <= 0:
            self.num_dropped += 1
            return
        self._num_left -= 1
        self._events.append(event)
        if len(self._events) >= FLUSH_EVENTS:
            self.flush()

    def _write_out(self) -> None:
        if self._path is None:
            return
        events, self._events = self._events, []
        self._append(self._encoded(events))

    def _append(self, text: str) -> None:
        assert self._path is not None
        if os.getpid() != self._process:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # a full disk must not end the run that is looked at
            _log.warning("rank %d: the trace %s ends here: %s", self.rank, self._path, error.strerror)
            self._path = None

    def _about_rank(self, rank: int, host: str) -> list[dict[str, Any]]:
        monotonic_ns, wall_ns = self._anchor
        return [
            _metadata(rank, "process_name", name=f"rank {rank}" + (f" (host {host})" if host else "")),
            _metadata(rank, "process_sort_index", sort_index=rank),
            _metadata(rank, _CLOCK, monotonic_ns=monotonic_ns, wall_ns=wall_ns, boot=_boot_id()),
        ]

    def _tail(self) -> str:
        """End the array with an event that has no comma behind it, so that the closed file is strict JSON."""
        return json.dumps(_metadata(self.rank, "syncline_dropped", num_events=self.num_dropped)) + "\n]\n"

    def _encoded(self, events: list[_Event]) -> str:
        new_rows, encoded = self._rows.place(events)
        return _lines(new_rows) + _lines(encoded)


def _metadata(rank: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": 0, "args": args}


def _lines(events: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(event, default=str) + ",\n" for event in events)


def _boot_id() -> str:
    """Name the boot and time namespace: who shares both shares its monotonic clock, whatever the hosts are called."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # Linux before 5.6 has none
        boot += f" {_TIME_NAMESPACE.readlink()}"
    return boot


def merge_traces(paths: Iterable[str | Path], out: str | Path) -> int:
    """Write the events of all ``paths`` to ``out`` (Chrome trace JSON), times from zero; returns how many.

    A file that was written so, on another host, may be one of them.

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
    zero = {"monotonic_ns": 0, "wall_ns": round(first_us * 1000), "boot": ""}
    for event in moved:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first_us, 3)
    return [{**event, "args": zero} if event["name"] == _CLOCK else event for event in moved]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"A trace must be a readable file; '{path}' is not: {error}") from error
    if text.startswith("{"):  # of several ranks
        with contextlib.suppress(ValueError, KeyError):
            return list(json.loads(text)["traceEvents"])
    if not text.startswith("[\n"):
        raise ConfigurationError(f"'{path}' is not a trace that syncline wrote: neither one rank's nor a whole one")
    events = [_event(line) for line in text.splitlines()[1:]]
    return [event for event in events if event is not None]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line.rstrip(","))
    except ValueError:  # the closing bracket, or a line that was cut when the rank was killed
        return None
    return event if isinstance(event, dict) else None


def _on_wall_clock(events: list[dict[str, Any]], anchors_ns: dict[str, int]) -> list[dict[str, Any]]:
    """Move monotonic times to wall time; the first anchor of a boot serves all its ranks."""
    clocks = [event["args"] for event in events if event["name"] == _CLOCK]
    clock: dict[str, Any] = clocks[0] if clocks else {"monotonic_ns": 0, "wall_ns": 0, "boot": ""}
    own_ns = clock["wall_ns"] - clock["monotonic_ns"]
    offset_ns = anchors_ns.setdefault(clock["boot"], own_ns) if clock["boot"] else own_ns
    return [{**event, "ts": event["ts"] + offset_ns / 1000} if "ts" in event else event for event in events]
