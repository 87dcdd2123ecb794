"""How long each bucket's part of a forward pass takes on this machine alone: for plans made before a training."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from syncline.errors import ConfigurationError
from syncline.priorities.meter import StepMeter
from syncline.pytorch.flatten import check_parameters, flatten, plan_model
from syncline.pytorch.waiting import WaitingParameters
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES

NUM_PASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What a plan needs of a model; sequences go by bucket, in forward order."""

    names: tuple[str, ...]
    """The first parameter of each bucket, and how many more there are."""
    num_bytes: tuple[int, ...]
    forward_s: tuple[float, ...]


def measure_model(spec: str, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> ModelProfile:
    """Measure the model that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` makes.

    The function returns ``(model, batch)``; ``model(*batch)`` (``model(batch)`` if it is no tuple) is a forward pass.
    """
    model, batch = _make(spec)
    named = {parameter: (name, 0) for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_parameters(named)
    plans = plan_model(named, bucket_bytes=bucket_bytes)
    meter = StepMeter([plan.num_bytes for plan in plans], time.perf_counter)

    def need(buckets: tuple[int, ...]) -> None:
        meter.needed(buckets)
        meter.available(buckets)  # they always are

    waiting = WaitingParameters(flatten(named, plans), need)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    for _ in range(2):  # to warm up
        model(*arguments)
    passes = [_measure(meter, waiting, lambda: model(*arguments), len(plans)) for _ in range(NUM_PASSES)]
    return ModelProfile(
        names=tuple(
            plan.slots[0].name + (f" and {len(plan.slots) - 1} more" if len(plan.slots) > 1 else "") for plan in plans
        ),
        num_bytes=tuple(plan.num_bytes for plan in plans),
        forward_s=tuple(statistics.median(column) for column in zip(*passes, strict=True)),
    )


def _measure(
    meter: StepMeter, waiting: WaitingParameters, run: Callable[[], object], num_buckets: int
) -> tuple[float, ...]:
    meter.begin_step()
    for bucket in range(num_buckets):
        meter.gather_began(bucket)
        meter.gather_ended(bucket)
    meter.begin_forward()
    waiting.begin()
    run()
    waiting.release()
    sample = meter.end_forward()
    assert sample is not None, "all buckets were told to be there"
    return sample.forward_s


def _make(spec: str) -> tuple[nn.Module, Any]:
    place, _, name = spec.rpartition(":")
    rule = "--model is MODULE:FUNCTION or FILE.py:FUNCTION, whose function returns (model, batch)"
    if not place or not name:
        raise ConfigurationError(f"{rule}; not {spec!r}")
    try:
        function = getattr(_load(place), name)
        made = function()
    except Exception as error:
        raise ConfigurationError(f"{rule}; {spec!r} failed: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigurationError(f"{rule}; {spec!r} returned {type(made).__name__}")
    return made


def _load(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
