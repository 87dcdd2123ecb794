"""What a model and its steps take on this machine alone, in seconds and core-seconds: for plans made before a job."""

from __future__ import annotations

import importlib
import pydoc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from syncline.errors import ConfigurationError
from syncline.fabric import FabricOptions
from syncline.observe import say
from syncline.priorities.forward_timing import BACKWARD_PER_FORWARD
from syncline.priorities.meter import StepMeter
from syncline.pytorch.backward import tensors_in
from syncline.pytorch.flatten import check_parameters, flatten, plan_model
from syncline.pytorch.stores import TorchStore
from syncline.pytorch.waiting import WaitingParameters
from syncline.runtime import Communicator
from syncline.schedule import Collective
from syncline.schedule.pairs import StageShape
from syncline.tensors.memory import summands_of
from syncline.topology import Topology
from syncline.units import format_duration
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES

NUM_PASSES = 5
SCATTERED = 1.5
"""Passes are far apart if the median is longer than the least by this."""
NUM_RANKS, MOVED_BYTES = 4, 1 << 20
NUM_STEPPED, STEPPED_BYTES = 4, 1 << 20
"""Parameters, and the bytes of each."""
NUM_RUNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What a plan needs of a model; sequences go by bucket, in forward order."""

    num_bytes: tuple[int, ...]
    forward_s: tuple[float, ...]
    num_busy_cores: float
    """What computing keeps busy of this machine's: core-seconds of a forward and a backward pass on one thread, over
    the time of the fastest, and at least 1; 0 where parameters are on an accelerator."""
    stages: tuple[StageShape, ...]
    """Of an ``nn.Sequential``, whose modules can be those of ``phase()``; else none."""


def measure_model(spec: str) -> ModelProfile:
    """Measure the model that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` makes.

    The function returns ``(model, batch)``; ``model(*batch)`` (``model(batch)`` if it is no tuple) is a forward pass.
    """
    model, batch = _make(spec)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    try:
        for _ in range(2):  # to warm up
            model(*arguments)
    except Exception as error:
        raise _refusal(f"the forward pass of {spec!r} failed: {type(error).__name__}: {error}") from error
    named = {parameter: (name, 0) for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_parameters(named)
    plans = plan_model(named, bucket_bytes=DEFAULT_BUCKET_BYTES)
    meter = StepMeter([plan.num_bytes for plan in plans], time.perf_counter)

    def need(buckets: tuple[int, ...]) -> None:
        meter.needed(buckets)
        meter.available(buckets)  # they always are

    waiting = WaitingParameters(flatten(named, plans), need)
    passes = [_measure(meter, waiting, lambda: model(*arguments), len(plans)) for _ in range(NUM_PASSES)]
    tell_scatter([*map(sum, passes)])
    forward_s = tuple(statistics.median(column) for column in zip(*passes, strict=True))
    is_here = all(plan.device.type == "cpu" for plan in plans)
    return ModelProfile(
        num_bytes=tuple(plan.num_bytes for plan in plans),
        forward_s=forward_s,
        num_busy_cores=_busy_cores(model, arguments, min(map(sum, passes))) if is_here else 0.0,
        stages=_measure_stages(model, arguments),
    )


def tell_scatter(passes_s: Sequence[float]) -> None:
    """Say so if passes that do the same took times far apart, as on a machine that something else keeps busy.

    >>> tell_scatter([0.1, 0.11, 0.1])
    """
    least_s, median_s = min(passes_s), statistics.median(passes_s)
    if median_s > SCATTERED * least_s:
        say(
            f"forward passes took {format_duration(least_s)} to {format_duration(max(passes_s))}, so this machine is "
            "probably busy; measure again when it is idle, or say what a rank computes in a step (--compute)"
        )


def _measure_stages(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[StageShape, ...]:
    """Return a stage for each module of a sequence that is trained, with those behind it that are not.

    None if modules share parameters, or there are fewer than two stages; a sequence that has a ``forward`` of its own
    may call them in any way.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return ()
    groups: list[list[nn.Module]] = []
    for module in model:
        if not groups or (_is_trained(module) and any(map(_is_trained, groups[-1]))):
            groups.append([])
        groups[-1].append(module)
    stages = [nn.Sequential(*group) for group in groups]
    owned = [parameter for stage in stages for parameter in stage.parameters()]
    if len(stages) < 2 or len(owned) > len(set(owned)):
        return ()
    times_s: list[list[float]] = [[] for _ in stages]
    passed = [0] * len(stages)
    for _ in range(NUM_PASSES):
        values: Any = arguments
        for number, stage in enumerate(stages):
            begun_s = time.perf_counter()
            values = stage(*values) if number == 0 else stage(values)
            times_s[number].append(time.perf_counter() - begun_s)
            passed[number] = sum(each.nbytes for each in tensors_in(values))
    medians_s = [statistics.median(each) for each in times_s]
    return tuple(
        StageShape(
            num_bytes=sum(parameter.nbytes for parameter in stage.parameters()),
            forward_share=seconds / sum(medians_s),
            passed_bytes=num_bytes,
        )
        for stage, seconds, num_bytes in zip(stages, medians_s, passed, strict=True)
    )


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _busy_cores(model: nn.Module, arguments: tuple[Any, ...], forward_s: float) -> float:
    """Return the mean of both passes; of the forward pass alone, if nothing that it returns has a gradient.

    A busy machine makes passes longer than they work, so one that is seen to work for less than a core has one.
    """
    has_backward = False

    def run() -> None:
        nonlocal has_backward
        model.zero_grad()
        outputs = [each for each in tensors_in(model(*arguments)) if each.requires_grad]
        if has_backward := bool(outputs):
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])

    worked_s = least_core_s(run, num_runs=3)
    return max(1.0, worked_s / ((1 + BACKWARD_PER_FORWARD if has_backward else 1) * forward_s))


def measure_moving() -> float:
    """Return the core-seconds that a byte takes which is sent or received, sums included: the best of a few runs."""
    options = FabricOptions(secret=bytes(32), authenticate_frames=True, shares_memory=False, address="127.0.0.1")
    topology, store = Topology.flat(NUM_RANKS, rate=1.25e9), TorchStore(HashStore())
    connect = partial(Communicator.connect, world_size=NUM_RANKS, topology=topology, store=store, options=options)
    with ThreadPoolExecutor(NUM_RANKS) as pool, ExitStack() as stack:
        connecting = [pool.submit(connect, rank=rank) for rank in range(NUM_RANKS)]
        ranks = [stack.enter_context(each.result()) for each in connecting]
        schedule = ranks[0].plan(Collective.ALL_REDUCE, MOVED_BYTES)
        summands = [summands_of(torch.zeros(MOVED_BYTES // 4)) for _ in ranks]

        def run() -> None:
            works = [rank.start(schedule, *each) for rank, each in zip(ranks, summands, strict=True)]
            for work in works:
                work.wait()

        return least_core_s(run, num_runs=NUM_RUNS) / (4 * (NUM_RANKS - 1) * MOVED_BYTES)


def measure_stepping() -> float:
    """Return the core-seconds that Adam takes for a byte of parameters."""
    parameters = [torch.nn.Parameter(torch.zeros(STEPPED_BYTES // 4)) for _ in range(NUM_STEPPED)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return least_core_s(torch.optim.Adam(parameters).step, num_runs=NUM_RUNS) / (NUM_STEPPED * STEPPED_BYTES)


def least_core_s(run: Callable[[], object], *, num_runs: int) -> float:
    """Return the least core-seconds that this process takes for one run, on one thread: those that wait spin."""
    num_threads, times_s = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(num_runs):
            begun_s = time.process_time()
            run()
            times_s.append(time.process_time() - begun_s)
    finally:
        torch.set_num_threads(num_threads)
    return min(times_s)


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
    if not place or not name:
        raise _refusal(f"not {spec!r}")
    try:
        function = getattr(_load(place), name)
        made = function()
    except Exception as error:
        raise _refusal(f"{spec!r} failed: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise _refusal(f"{spec!r} returned {type(made).__name__}")
    return made


def _refusal(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"--model is MODULE:FUNCTION or FILE.py:FUNCTION, whose function returns (model, batch); {why}"
    )


def _load(place: str) -> Any:
    is_file = place.endswith(".py")
    folder = str(Path(place).absolute().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as python does, for what the module imports later, too
    return pydoc.importfile(place) if is_file else importlib.import_module(place)
