"""``phase()``: a model of stages, trained by pairs of ranks of which neither could hold its parameters at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

from syncline.arguments import Bounds, Count, Whole, checked
from syncline.errors import ConfigurationError, UpdateError
from syncline.members import Elastic
from syncline.pytorch.fleet import Fleet, current_fleet
from syncline.pytorch.phased.setup import MakeStage, check_stages, set_up
from syncline.pytorch.samples import CountSamples, SampleCount
from syncline.runtime.control import Tally
from syncline.runtime.failures import PHASED_STEP
from syncline.updates.bucket_schedule import BucketScheduleOptions
from syncline.updates.combinations import (
    WRITE_ONE,
    Combination,
    TrainingRequest,
    check_combinations,
    on_preemption,
    one_gateway,
)
from syncline.updates.phased.driver import PairDriver, PhasedStatistics
from syncline.updates.phased.instructions import Pass
from syncline.updates.phased.micro_batches import MicroBatch, check_rows, plan_parts, take
from syncline.updates.phased.phase_work import Loss, PhasedSetting, PhaseOptions
from syncline.updates.phased.storage import Folder, TemporaryFiles
from syncline.updates.private_torch import SCALED, let_scalers_step, note_step

# Refuses ``torch.amp.GradScaler`` where a model is phased: its gradients are reduced and used as the loss made them.
#
# A loss that a scaler multiplies would be trained on as it is, so what the loss function refers to is looked through,
# and the optimizer tells when a scaler steps it.


REMEDY = (
    "phase() computes stages in host memory and updates them itself, with the gradients of the loss as it is; return "
    "the plain mean, without a scaler (bfloat16 under torch.autocast needs none)"
)


def refuse_scaled_loss(loss: Callable[..., Any]) -> None:
    """Raise :class:`ConfigurationError` if ``loss`` refers to a scaler that is enabled."""
    for name, value in _referred_to(loss):
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
            raise ConfigurationError(f"The loss refers to {name!r}, a GradScaler, which scales the loss; {REMEDY}")


def refuse_scaled_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let ``GradScaler.step(optimizer)`` raise :class:`ConfigurationError`."""
    let_scalers_step(optimizer)
    optimizer.register_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if hasattr(optimizer, SCALED):
        raise ConfigurationError(f"A GradScaler steps the optimizer of a phased model; {REMEDY}")


