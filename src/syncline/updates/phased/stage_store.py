"""The stage store: takes stages from storage and puts them back, on a thread of its own, and counts what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from syncline.observe import Trace
from syncline.updates.phased.buffer_pool import Ledger
from syncline.updates.phased.stage import Stage
from syncline.updates.phased.state_file import ShardState, read_state
from syncline.updates.phased.storage import Storage
from syncline.updates.worker_thread import WorkerThread


def parameters_name(number: int) -> str:
    """Return what the parameters of a stage are stored as."""
    return f"stage-{number:04d}.parameters"


def state_name(number: int) -> str:
    """Return what a rank's optimizer state of a stage is stored as."""
    return f"stage-{number:04d}.state"


class StageStore:
    """Reads and writes the stages of one rank. ``then`` runs on the storage thread; failures go to ``on_failure``."""

    def __init__(
        self,
        storage: Storage,
        stages: Mapping[int, Stage],
        *,
        trace: Trace,
        name: str,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.storage = storage
        self.state_ledger = Ledger()
        self.measurement_s = self.writing_s = 0.0
        self.read_bytes = self.written_bytes = self.num_loads = 0
        self._stages = stages
        self._states: dict[int, ShardState] = {}
        self._counted_bytes: dict[int, int] = {}
        """State that was read, and is in memory until its stage is stored."""
        self._with_state: set[int] = set()
        """Stages that have a file of state."""
        self._trace = trace
        self._thread = WorkerThread(name, on_failure=on_failure)

    def load(self, number: int, then: Callable[[], None]) -> None:
        """Read the parameters of a stage into the room that it was placed in."""
        tensors = self._stages[number].tensors()

        def job() -> None:
            start_ns = time.monotonic_ns()
            self.read_bytes += self.storage.read_into(parameters_name(number), tensors)
            self.num_loads += 1
            self._note(f"load of stage {number}", start_ns, is_reading=True)
            then()

        self._thread.submit(0, (), job)

    def load_state(self, number: int, then: Callable[[], None]) -> None:
        """Read the state of a stage; :meth:`take_state` returns it then."""

        def job() -> None:
            if number in self._with_state:
                start_ns = time.monotonic_ns()
                tensors, notes = self.storage.read(state_name(number))
                self._states[number] = read_state(self._stages[number].plan.trained, tensors, notes)
                num_bytes = self._counted_bytes[number] = self._states[number].num_bytes
                self.read_bytes += num_bytes
                self.state_ledger.add(num_bytes)
                self._note(f"load of state {number}", start_ns, is_reading=True)
            then()

        self._thread.submit(0, (), job)

    def take_state(self, number: int) -> ShardState | None:
        """Return the state that was read; None if there is none yet."""
        return self._states.pop(number, None)

    def store(self, number: int, state: ShardState | None, then: Callable[[], None], *, step: int) -> None:
        """Write a stage that was updated, and its state, which nobody else holds any more."""
        num_state_bytes = 0 if state is None else state.num_bytes
        self.state_ledger.add(num_state_bytes - self._counted_bytes.pop(number, 0))
        tensors = self._stages[number].tensors()
        notes = {"step": str(step)}

        def job() -> None:
            nonlocal state
            start_ns = time.monotonic_ns()
            if state is not None:
                self.written_bytes += self.storage.write(parameters_name(number), tensors, notes)
                self.written_bytes += self.storage.write(state_name(number), state.tensors(), notes | state.notes())
                self._with_state.add(number)
                state = None
                self.state_ledger.add(-num_state_bytes)
                self._note(f"store of stage {number}", start_ns, is_reading=False)
            then()

        self._thread.submit(0, (), job)

    def close(self, *, is_failing: bool) -> None:
        """End the thread; with ``is_failing`` what has not begun is dropped."""
        self._thread.close(finishes=not is_failing)

    def _note(self, name: str, start_ns: int, *, is_reading: bool) -> None:
        end_ns = time.monotonic_ns()
        if is_reading:
            self.measurement_s += (end_ns - start_ns) / 1e9
        else:
            self.writing_s += (end_ns - start_ns) / 1e9
        self._trace.span(name, "storage", start_ns, end_ns)
