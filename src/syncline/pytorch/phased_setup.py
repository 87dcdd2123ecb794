"""Setting up a phased model: build one stage after another, agree on it, store it, and let go of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.agreement import check_agreement
from syncline.pytorch.flatten import Named, plan_model
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.packing import pack, unpack
from syncline.pytorch.registry import check_untrained
from syncline.pytorch.sync_batch_norm import find_layers
from syncline.runtime import Communicator
from syncline.updates.bucket import BucketPlan
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketScheduleOptions, plan_bucket_schedules
from syncline.updates.control import ControlStream
from syncline.updates.inner import check_divisible
from syncline.updates.phased.computing import Loss
from syncline.updates.phased.pairs import find_pair, pair_ranks
from syncline.updates.phased.setting import PhasedSetting
from syncline.updates.phased.stage import Stage, StagePlan, ghost
from syncline.updates.phased.stage_store import parameters_name
from syncline.updates.phased.storage import Storage

MakeStage = Callable[[], nn.Module]
CALL = "phase() with the same stages, optimizer and options"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A stage whose parameters are in storage."""

    number: int
    module: nn.Module
    parameters: dict[str, nn.Parameter]


def check_stages(stages: Iterable[nn.Module | MakeStage]) -> tuple[nn.Module | MakeStage, ...]:
    """Return the stages; raises :class:`UpdateError` if they cannot take turns."""
    found = tuple(stages)
    if len(found) < 2:
        raise UpdateError(f"Two ranks take turns with at least 2 stages, not {len(found)}; divide the model")
    owners: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(found):
        if not callable(stage):
            raise UpdateError(
                f"Stage {number} is a {type(stage).__name__}, neither a module nor a function that builds one"
            )
        for name, parameter in stage.named_parameters() if isinstance(stage, nn.Module) else ():
            if owners.setdefault(parameter, number) != number:
                raise UpdateError(
                    f"Parameter {name!r} of stage {number} belongs to stage {owners[parameter]} as well, but stages "
                    "are not in memory at the same time; give it to one of them, or untie it"
                )
    return found


def set_up(
    fleet: Fleet,
    stages: Sequence[nn.Module | MakeStage],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    loss: Loss,
    storage: Storage,
    max_stages: int,
    schedule_options: BucketScheduleOptions,
    bucket_bytes: int,
) -> PhasedSetting:
    """Build and store this rank's stages, and open its ways to its partner and to the ranks of its side."""
    pairs = pair_ranks(fleet.topology)
    pair, side = find_pair(pairs, fleet.rank)
    members = tuple(ranks[side] for ranks in pairs)
    streams = fleet.reserve_streams(4)
    job = ControlStream(fleet.communicator, stream=streams[0], timeout_s=fleet.timeout_s)
    check_agreement(
        [f"{len(stages)} stages", f"{schedule_options!r}", f"buckets of {bucket_bytes} bytes"], job, call=CALL
    )
    with fleet.communicator.open_group(members, streams=streams[1:3]) as group:
        control = ControlStream(group, stream=streams[2], timeout_s=fleet.timeout_s)
        own = range(side, len(stages), 2)
        built = [_build(number, stages[number], storage, control, members) for number in own]
        optimizer = _make_optimizer(built, make_optimizer, fleet.rank, schedule_options)
        made = _plan(built, optimizer, bucket_bytes)
        lines = [f"optimizer {type(optimizer).__name__}", *(repr(stage.plan) for stage in made)]
        check_agreement(lines, control, call=CALL, ranks=members)
    for stage in stages:
        if isinstance(stage, nn.Module):
            _let_go(stage)
    buckets = [plan for stage in made for plan in stage.plan.trained]
    num_buckets = int(max(job.gather_numbers(len(buckets), "number of buckets")))
    group = fleet.communicator.open_group(members, streams=fleet.reserve_streams(2 + num_buckets))
    return PhasedSetting(
        stages={stage.number: stage for stage in made},
        num_stages=len(stages),
        side=side,
        partner=pairs[pair][1 - side],
        max_stages=max_stages,
        optimizer=optimizer,
        whole_parameters=schedule_options.whole_parameters,
        loss=loss,
        storage=storage,
        collectives=_open_collectives(fleet, group, buckets, schedule_options),
        port=fleet.communicator.open_port(f"pairs of phased model {streams[3]}"),
        stream=streams[3],
        note_wait=fleet.communicator.note_wait,
    )