def _referred_to(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to, by name: its globals, what it encloses, and what it was bound with."""
    while isinstance(function, partial):
        yield from ((f"argument {value!r}", value) for value in function.args)
        yield from function.keywords.items()
        function = function.func
    yield from getattr(getattr(function, "__self__", function), "__dict__", {}).items()
    if inspect.isfunction(function) or inspect.ismethod(function):
        variables = inspect.getclosurevars(function)
        yield from variables.nonlocals.items()
        yield from variables.globals.items()


OF_PHASE = (
    Combination("gateway: helper", "in which every rank computes stages", WRITE_ONE),
    Combination(
        "elastic=True",
        "which needs all of its ranks (SYNCLINE_ELASTIC=on, as syncline run --elastic says)",
        "say --restarts N without --elastic: then all ranks start again, with resume=True from storage",
    ),
    *on_preemption("which keeps what is needed to go on in its storage", "leave it out, and say resume=True"),
    one_gateway("in which both sides of the pairs have a gateway of their own", others=""),
    Combination(
        "memory",
        "which does not limit what a rank owns",
        "set stages_in_memory and input_budget_bytes, and leave memory out of the topology",
        is_refused=False,
    ),
    Combination(
        'Priorities(search="auto")',
        "which searches for nothing: pairs have the first class, updates the last",
        "write 'search: equal' in the topology",
        is_refused=False,
    ),
)


@checked
def phase(
    stages: Iterable[nn.Module | MakeStage],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    loss: Loss,
    storage: str | Path | Folder | None = None,
    micro_batches: Count = 1,
    stages_in_memory: Count = 2,
    input_budget_bytes: Whole | None = None,
    max_grad_norm: Annotated[float, Bounds(above=0)] | None = None,
    resume: bool = False,
    align: Literal["element", "parameter"] = "element",
    samples: CountSamples | None = None,
    fleet: Fleet | None = None,
) -> PhasedTrainer:
    """Train a model of ``stages`` on pairs of ranks: each computes its stages, and stores and loads them meanwhile.

    Every rank calls it alike. Ranks of one host, or else of one switch, form pairs. The first rank of a pair computes
    stages 0, 2 ..., the second 1, 3 ...; each pair trains on batches of its own. Ranks that hold the same stages divide
    their update, as ``Sharded()`` does.
    ``stages``: at least two modules, or functions that build one, in forward order (an ``nn.Sequential`` does). Each is
    called with what the one before returned: a tensor, or a tuple of tensors as one argument. A function is called on
    the ranks that hold its stage alone, so that no process ever holds the whole model; seed the generator in it. All
    pairs go on from the first pair's values. ``make_optimizer`` gets the parameters of this rank's stages and returns
    an optimizer (which ones can be used: see ``align`` of :class:`Sharded`). ``loss(output, targets)`` returns the mean
    over the samples. ``storage``: a folder in which each rank has one of its own, which stays; None is temporary files
    that are gone when the process ends, however it does. ``micro_batches``: each batch is divided into as many
    parts along the first dimension of its tensors, equal ones or with one row more in the first. All go through a stage
    each time it is loaded, so their gradients accumulate and the disk is paid once; from two on both ranks of a pair
    compute at the same time.
    ``stages_in_memory``: how many stages have memory at once on each rank. ``input_budget_bytes``: what the inputs of
    stages may take of a rank's memory while they wait; what is needed last beyond that is spilled to the storage (None:
    all stay). ``max_grad_norm``: gradients are scaled to a norm over the whole model of at most this, as by
    ``torch.nn.utils.clip_grad_norm_``. ``resume``: ``storage``, a folder, keeps two versions of everything, and if it
    holds steps of this job already, training goes on after the last one that all ranks have stored
    (:attr:`PhasedTrainer.num_steps` says how many). ``samples`` gets the inputs of a micro-batch and returns their
    number (default: the first dimension of the first tensor). Connection classes that the topology file asks for are
    used: what goes between the two ranks of a pair has the first, updates have the last.

    Raises :class:`ConfigurationError` (an odd number of ranks ...), :class:`UpdateError`, :class:`StorageError`.

    >>> def train():
    ...     stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
    ...     with syncline.init():
    ...         trainer = syncline.phase(stages, torch.optim.Adam, loss=torch.nn.functional.mse_loss)
    ...         return [trainer.step(torch.ones(8, 4), torch.zeros(8, 2)) for _ in range(2)]
    >>> (first, second), on_the_partner = syncline.launch(train, ranks=2)
    >>> (first, second) == tuple(on_the_partner), second < first
    (True, True)
    """
    refuse_scaled_loss(loss)
    fleet = fleet or current_fleet()
    _check_request(fleet)
    schedule_options = BucketScheduleOptions(is_divided=True, whole_parameters=align == "parameter")
    options = PhaseOptions(
        num_micros=micro_batches,
        max_stages=stages_in_memory,
        input_budget_bytes=input_budget_bytes,
        max_grad_norm=max_grad_norm,
        resumes=resume,
    )
    kept = _storage(storage, fleet.rank, resumes=resume)
    try:
        setting = set_up(
            fleet,
            check_stages(stages),
            make_optimizer,
            loss=loss,
            storage=kept,
            options=options,
            schedule_options=schedule_options,
        )
        trainer = PhasedTrainer(setting, SampleCount("batch" if samples is None else samples))
    except BaseException:
        kept.close()
        raise
    fleet.on_close(lambda is_failing: trainer.close(is_failing=is_failing))
    fleet.add_update(trainer.statistics)
    return trainer


class PhasedTrainer:
    """A model of stages in training on one rank of a pair; made by :func:`phase`. The fleet's close ends it.

    Gradients accumulate over the micro-batches of a step, not over several calls: each call would load every stage.
    A ``GradScaler`` is refused. Parameters are in host memory; between steps those of most stages are not there at all:
    :meth:`stage_states` brings them one stage at a time.

    >>> def train():
    ...     with syncline.init():
    ...         stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    ...         trainer = syncline.phase(stages, torch.optim.Adam, loss=torch.nn.MSELoss())
    ...         return trainer.side, trainer.needs_inputs, trainer.needs_targets
    >>> syncline.launch(train, ranks=2)
    [(0, True, False), (1, False, True)]
    """

    def __init__(self, setting: PhasedSetting, samples: SampleCount) -> None:
        self.optimizer = setting.optimizer
        """Its ``param_groups`` count for the next step; LR schedulers take it. It steps nothing itself."""
        self.num_stages = setting.num_stages
        self.side = setting.side
        """0 computes stages 0, 2 ..., and 1 the others."""
        self.partner = setting.partner
        self._setting = setting
        self._samples = samples
        refuse_scaled_steps(setting.optimizer)
        self._driver = PairDriver(setting)
        setting.collectives.communicator.count_by(lambda: Tally(count=self._driver.num_over, unit=PHASED_STEP))
        self._is_closed = False
        if self._driver.step:
            note_step(self.optimizer)  # schedulers may be brought to where they were
        self._driver.start()

    def __repr__(self) -> str:
        return f"<PhasedTrainer: stages {', '.join(map(str, self._setting.stages))} of {self.num_stages}>"

    @property
    def num_steps(self) -> int:
        """How many steps were made, with ``resume`` those before a crash included."""
        return self._driver.step

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank computes the first stage."""
        return self.side == 0

    @property
    def needs_targets(self) -> bool:
        """Whether this rank computes the last stage, and so the loss."""
        return self.side == (self.num_stages - 1) % 2

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Make a training step on this pair's batch; return the loss of the batch, on both ranks.

        Both ranks of a pair call it with the same batch; ``inputs`` are used where :attr:`needs_inputs`, ``targets``
        where :attr:`needs_targets`, and may be None elsewhere. What both were given is compared by a checksum; if it
        differs, both raise :class:`UpdateError`. Updates go on when it returns; the next step waits for what it needs
        of them. Raises what went wrong: :class:`PeerLostError`, :class:`DeadlineError`, :class:`StorageError` with who,
        or what a stage itself raises, after which no further step can be made.
        """
        self._check_open()
        if self.needs_targets and targets is None:
            raise UpdateError(f"Rank {self._setting.port.rank} computes the loss, so its step() needs targets")
        micros = self._divide(inputs, targets, self._setting.options.num_micros)
        with self._setting.job.progress.stepping(self.num_steps):
            done = self._driver.run(Pass.TRAIN, micros, (inputs, targets))
        assert done.loss is not None, "the way back tells the loss"
        self.optimizer.step()  # no parameter has a gradient any more: this tells schedulers alone that a step was made
        return done.loss

    def evaluate(self, inputs: Any = None) -> Any:
        """Run all stages forward in evaluation mode; return the output where :attr:`needs_targets`, else None.

        Both ranks of a pair call it with the same batch, as :meth:`step`, and it raises the same. The batch goes
        through each stage whole, as one micro-batch.
        """
        self._check_open()
        modules = [stage.module for stage in self._setting.stages.values()]
        were_training = [[module.training for module in whole.modules()] for whole in modules]
        for whole in modules:
            whole.eval()
        try:
            return self._driver.run(Pass.EVALUATE, self._divide(inputs, None, 1), (inputs, None)).output
        finally:
            for whole, modes in zip(modules, were_training, strict=True):
                for module, mode in zip(whole.modules(), modes, strict=True):
                    module.training = mode

    def synchronize(self) -> None:
        """Wait until every update is over, and stored; raises what went wrong. No other rank needs to call it."""
        self._check_open()
        self._driver.synchronize()

    def stage_states(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield the number and state (as ``state_dict`` of the stage) of each stage of this rank, one at a time.

        The tensors are copies in memory, which only the caller keeps. Raises :class:`StorageError`.
        """
        self.synchronize()
        for number, stage in self._setting.stages.items():
            stored = self._driver.read_parameters(number)
            buffers = {name: buffer.clone() for name, buffer in stage.module.named_buffers()}
            keys = stage.module.state_dict(keep_vars=True)
            yield number, {key: value for key, value in (stored | buffers).items() if key in keys}

    @checked
    def export(self, folder: str | Path) -> None:
        """Write each stage to ``folder`` as ``stage-0000.safetensors``, ...; every rank calls it.

        The first pair writes; the folder is one that both its ranks share. Any program reads the files, with
        ``safetensors.torch.load_file`` or the like, and loads them with the stage's ``load_state_dict``.
        """
        if self._setting.collectives.rank == 0:
            shelf = Folder(folder)
            for number, state in self.stage_states():
                shelf.write(f"stage-{number:04d}", state, {"stages": str(self.num_stages)})
        else:
            self.synchronize()

    def statistics(self) -> PhasedStatistics:
        """Return a frozen record of what was computed, waited for, loaded and stored, and of the most memory in use."""
        return self._driver.statistics()

    def close(self, *, is_failing: bool = False) -> None:
        """Store what is under way and release everything; the stages have no parameters then. The fleet calls it."""
        if self._is_closed:
            return
        self._is_closed = True
        collectives = self._setting.collectives
        try:
            self._driver.close(is_failing=is_failing)
        finally:
            self._setting.port.call_soon(self._setting.port.close)
            (collectives.communicator.abort if is_failing else collectives.communicator.close)()
            self._setting.storage.close()

    def _divide(self, inputs: Any, targets: Any, number: int) -> list[MicroBatch]:
        if self.needs_inputs and inputs is None:
            raise UpdateError(f"Rank {self._setting.port.rank} computes stage 0, so it needs inputs")
        if self.needs_targets and targets is not None and number > 1:
            check_rows(targets, number, "targets")
        if not self.needs_inputs:
            return [MicroBatch()] * number
        parts = plan_parts(inputs, number)
        given = [take(inputs, part, "inputs") for part in parts]
        return [
            MicroBatch(inputs=one, part=part, num_samples=self._count(one))
            for one, part in zip(given, parts, strict=True)
        ]

    def _count(self, inputs: Any) -> float:
        number = self._samples.see((inputs,), {}).num_samples
        if number <= 0:
            raise UpdateError(
                f"Rank {self._setting.port.rank} has a batch of no samples; a pair takes part in each step with at "
                "least one in each micro-batch, so divide the last batch, or leave it out, on all pairs alike"
            )
        return number

    def _check_open(self) -> None:
        if self._is_closed:
            raise UpdateError("The fleet of this model was closed; call syncline.init() and phase() again")


def _check_request(fleet: Fleet) -> None:
    request = TrainingRequest(
        topology=fleet.topology,
        priorities=fleet.topology.priorities,
        elastic=Elastic.choose(None),
        preemption=fleet.preemption.wish.name.lower() if fleet.preemption else None,
    )
    check_combinations(OF_PHASE, "phase()", request, tells=fleet.rank == 0, error=ConfigurationError)


def _storage(given: str | Path | Folder | None, rank: int, *, resumes: bool) -> Folder:
    if given is None and resumes:
        raise ConfigurationError("resume=True goes on from a folder that outlives the job; name one with storage=")
    if given is None:
        return TemporaryFiles()
    if isinstance(given, str | Path):
        return Folder(Path(given) / f"rank-{rank:04d}")
    return given
