"""A Lightning strategy: after ``import syncline.lightning``, ``Trainer(strategy="syncline")`` uses ``distribute()``.

It is Lightning's DDP strategy, with its process group for metrics, barriers and broadcasts, but for the model and the
optimizers: ``distribute()`` takes these. As with DDP, Lightning calls the model within a module whose forward pass is
the training step, so that batches are counted and buffers are broadcast once per step, however often the step itself
calls the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from syncline.backend import NAME
from syncline.backend.registration import register
from syncline.errors import ConfigurationError
from syncline.priorities.settings import Priorities
from syncline.pytorch.consistency import DEFAULT_EVERY
from syncline.pytorch.control import no_sync
from syncline.pytorch.distribute import distribute
from syncline.pytorch.environment import find_group, read_environment
from syncline.pytorch.fleet import Fleet, current_fleet
from syncline.pytorch.init import init
from syncline.pytorch.metrics import metrics, note
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.samples import CountSamples
from syncline.topology import Topology
from syncline.updates import UpdateRule
from syncline.variables import process_variables, whole_number


class SynclineStrategy(DDPStrategy):
    """Trains a LightningModule as :func:`syncline.distribute` does; ``Trainer(strategy="syncline")`` has the defaults.

    ``update`` to ``priorities`` are the arguments of :func:`syncline.distribute`, and ``topology`` that of
    :func:`syncline.init`; a fleet that is open already is used as it is. ``options`` are those of Lightning's
    ``ParallelStrategy`` and of its process group. Under torchrun or ``syncline run`` the job has their ranks, whatever
    ``devices`` and ``num_nodes`` say, also where hosts have different numbers of them. ``Overlapped`` and ``Clustered``
    end their period before each validation and each checkpoint, and every rank makes as many steps as its loader has.

    Raises :class:`ConfigurationError` for options of DistributedDataParallel, which is not used.
    """

    _own_fleet: Fleet | None = None  # of the last run of any trainer, which may train the same module again

    def __init__(
        self,
        update: UpdateRule | None = None,
        *,
        samples: CountSamples | Literal["batch"] | None = None,
        broadcast_buffers: bool = True,
        check_every: int | None = DEFAULT_EVERY,
        priorities: Priorities | bool | None = True,
        topology: str | Path | Topology | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        process_group_backend: str = NAME,
        **options: Any,
    ) -> None:
        environment = cluster_environment or LaunchedEnvironment.find()
        super().__init__(cluster_environment=environment, process_group_backend=process_group_backend, **options)
        if self._ddp_kwargs:
            raise ConfigurationError(
                f"SynclineStrategy does not take {', '.join(self._ddp_kwargs)}: it trains with syncline.distribute(), "
                "which finds unused parameters by itself; leave options of DistributedDataParallel out"
            )
        self._training_options: dict[str, Any] = {
            "update": update,
            "samples": samples,
            "broadcast_buffers": broadcast_buffers,
            "check_every": check_every,
            "priorities": priorities,
        }
        self._topology = topology
        self._is_failing = False

    @property
    def root_device(self) -> torch.device:
        """The device of this rank; without GPUs all are the same, however many there are."""
        devices: list[torch.device] = self.parallel_devices
        return devices[0] if devices[0].type == "cpu" else devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How samplers divide the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Make the process group, and a fleet of its ranks; that of an earlier run, of any trainer, is closed first."""
        super().setup_distributed()
        self._close(is_failing=False)
        self._is_failing = False
        if not _has_fleet():
            SynclineStrategy._own_fleet = init(self._topology)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers as the module says, and give them to ``distribute()``; schedulers keep theirs."""
        super().setup_optimizers(trainer)
        assert self.model is not None, "Lightning connects it first"
        made: list[torch.optim.Optimizer] = super().optimizers
        self.optimizers = [self._distribute(optimizer) for optimizer in made]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the whole states that a checkpoint has; each rank keeps what it owns."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, on every rank, which all call it; parameters are equal on all then."""
        self._end_periods()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within this context gradients add up on this rank alone."""
        with no_sync(self.model):
            yield

    def on_validation_start(self) -> None:
        """Validate parameters that are equal on all ranks."""
        self._end_periods()

    def on_train_end(self) -> None:
        """Leave parameters that are equal on all ranks."""
        self._end_periods()

    def on_exception(self, exception: BaseException) -> None:
        """Remember that the other ranks must not wait for this one."""
        super().on_exception(exception)
        self._is_failing = True
        if self._own_fleet is not None:
            self._own_fleet.error_in_flight = exception  # they are told

    def teardown(self) -> None:
        """Give the plain module back; the fleet stays for checkpoints until the next run, unless something failed."""
        self.model = self.lightning_module
        for optimizer in self.optimizers:
            optimizer.zero_grad()  # the base class copies gradients to the CPU, and no rank has a whole one
        if self._is_failing:
            self._close(is_failing=True)
        optimizers: list[torch.optim.Optimizer] = self.optimizers
        self.optimizers = []  # their states stay where the update rule keeps them
        try:
            super().teardown()
        finally:
            self.optimizers = optimizers

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return _StepModule(model)

    def _register_ddp_hooks(self) -> None:
        """Leave the gradients to ``distribute()``."""

    def _distribute(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if not any(group["params"] for group in optimizer.param_groups):  # what stands for no optimizer
            return optimizer
        _, distributed = distribute(self.model, optimizer, **self._training_options)
        return distributed

    def _end_periods(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, DistributedOptimizer) and not optimizer.training.is_closed:
                optimizer.end_period()

    def _close(self, *, is_failing: bool) -> None:
        fleet, SynclineStrategy._own_fleet = self._own_fleet, None
        if fleet is not None:
            fleet.close(is_failing=is_failing)


class LaunchedEnvironment(TorchElasticEnvironment):
    """The ranks that a launcher has started, each of which it told ``RANK`` and ``WORLD_SIZE``."""

    def __init__(self) -> None:
        self._settings = read_environment(group=find_group())

    @classmethod
    def find(cls) -> LaunchedEnvironment | None:
        """Return it if a launcher has told this process its rank; else Lightning looks for one, or starts ranks."""
        return cls() if cls.detect() else None

    @staticmethod
    def detect() -> bool:
        """Whether a launcher has told this process its rank."""
        values = process_variables()
        return bool(values.get("RANK") and values.get("WORLD_SIZE"))

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return self._settings.master_address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port of the store on it."""
        return self._settings.master_port or 0

    def local_rank(self) -> int:
        """Return the rank's number among those of its host."""
        return whole_number(process_variables(), "LOCAL_RANK", 0)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Take what the launcher says, whatever the Trainer was given."""


class MetricsCallback(Callback):
    """Gives the Trainer's loggers what :func:`syncline.metrics` has, as often as they log, and notes the loss.

    Names begin with ``syncline/``. It works with every strategy whose process group is Syncline's, DDP's too.
    """

    def on_train_batch_end(self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any) -> None:
        """Note the loss of a batch, and log."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            note(loss=loss)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            told = {f"syncline/{name}": value for name, value in metrics().items()}
            for logger in trainer.loggers:
                logger.log_metrics(told, step=trainer.global_step)


class _StepModule(nn.Module):
    """Calls Lightning's module, whose forward pass is the training step while Lightning makes one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _has_fleet() -> bool:
    try:
        current_fleet()
    except ConfigurationError:
        return False
    return True


register()
StrategyRegistry.register(NAME, SynclineStrategy, description="distribute() of Syncline", override=True)
