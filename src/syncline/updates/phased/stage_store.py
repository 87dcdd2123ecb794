"""The stage store: takes stages from storage and puts them back, on a thread of its own, and counts what that costs.

A shard's optimizer state goes there as named tensors and notes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.observe import Trace
from syncline.runtime.worker_thread import WorkerThread
from syncline.updates.bucket import BucketPlan
from syncline.updates.phased.stage import Ledger, Stage
from syncline.updates.phased.storage import Folder, Tensors
from syncline.updates.phased.versions import Manifest, checksum, forget, versioned
from syncline.updates.shard import Segment, Shard


def stage_file(number: int, what: str) -> str:
    """Return as what a rank stores its "parameters", "state", "gradients" or "buffers" of a stage."""
    return f"stage-{number:04d}.{what}"


NOTE = "pieces"


class ShardState:
    """The state of this rank's shards of one stage, bucket by bucket, and within it piece by piece."""

    def __init__(self, buckets: Sequence[Sequence[tuple[tuple[Segment, ...], dict[str, Any]]]]) -> None:
        self.buckets = tuple(tuple(pieces) for pieces in buckets)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> ShardState:
        """Take the state of ``shards``, which do not go on."""
        return cls([[(segments, dict(state)) for segments, state in shard.views()] for shard in shards])

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that is a tensor, by bucket, piece and key."""
        return {
            f"{bucket}.{piece}.{key}": value
            for bucket, pieces in enumerate(self.buckets)
            for piece, (_, state) in enumerate(pieces)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def notes(self) -> dict[str, str]:
        """Return the rest: where each piece lies, and values that are no tensors."""
        told = [[[_places(segments), _plain(state)] for segments, state in pieces] for pieces in self.buckets]
        return {NOTE: json.dumps(told)}


def read_state(
    plans: Sequence[BucketPlan], tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]
) -> ShardState:
    """Return the state that was stored."""
    buckets = []
    for bucket, (plan, pieces) in enumerate(zip(plans, json.loads(notes[NOTE]), strict=True)):
        slots = {slot.position: slot for slot in plan.slots}
        restored = []
        for piece, (places, plain) in enumerate(pieces):
            segments = tuple(Segment(slot=slots[number], start=start, stop=stop) for number, start, stop in places)
            prefix = f"{bucket}.{piece}."
            found = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
            restored.append((segments, plain | found))
        buckets.append(restored)
    return ShardState(buckets)


def _places(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    return [(segment.slot.position, segment.start, segment.stop) for segment in segments]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    for key, value in plain.items():
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise UpdateError(
                f"The optimizer keeps {key!r} as a {type(value).__name__}, which cannot be stored; use one whose state "
                "is tensors and numbers"
            )
    return plain


class StageStore:
    """Reads and writes the stages of one rank. ``then`` runs on the storage thread; failures go to ``on_failure``.

    ``manifest``: of the step that training goes on from, or begins with, if versions are kept.
    """

    def __init__(
        self,
        storage: Folder,
        stages: Mapping[int, Stage],
        *,
        manifest: Manifest | None,
        trace: Trace,
        name: str,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.storage = storage
        self.state_ledger = Ledger()
        self.num_loads = self.spilled_bytes = 0
        self._stages = stages
        self._manifest = manifest
        self._files = {} if manifest is None else dict(manifest.files)
        """For each thing of which versions are kept: its newest file, and the checksum of that."""
        self._forgotten_for = 0 if manifest is None else manifest.step
        """The step whose manifest has room."""
        self._states: dict[int, ShardState] = {}
        self._counted_bytes: dict[int, int] = {}
        """State that was read, and is in memory until its stage is stored."""
        self._with_state = {
            number for number in stages if manifest is not None and stage_file(number, "state") in self._files
        }
        """Stages that have a file of state."""
        self._trace = trace
        self._thread = WorkerThread(name, on_failure=on_failure)

    def load(self, number: int, then: Callable[[], None]) -> None:
        """Read the parameters of a stage into the room that it was placed in."""
        tensors = self._stages[number].tensors()

        def read() -> None:
            self.storage.read_into(self._newest(stage_file(number, "parameters")), tensors)
            self.num_loads += 1

        self._submit(f"load of stage {number}", read, then)

    def read_parameters(self, number: int, then: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Read the parameters of a stage into memory of their own."""
        self._thread.submit(0, (), lambda: then(self.storage.read(self._newest(stage_file(number, "parameters")))[0]))

    def load_state(self, number: int, then: Callable[[], None]) -> None:
        """Read the state of a stage; :meth:`take_state` returns it then."""

        def read() -> None:
            if number in self._with_state:
                tensors, notes = self.storage.read(self._newest(stage_file(number, "state")))
                self._states[number] = read_state(self._stages[number].plan.trained, tensors, notes)
                num_bytes = self._counted_bytes[number] = self._states[number].num_bytes
                self.state_ledger.add(num_bytes)

        self._submit(f"load of state {number}", read, then)

    def take_state(self, number: int) -> ShardState | None:
        """Return the state that was read; None if there is none yet."""
        return self._states.pop(number, None)

    def store(
        self,
        number: int,
        state: ShardState | None,
        then: Callable[[], None],
        *,
        step: int,
        module_buffers: Tensors,
    ) -> None:
        """Write a stage that was updated, and its state, which nobody else holds any more."""
        num_state_bytes = 0 if state is None else state.num_bytes
        self.state_ledger.add(num_state_bytes - self._counted_bytes.pop(number, 0))
        tensors = self._stages[number].tensors()
        notes = {"step": str(step)}

        def write() -> None:
            nonlocal state
            if state is not None:
                self._write(stage_file(number, "parameters"), tensors, notes, step)
                self._write(stage_file(number, "state"), state.tensors(), notes | state.notes(), step)
                self._with_state.add(number)
                state = None
                self.state_ledger.add(-num_state_bytes)
            if module_buffers:
                self._write(stage_file(number, "buffers"), module_buffers, notes, step)

        self._submit(f"store of stage {number}", write, then)

    def commit(self, step: int, generator: torch.Tensor, then: Callable[[], None]) -> None:
        """Declare that everything is stored as it is after ``step``."""
        assert self._manifest is not None, "versions are kept"
        description = self._manifest.description

        def job() -> None:
            Manifest(step=step, description=description, files=self._files, generator=generator).write(self.storage)
            then()

        self._thread.submit(0, (), job)

    def write_aside(self, name: str, tensors: Tensors, then: Callable[[], None], *, is_input: bool) -> None:
        """Write what no other process needs: inputs that are spilled, or gradients."""

        def write() -> None:
            num_bytes = self.storage.write(name, tensors, {})
            self.spilled_bytes += num_bytes if is_input else 0

        self._submit(f"store of {name}", write, then)

    def read_aside(self, name: str, tensors: Tensors, then: Callable[[], None]) -> None:
        """Read what :meth:`write_aside` has written into memory that is there."""

        def read() -> None:
            self.storage.read_into(name, tensors)

        self._submit(f"load of {name}", read, then)

    def remove_aside(self, name: str) -> None:
        """Free what :meth:`write_aside` has written."""
        self._thread.submit(0, (), lambda: self.storage.remove(name))

    def close(self, *, is_failing: bool) -> None:
        """End the thread; with ``is_failing`` what has not begun is dropped."""
        self._thread.close(finishes=not is_failing)

    def _newest(self, name: str) -> str:
        return self._files[name][0] if self._manifest is not None else name

    def _write(self, name: str, tensors: Tensors, notes: Mapping[str, str], step: int) -> None:
        if self._manifest is None:
            self.storage.write(name, tensors, notes)
            return
        if self._forgotten_for != step:
            forget(self.storage, step)
            self._forgotten_for = step
        file = versioned(name, step)
        self.storage.write(file, tensors, notes)
        self._files[name] = (file, checksum(tensors, notes))

    def _submit(self, name: str, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Let the thread do ``work``, let the trace have how long that took, and go on."""

        def job() -> None:
            start_ns = self._trace.now_ns()
            work()
            self._trace.span(name, "storage", start_ns, self._trace.now_ns())
            then()

        self._thread.submit(0, (), job)
