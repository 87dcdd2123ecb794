"""What a rank of a pair does with stages, gradients and inputs as its :class:`Phases` say: memory, storage, updates.

All is begun with the driver's lock held, and nothing waits; ``tell`` tells the machine, from any thread, what has
happened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from syncline.runtime.worker_thread import WorkerThread
from syncline.updates.messaging import Done
from syncline.updates.phased.instructions import (
    Commit,
    Drop,
    Instruction,
    Load,
    LoadGradients,
    LoadState,
    Reduce,
    Store,
    StoreGradients,
    SumNorm,
    Update,
)
from syncline.updates.phased.kept_inputs import InputStore
from syncline.updates.phased.phase_work import PhasedSetting, PhaseWork
from syncline.updates.phased.stage import BufferPool
from syncline.updates.phased.stage_store import StageStore, stage_file
from syncline.updates.phased.updating import StageGradients, StageUpdater

Tell = Callable[[Instruction], None]
"""Gets what is done."""


class StageDriver:
    """Obeys instructions; made and closed on the training thread."""

    def __init__(self, setting: PhasedSetting, *, tell: Tell, on_failure: Callable[[BaseException], None]) -> None:
        self._stages = setting.stages
        self._tell = tell
        self._versions = setting.versions
        largest = max(stage.plan.num_bytes for stage in self._stages.values())
        self.buffers = BufferPool(num_buffers=setting.options.max_stages, num_bytes=largest)
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
        self.inputs = InputStore(self.store, tell)
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
        done = partial(self._tell, instruction)
        match instruction:
            case Load(number) | Drop(number):
                self._place(number, done, is_coming=isinstance(instruction, Load))
            case LoadState(number):
                self.store.load_state(number, done)
            case Reduce(number):
                self.updater.reduce(self.work.gradients[number], number, done)
            case StoreGradients(number) | LoadGradients(number):
                self._move_gradients(number, done, is_coming=isinstance(instruction, LoadGradients))
            case SumNorm():
                self.updater.sum_norm(done)
            case Update(number):
                gradients = self.work.gradients[number]
                gradients.state = self.store.take_state(number)
                self.updater.update(gradients, number, partial(self._give_back, gradients, done))
            case Store(number):
                self._store(number, done)
            case Commit(step):
                self.store.commit(step, self._generators.pop(step), partial(self._agree, step, done))
            case _:
                self.inputs.obey(instruction)

    def close(self, *, is_failing: bool) -> None:
        """Release threads and memory."""
        self.store.close(is_failing=is_failing)
        self._commits.close()
        self.updater.close()
        for stage in self._stages.values():
            stage.leave()
            stage.close()

    def _place(self, number: int, done: Done, *, is_coming: bool) -> None:
        stage = self._stages[number]
        if is_coming:
            room = self._placed[number] = self.buffers.take(stage.plan.num_bytes)
            stage.place(room)
            self.store.load(number, done)
        else:
            stage.leave()
            self.buffers.give_back(self._placed.pop(number))

    def _move_gradients(self, number: int, done: Done, *, is_coming: bool) -> None:
        name = stage_file(number, "gradients")
        if is_coming:
            tensors = self.updater.own_gradients(self.work.place_gradients(number))
            self.store.read_aside(name, tensors, done)
            self.store.remove_aside(name)  # in its turn
        else:
            gradients = self.work.gradients[number]
            tensors = self.updater.own_gradients(gradients)
            stored = partial(self._give_back, gradients, done, is_stored=True)
            self.store.write_aside(name, tensors, stored, is_input=False)

    def _give_back(self, gradients: StageGradients, done: Done, *, is_stored: bool = False) -> None:
        """Free the memory of gradients that were used, or are stored."""
        if is_stored:
            gradients.buckets = ()
        self.work.give_back(gradients)
        done()

    def _store(self, number: int, done: Done) -> None:
        gradients = self.work.gradients.pop(number)
        state = gradients.state if gradients.buckets else None
        self.store.store(number, state, done, step=gradients.step, module_buffers=gradients.module_buffers)

    def _agree(self, step: int, done: Done) -> None:
        """Tell all ranks that ``step`` is stored here, and learn when it is everywhere; on the storage thread."""
        assert self._versions is not None, "versions are kept"
        work = self._versions.start_sum(torch.tensor([float(step)], dtype=torch.float64), f"step {step} is stored")

        def finish() -> None:
            work.wait()
            done()

        self._commits.submit(0, (work,), finish)
