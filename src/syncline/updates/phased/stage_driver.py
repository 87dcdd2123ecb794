"""What a rank of a pair does with stages, gradients and inputs as its :class:`Phases` say: memory, storage, updates.

All is begun with the driver's lock held, and nothing waits; ``tell`` tells the machine, from any thread, what has
happened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from syncline.runtime.worker_thread import WorkerThread
from syncline.updates.phased.instructions import (
    Commit,
    Drop,
    Fetch,
    Instruction,
    Load,
    LoadGradients,
    LoadState,
    Reduce,
    Spill,
    Store,
    StoreGradients,
    SumNorm,
    Update,
)
from syncline.updates.phased.kept_inputs import InputStore
from syncline.updates.phased.phase_work import PhasedSetting, PhaseWork
from syncline.updates.phased.phases import Phases
from syncline.updates.phased.stage import BufferPool
from syncline.updates.phased.stage_store import StageStore, gradients_name
from syncline.updates.phased.updating import StageUpdater

Tell = Callable[..., None]
"""Gets a method of the machine, and what it is called with."""


class StageDriver:
    """Obeys instructions; made and closed on the training thread."""

    def __init__(
        self, setting: PhasedSetting, phases: Phases, *, tell: Tell, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._stages = setting.stages
        self._phases = phases
        self._tell = tell
        self._versions = setting.versions
        largest = max(stage.plan.num_bytes for stage in self._stages.values())
        self.buffers = BufferPool(num_buffers=setting.max_stages, num_bytes=largest)
        self._placed: dict[int, torch.Tensor] = {}
        rank = setting.port.rank
        self.store = StageStore(
            setting.storage,
            self._stages,
            manifest=setting.manifest,
            trace=setting.collectives.trace,
            name=f"syncline-phased-storage-{rank}",
            on_failure=on_failure,
        )
        self.inputs = InputStore(self.store, self._on_input)
        self.updater = StageUpdater(
            setting.collectives,
            setting.optimizer,
            whole_parameters=setting.whole_parameters,
            clipping=setting.clipping,
            on_failure=on_failure,
        )
        self.work = PhaseWork(setting, self.updater)
        self._commits = WorkerThread(f"syncline-phased-versions-{rank}", on_failure=on_failure)
        self._generators: dict[int, torch.Tensor] = {}

    def note_generator(self, step: int) -> None:
        """Keep the state of torch's random generator as that at the end of ``step``; on the training thread."""
        if self._versions is not None:
            self._generators[step] = torch.get_rng_state()

    def obey(self, instruction: Instruction) -> None:
        """Begin to do what the machine says."""
        phases = self._phases
        match instruction:
            case Load(number) | Drop(number):
                self._place(number, is_coming=isinstance(instruction, Load))
            case LoadState(number):
                self.store.load_state(number, partial(self._tell, phases.state_loaded, number))
            case Reduce(number):
                gradients = self.work.gradients[number]
                self.updater.reduce(gradients, number, partial(self._tell, phases.reduced, number))
            case StoreGradients(number) | LoadGradients(number):
                self._move_gradients(number, is_coming=isinstance(instruction, LoadGradients))
            case SumNorm():
                self.updater.sum_norm(partial(self._tell, phases.norm_known))
            case Update(number):
                gradients = self.work.gradients[number]
                gradients.state = self.store.take_state(number)
                self.updater.update(gradients, number, partial(self._on_updated, number))
            case Store(number):
                self._store(number)
            case Commit(step):
                self.store.commit(step, self._generators.pop(step), partial(self._agree, step))
            case _:
                self.inputs.obey(instruction)

    def _on_input(self, instruction: Instruction) -> None:
        assert isinstance(instruction, Spill | Fetch), "nothing else takes time"
        phases = self._phases
        self._tell(phases.spilled if isinstance(instruction, Spill) else phases.fetched, instruction.phase)

    def close(self, *, is_failing: bool) -> None:
        """Release threads and memory."""
        self.store.close(is_failing=is_failing)
        self._commits.close()
        self.updater.close()
        for stage in self._stages.values():
            stage.leave()
            stage.close()

    def _place(self, number: int, *, is_coming: bool) -> None:
        stage = self._stages[number]
        if is_coming:
            room = self._placed[number] = self.buffers.take(stage.plan.num_bytes)
            stage.place(room)
            self.store.load(number, partial(self._tell, self._phases.loaded, number))
        else:
            stage.leave()
            self.buffers.give_back(self._placed.pop(number))

    def _move_gradients(self, number: int, *, is_coming: bool) -> None:
        name = gradients_name(number)
        if is_coming:
            tensors = self.updater.own_gradients(self.work.place_gradients(number))
            self.store.read_aside(name, tensors, partial(self._tell, self._phases.gradients_loaded, number))
            self.store.remove_aside(name)  # in its turn
        else:
            tensors = self.updater.own_gradients(self.work.gradients[number])
            self.store.write_aside(name, tensors, partial(self._on_gradients_stored, number), is_input=False)

    def _on_gradients_stored(self, number: int) -> None:
        gradients = self.work.gradients[number]
        gradients.buckets = ()
        self.work.give_back(gradients)
        self._tell(self._phases.gradients_stored, number)

    def _on_updated(self, number: int) -> None:
        self.work.give_back(self.work.gradients[number])
        self._tell(self._phases.updated, number)

    def _store(self, number: int) -> None:
        gradients = self.work.gradients.pop(number)
        state = gradients.state if gradients.buckets else None
        then = partial(self._tell, self._phases.stored, number)
        self.store.store(number, state, then, step=gradients.step, module_buffers=gradients.module_buffers)

    def _agree(self, step: int) -> None:
        """Tell all ranks that ``step`` is stored here, and learn when it is everywhere; on the storage thread."""
        assert self._versions is not None, "versions are kept"
        work = self._versions.start_sum(torch.tensor([float(step)], dtype=torch.float64), f"step {step} is stored")

        def finish() -> None:
            work.wait()
            self._tell(self._phases.committed, step)

        self._commits.submit(0, (work,), finish)
