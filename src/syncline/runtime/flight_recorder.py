"""The last calls of a rank, always in memory, in the form of torch's flight recorder, which ``torchfrtrace`` reads.

A record is some fields and no memory of the call. The calls of each stream are a group of that program: in a stream all
ranks make the same calls in the same order, and between streams they need not. Names are gloo's, as the program knows
no others, and sizes are numbers of elements.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from syncline.runtime.call import Call, CollectiveCall

READS_ALL_THREADS = sys.version_info >= (3, 11, 7)
"""Python 3.11.2 crashes once in a while when a signal asks for the stacks of all threads; 3.11.7 was not seen to."""
MOST_CALLS = 2000
VERSION = "2.10"
"""Of torch's form."""
_NAMES = {"all_gather": "all_gather_v", "reduce_scatter": "reduce_scatter_v"}
"""Those of torch whose parts may differ: of others its program asks that the buffers of a rank do, as ours do not."""


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """One call; it is changed once, when the call ends."""

    number: int
    members: tuple[int, ...]
    stream: int
    place: int
    """Its running number in the stream."""
    kind: str
    what: str
    num_elements: int
    elements: str
    timeout_s: float
    began_ns: int
    ended_ns: int = 0
    has_failed: bool = False

    def end(self, error: BaseException | None) -> None:
        """Take note that the call is over."""
        self.ended_ns, self.has_failed = time.time_ns(), error is not None

    def encode(self) -> dict[str, Any]:
        """Return it as torch has it."""
        sizes = [[self.num_elements]] if self.num_elements else [[]]
        is_over = self.ended_ns and not self.has_failed
        return {
            "record_id": self.number,
            "pg_id": self.stream,
            "process_group": (group_name(self.members, self.stream), "undefined"),
            "collective_seq_id": self.place,
            "p2p_seq_id": 0,
            "op_id": self.place,
            "is_p2p": False,
            "profiling_name": f"gloo:{_NAMES.get(self.kind, self.kind)}",
            "syncline_call": self.what,
            "input_sizes": sizes,
            "input_dtypes": [self.elements],
            "output_sizes": sizes,
            "output_dtypes": [self.elements],
            "time_created_ns": self.began_ns,
            "time_discovered_started_ns": self.began_ns,
            "time_discovered_completed_ns": self.ended_ns if is_over else None,
            "duration_ms": (self.ended_ns - self.began_ns) / 1e6 if is_over else None,
            "state": "completed" if is_over else "started",
            "retired": bool(self.ended_ns),
            "timeout_ms": int(1000 * self.timeout_s),
            "frames": [],
        }


def group_name(members: Sequence[int], stream: int) -> str:
    """Name the calls of one stream, alike on all of its ranks."""
    return f"stream {stream} of {len(members)} ranks from {members[0]}"


class FlightRecorder:
    """Keeps the last calls of one rank, of all of its communicators; any thread may add."""

    def __init__(self) -> None:
        self._records: deque[CallRecord] = deque(maxlen=MOST_CALLS)
        self._places: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._num_calls = 0
        self._lock = threading.RLock()  # a signal may come while its thread takes note of a call

    def note(self, call: Call, members: tuple[int, ...]) -> CallRecord:
        """Take note of a call that begins on a communicator of these ranks, by the job's numbers."""
        num_elements, elements = 0, ""
        if isinstance(call, CollectiveCall):
            num_elements, elements = call.layout.num_elements, call.elements or call.reduction.dtype
        began_ns = time.time_ns()
        with self._lock:
            key = members, call.stream
            self._places[key] += 1
            record = CallRecord(
                number=self._num_calls,
                members=members,
                stream=call.stream,
                place=self._places[key],
                kind=call.kind,
                what=call.what,
                num_elements=num_elements,
                elements=elements,
                timeout_s=call.timeout_s,
                began_ns=began_ns,
            )
            self._num_calls += 1
            self._records.append(record)
        return record

    def last_calls(self) -> list[dict[str, Any]]:
        """Return the last call of each stream, and of those that are not over the oldest: where its ranks meet."""
        with self._lock:
            records = tuple(self._records)
        now_ns = time.time_ns()
        last: dict[tuple[tuple[int, ...], int], CallRecord] = {}
        for record in records:
            key = record.members, record.stream
            if key not in last or last[key].ended_ns:
                last[key] = record
        return [
            {
                "members": list(record.members),
                "stream": record.stream,
                "place": record.place,
                "what": record.what,
                "is_over": bool(record.ended_ns),
                "seconds": (now_ns - record.began_ns) / 1e9,
            }
            for record in last.values()
        ]

    def dump(self) -> dict[str, Any]:
        """Return all of it as torch's program unpickles it."""
        with self._lock:
            records = tuple(self._records)
        groups = {group_name(record.members, record.stream): record.members for record in records}
        return {
            "version": VERSION,
            "pg_config": {
                name: {"name": name, "desc": "undefined", "ranks": str(list(ranks))} for name, ranks in groups.items()
            },
            "pg_status": {},
            "entries": [record.encode() for record in records],
        }

    def write(self, folder: Path, rank: int) -> None:
        """Write it to ``folder`` as ``flight_rank_N``; what cannot be written is left."""
        path = folder / f"flight_rank_{rank}"
        with contextlib.suppress(OSError):  # what is looked at must not end for it
            folder.mkdir(parents=True, exist_ok=True)
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_bytes(pickle.dumps(self.dump()))
            whole.replace(path)

    def write_in_time(self, folder: Path, rank: int) -> None:
        """Write it whenever this process gets SIGUSR1, with the stacks of its threads to standard error.

        A signal for which the program has an action of its own is left to it, and so are threads beside the main one.
        """
        _WRITTEN[self] = (folder, rank)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, _write_all)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be no file
                faulthandler.register(signal.SIGUSR1, all_threads=READS_ALL_THREADS, chain=True)


_WRITTEN: WeakKeyDictionary[FlightRecorder, tuple[Path, int]] = WeakKeyDictionary()
"""What SIGUSR1 writes, and where: also the calls of a job that follows another in this process."""


def _write_all(*_: object) -> None:
    for recorder, (folder, rank) in list(_WRITTEN.items()):
        recorder.write(folder, rank)
