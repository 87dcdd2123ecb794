"""Where a process is: the Python stacks of its threads, told from another thread, and what the kernel says of it.

Stacks are read by whichever thread has the interpreter, so a thread that waits in C code, or for a lock, is seen as
well. One that holds the interpreter is not, and nor is a process that is stopped: of these the kernel alone tells.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

from syncline.fabric.progress import BACKWARD, ELSEWHERE, FORWARD, Progress
from syncline.late_imports import without_collections

MOST_FRAMES, MOST_THREADS = 40, 24
_LIBRARIES = (str(Path(threading.__file__).parent), str(Path(__file__).parents[1]))
_STATES = {
    "T": "its process is stopped (SIGSTOP, or a suspended job)",
    "t": "its process is held by a debugger",
    "Z": "its process has ended",
    "X": "its process has ended",
    "D": "its process waits for a disk or another device",
}
_one_looks = threading.Lock()
T = TypeVar("T")


def process_state(pid: int) -> str:
    """Return what the kernel says of a process of this machine that does not just run or sleep; "" for nothing.

    >>> process_state(os.getpid())
    ''
    """
    try:
        return _STATES.get(_state_letter(Path(f"/proc/{pid}/stat")), "")
    except FileNotFoundError:
        return _STATES["X"] if Path("/proc/self/stat").exists() else ""
    except (OSError, IndexError):
        return ""


def is_on_device(thread: int | None) -> bool:
    """Whether the kernel says that a thread of this process waits for a disk or another device just now.

    >>> is_on_device(threading.get_ident())
    False
    """
    number = next((one.native_id for one in threading.enumerate() if one.ident == thread), None)
    try:
        return _state_letter(Path(f"/proc/self/task/{number}/stat")) == "D"
    except (OSError, IndexError):
        return False


def _state_letter(path: Path) -> str:
    return path.read_text().rpartition(")")[2].split()[0]


def process_namespace() -> str:
    """Name the numbering of processes here: who reads numbers elsewhere may see other processes by them; "" if unknown.

    >>> process_namespace() == process_namespace()
    True
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def thread_stacks() -> dict[int, list[str]]:
    """Return the Python stack of each other thread by its number, innermost call first.

    >>> len(thread_stacks()) == threading.active_count() - 1
    True
    """
    own = threading.get_ident()

    def stacks(frames: Mapping[int, FrameType]) -> dict[int, list[str]]:
        return {number: stack_of(frame) for number, frame in list(frames.items())[:MOST_THREADS] if number != own}

    return look_at_frames(stacks)


def look_at_frames(look: Callable[[Mapping[int, FrameType]], T]) -> T:
    """Return what ``look`` makes of the innermost frame of each thread, by its number, and of those around it.

    No garbage is collected meanwhile: Python 3.11 makes an object for a frame when it is asked for, and where a
    collection at that moment lets the frame's own thread go on, it returns, as a frame, what lies in its memory then.
    """
    with _one_looks, without_collections():
        return look(sys._current_frames())  # the documented way, private by its name alone


def stack_of(frame: FrameType | None) -> list[str]:
    """Return the calls from ``frame`` outwards: ``"read_batch (train.py:57)"``."""
    calls = islice(_outwards(frame), MOST_FRAMES)
    return [f"{one.f_code.co_qualname} ({one.f_code.co_filename}:{one.f_lineno})" for one in calls]


class Looks(NamedTuple):
    """How often a training thread was looked at outside of the phases, and what it was seen in."""

    num_looks: int = 0
    num_forward: int = 0
    """In a module of torch, or in one that is made of these;"""
    num_backward: int = 0
    """and in autograd."""
    num_on_device: int = 0
    """The kernel said that it waited for a disk or another device."""

    @property
    def num_apart(self) -> int:
        """How often it was in neither."""
        return self.num_looks - self.num_forward - self.num_backward


NO_LOOKS = Looks()


class ThreadWatch:
    """Looks at the training thread of this process several times a second, from another thread.

    >>> watch = ThreadWatch(Progress())
    >>> watch.look()
    >>> watch.looks.num_looks, watch.take_place()[1]
    (1, 1)
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._places: Counter[str] = Counter()
        self.looks = NO_LOOKS
        """Since the start."""

    def look(self) -> None:
        """Take note of where the thread is, if it is outside of the phases and waits for nobody."""
        progress = self._progress
        if progress.phase != ELSEWHERE or progress.is_waiting:
            return
        phase, place = training_place(progress.thread)
        seen = 1, phase == FORWARD, phase == BACKWARD, is_on_device(progress.thread)
        self.looks = Looks(*(before + now for before, now in zip(self.looks, seen, strict=True)))
        if place and (not phase or progress.phase_s[FORWARD]):
            self._places[place] += 1

    def take_place(self) -> tuple[str, int]:
        """Return where it was seen most often since this was asked last, and how often.

        Where nobody says when a forward pass begins, what is seen to compute is left out.
        """
        place, num_seen = max(self._places.items(), key=lambda one: one[1], default=("", 0))
        self._places.clear()
        return place, num_seen


def training_place(thread: int | None) -> tuple[str, str]:
    """Say in which phase a thread is seen, if in any, and where.

    That is in a data loader, in the innermost call of the program's own code, and what that calls.

    >>> training_place(None)
    ('', '')
    """
    stack = look_at_frames(lambda frames: list(_outwards(frames.get(thread or 0))))
    return (_phase_of(stack), _place_of(stack)) if stack else ("", "")


def _phase_of(stack: Sequence[FrameType]) -> str:
    paths = [one.f_code.co_filename for one in stack]
    if any("torch/autograd/" in path for path in paths):
        return BACKWARD
    return FORWARD if any("torch/nn/" in path for path in paths) else ""


def _place_of(stack: Sequence[FrameType]) -> str:
    own = next((one for one in stack if not _is_of_library(one.f_code.co_filename)), stack[0])
    place = f"in {own.f_code.co_qualname} ({Path(own.f_code.co_filename).name}:{own.f_lineno})"
    if any(one.f_code.co_filename.endswith("torch/utils/data/dataloader.py") for one in stack[: stack.index(own)]):
        return f"waiting for a data loader {place}"
    if own is stack[0]:
        return place
    inner = stack[0].f_code
    return f"{place}, which calls {Path(inner.co_filename).stem}.{inner.co_qualname}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith("<frozen importlib"):
            yield frame
        frame = frame.f_back


@cache
def _is_of_library(path: str) -> bool:
    return path.startswith("<") or "site-packages" in path or path.startswith(_LIBRARIES)