def _build(
    number: int, stage: nn.Module | MakeStage, storage: Storage, control: ControlStream, members: Sequence[int]
) -> _Built:
    """Build a stage, take over the first pair's values, and store them."""
    module = stage if isinstance(stage, nn.Module) else stage()
    if not isinstance(module, nn.Module):
        raise UpdateError(f"The function for stage {number} returned a {type(module).__name__}, not a module")
    for name in find_layers(module):
        raise UpdateError(
            f"{name!r} of stage {number} is a SyncBatchNorm, but pairs do not synchronise statistics; use BatchNorm "
            "(each pair has its own statistics then), or GroupNorm"
        )
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.numel()}
    check_untrained(module, {parameter: (name, 0) for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            raise UpdateError(
                f"Parameter {name!r} of stage {number} is {parameter.layout} on {parameter.device}; stages are loaded "
                "into host memory: build them there, dense"
            )
        parameter.data = parameter.data.contiguous()
    shapes = [f"{name}: {tuple(one.shape)} of {one.dtype}" for name, one in parameters.items()]
    check_agreement([f"stage {number}", *shapes], control, call=CALL, ranks=members)
    if control.world_size > 1:
        values = [*parameters.values(), *module.buffers()]
        packed = pack(values)
        control.start_broadcast(packed, f"initial values of stage {number}").wait()
        unpack(packed, values)
    storage.write(parameters_name(number), {name: one.detach() for name, one in parameters.items()}, {"step": "0"})
    _let_go(module)
    return _Built(number=number, module=module, parameters=parameters)


def _make_optimizer(
    built: Sequence[_Built],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    rank: int,
    schedule_options: BucketScheduleOptions,
) -> torch.optim.Optimizer:
    trained = [one for stage in built for one in stage.parameters.values() if one.requires_grad]
    if not trained:
        numbers = ", ".join(str(stage.number) for stage in built)
        raise UpdateError(
            f"Stages {numbers}, which rank {rank} computes, have no parameter to train; divide the model so that both "
            "ranks of a pair have some (a stage may be an nn.Sequential of several modules)"
        )
    optimizer = make_optimizer(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UpdateError(f"make_optimizer(parameters) returns an optimizer, not a {type(optimizer).__name__}")
    check_divisible(optimizer, whole_parameters=schedule_options.whole_parameters, rule="phase")
    optimizer.state.clear()  # some make their state at once; it exists for this rank's shards alone
    return optimizer


def _plan(built: Sequence[_Built], optimizer: torch.optim.Optimizer, bucket_bytes: int) -> list[Stage]:
    groups = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    stages: list[Stage] = []
    num_buckets = 0
    for stage in built:
        trained: Named = {
            one: (name, groups[one]) for name, one in stage.parameters.items() if one.requires_grad and one in groups
        }
        frozen: Named = {one: (name, 0) for name, one in stage.parameters.items() if one not in trained}
        plans = tuple(
            replace(plan, index=num_buckets + plan.index) for plan in plan_model(trained, bucket_bytes=bucket_bytes)
        )
        num_buckets += len(plans)
        plan = StagePlan(number=stage.number, trained=plans, frozen=plan_model(frozen, bucket_bytes=bucket_bytes))
        owners = [_owners(plan.trained, list(trained)), _owners(plan.frozen, list(frozen))]
        stages.append(Stage(plan, stage.module, trained=owners[0], frozen=owners[1]))
    return stages


def _open_collectives(
    fleet: Fleet, group: Communicator, buckets: Sequence[BucketPlan], options: BucketScheduleOptions
) -> BucketCollectives:
    first_stream = group.user_stream + 1
    return BucketCollectives(
        group,
        control=ControlStream(group, stream=first_stream, timeout_s=fleet.timeout_s),
        bucket_schedules=plan_bucket_schedules(group, buckets, options, first_stream=first_stream + 1),
    )


def _owners(plans: Sequence[BucketPlan], parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [[parameters[slot.position] for slot in plan.slots] for plan in plans]


def _let_go(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.numel():
            parameter.data = ghost(parameter)
            parameter.grad = None
