"""Setting up a phased model: build one stage after another, agree on it, store it, and let go of its memory.

Where it goes on after a crash, the ranks first find the stored step that all of them begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import nn

from syncline.errors import ConfigurationError, UpdateError
from syncline.priorities.settings import Priorities
from syncline.pytorch.consistency import broadcast_tensors, check_agreement
from syncline.pytorch.control import check_untrained
from syncline.pytorch.flatten import Named, check_shapes, plan_model
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.sync_batch_norm import find_layers
from syncline.schedule.pairs import find_pair, pair_ranks
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, BucketPlan
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketScheduleOptions, plan_bucket_schedules
from syncline.updates.control import ControlStream
from syncline.updates.inner import check_divisible
from syncline.updates.phased.phase_work import Loss, PhasedSetting, PhaseOptions
from syncline.updates.phased.stage import Stage, StagePlan, ghost
from syncline.updates.phased.stage_store import stage_file
from syncline.updates.phased.storage import Folder
from syncline.updates.phased.updating import Clipping
from syncline.updates.phased.versions import (
    NUM_VERSIONS,
    Files,
    Manifest,
    common_steps,
    forget,
    read_manifests,
    store_first,
)

MakeStage = Callable[[], nn.Module]
StoreFirst = Callable[[int, nn.Module, dict[str, nn.Parameter], ControlStream], Files]
"""Stores what training begins with."""
DIFFER = "All ranks must call phase() with the same stages, optimizer and options, but they differ"
_OF = " of "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A stage whose parameters are in storage."""

    number: int
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    files: Files
    """The first version of it, if versions are kept, and training begins anew."""


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
        if not isinstance(stage, nn.Module):
            continue
        check_shapes(stage, f" of stage {number}")
        for name, parameter in stage.named_parameters():
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
    storage: Folder,
    options: PhaseOptions,
    schedule_options: BucketScheduleOptions,
) -> PhasedSetting:
    """Build and store this rank's stages, and open its ways to its partner and to the ranks of its side."""
    pairs = pair_ranks(fleet.topology)
    pair, side = find_pair(pairs, fleet.rank)
    members = tuple(ranks[side] for ranks in pairs)
    streams = fleet.reserve_streams(6)
    job, norms, versions = (ControlStream(fleet.communicator, stream=streams[number]) for number in (0, 4, 5))
    check_agreement([f"{len(stages)} stages", f"{schedule_options!r}", f"{options!r}"], job, head=DIFFER)
    resumed = _find_manifest(storage, job) if options.resumes else None
    first = None if resumed is not None else partial(_store_first, storage, options.resumes)
    with fleet.communicator.open_group(members, streams=streams[1:3]) as group:
        control = ControlStream(group, stream=streams[2])
        built = [_build(number, stages[number], first, control, members) for number in range(side, len(stages), 2)]
        optimizer = _make_optimizer(built, make_optimizer, fleet.rank, schedule_options)
        made = _plan(built, optimizer)
        lines = [f"optimizer {type(optimizer).__name__}", *(repr(stage.plan) for stage in made)]
        check_agreement(lines, control, head=DIFFER, ranks=members)
    _let_go(stages)
    collectives = _open_collectives(fleet, members, made, job, schedule_options)
    files = {name: file for stage in built for name, file in stage.files.items()}
    manifest = _begin_versions(storage, job, resumed, files, made, collectives) if options.resumes else None
    clipping = None if options.max_grad_norm is None else Clipping(max_norm=options.max_grad_norm, control=norms)
    return PhasedSetting(
        stages={stage.number: stage for stage in made},
        num_stages=len(stages),
        side=side,
        partner=pairs[pair][1 - side],
        options=options,
        optimizer=optimizer,
        whole_parameters=schedule_options.whole_parameters,
        loss=loss,
        clipping=clipping,
        storage=storage,
        manifest=manifest,
        job=fleet.communicator,
        collectives=collectives,
        port=fleet.communicator.open_port(f"pairs of phased model {streams[3]}"),
        stream=streams[3],
        versions=versions if options.resumes else None,
    )


def _build(
    number: int, stage: nn.Module | MakeStage, first: StoreFirst | None, control: ControlStream, members: Sequence[int]
) -> _Built:
    """Build a stage; where training begins anew, take over the first pair's values, and store them."""
    module = stage if isinstance(stage, nn.Module) else stage()
    if not isinstance(module, nn.Module):
        raise UpdateError(f"The function for stage {number} returned a {type(module).__name__}, not a module")
    for name in find_layers(module):
        raise UpdateError(
            f"{name!r} of stage {number} is a SyncBatchNorm, but pairs do not synchronise statistics; use BatchNorm "
            "(each pair has its own statistics then), or GroupNorm"
        )
    if module is not stage:  # else all have seen to it
        check_shapes(module, f" of stage {number}")
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
    check_agreement([f"stage {number}", *shapes], control, head=DIFFER, ranks=members)
    files = first(number, module, parameters, control) if first is not None else {}
    _let_go([module])
    return _Built(number=number, module=module, parameters=parameters, files=files)


def _store_first(
    storage: Folder,
    keeps_versions: bool,
    number: int,
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    control: ControlStream,
) -> Files:
    """Take over the first pair's values, and store them; return the files of a first version."""
    broadcast_tensors([*parameters.values(), *module.buffers()], control)
    tensors = {name: one.detach() for name, one in parameters.items()}
    if not keeps_versions:
        storage.write(stage_file(number, "parameters"), tensors, {"step": "0"})
        return {}
    buffers = {name: buffer.detach() for name, buffer in module.named_buffers()}
    stored = {stage_file(number, "parameters"): tensors}
    return store_first(storage, stored | ({stage_file(number, "buffers"): buffers} if buffers else {}))


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


def _plan(built: Sequence[_Built], optimizer: torch.optim.Optimizer) -> list[Stage]:
    plan_all = partial(plan_model, bucket_bytes=DEFAULT_BUCKET_BYTES)
    groups = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    stages: list[Stage] = []
    num_buckets = 0
    for stage in built:
        trained: Named = {
            one: (name, groups[one]) for name, one in stage.parameters.items() if one.requires_grad and one in groups
        }
        frozen: Named = {one: (name, 0) for name, one in stage.parameters.items() if one not in trained}
        plans = tuple(replace(plan, index=num_buckets + plan.index) for plan in plan_all(trained))
        num_buckets += len(plans)
        plan = StagePlan(number=stage.number, trained=plans, frozen=plan_all(frozen))
        owners = [_owners(plan.trained, list(trained)), _owners(plan.frozen, list(frozen))]
        stages.append(Stage(plan, stage.module, trained=owners[0], frozen=owners[1]))
    return stages


def _open_collectives(
    fleet: Fleet, members: Sequence[int], stages: Sequence[Stage], job: ControlStream, options: BucketScheduleOptions
) -> BucketCollectives:
    """Let updates travel in the last connection class that the topology file asks for, behind what pairs send."""
    buckets = [plan for stage in stages for plan in stage.plan.trained]
    num_buckets = int(max(job.gather_numbers(len(buckets), "number of buckets")))
    group = fleet.communicator.open_group(members, streams=fleet.reserve_streams(2 + num_buckets))
    priorities = fleet.topology.priorities or Priorities.off()
    if priorities.is_on:
        fleet.communicator.connection_classes.open(priorities)
    first_stream = group.user_stream + 1
    return BucketCollectives(
        group,
        control=ControlStream(group, stream=first_stream),
        bucket_schedules=plan_bucket_schedules(group, buckets, options, first_stream=first_stream + 1),
        connection_class=priorities.num_classes - 1,
    )


def _owners(plans: Sequence[BucketPlan], parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [[parameters[slot.position] for slot in plan.slots] for plan in plans]


def _let_go(stages: Iterable[object]) -> None:
    """Free the memory of modules, also of those that the partner computes."""
    for parameter in (one for stage in stages if isinstance(stage, nn.Module) for one in stage.parameters()):
        if parameter.numel():
            parameter.data = ghost(parameter)
            parameter.grad = None


def _find_manifest(storage: Folder, job: ControlStream) -> Manifest | None:
    """Return this rank's manifest of the last step that all ranks have stored whole; None to begin anew.

    Every rank calls it. Raises on all ranks :class:`ConfigurationError` if another number of ranks has stored
    something, :class:`UpdateError` if something was trained, but no step is whole everywhere.
    """
    found = read_manifests(storage)
    _check_num_ranks(storage, found, job)
    steps = common_steps([tuple(one) for one in job.all_gather(sorted(found), "steps that are stored")])
    for step in steps:
        is_whole = found[step].is_whole(storage)
        damaged = [rank for rank, one in enumerate(job.gather_numbers(is_whole, f"step {step} is whole")) if not one]
        if not damaged:
            return found[step]
        if step == steps[-1] and step > 0:
            raise UpdateError(
                f"Training goes on from a step whose files are as they were written on all ranks, but those of step "
                f"{step} have changed on rank {damaged[0]} ({storage.place} here): bring them back, or name another "
                "folder to begin anew"
            )
    for slot in range(NUM_VERSIONS):
        forget(storage, slot)
    return None


def _check_num_ranks(storage: Folder, found: Mapping[int, Manifest], job: ControlStream) -> None:
    own = max((_num_ranks(manifest) for manifest in found.values()), default=0)
    for rank, number in enumerate(job.gather_numbers(own, "number of ranks that have stored")):
        if number not in (0, job.world_size):
            raise ConfigurationError(
                f"phase(resume=True) goes on with as many ranks as have stored the model, that is {number:.0f} in the "
                f"folder of rank {rank}, and this job has {job.world_size} ({storage.place} here): start "
                f"{number:.0f} ranks, each where its folder is, or name another folder with storage= to begin anew"
            )


def _begin_versions(
    storage: Folder,
    job: ControlStream,
    resumed: Manifest | None,
    files: Files,
    stages: Sequence[Stage],
    collectives: BucketCollectives,
) -> Manifest:
    """Return the manifest of the step that training begins with, once all ranks have theirs.

    Where training goes on, buffers of stages and torch's generator are as they were. Raises :class:`UpdateError` if
    another job has stored that step; nothing of it is lost.
    """
    description = _describe_job(job, stages, collectives)
    if resumed is None:
        manifest = Manifest(step=0, description=description, files=files, generator=torch.get_rng_state())
        manifest.write(storage)
    else:
        manifest = resumed
        _check_job(storage, resumed, description)
        _restore_buffers(storage, resumed, stages)
        torch.set_rng_state(resumed.generator)
    job.gather_numbers(manifest.step, "step that training begins with")
    return manifest


def _describe_job(job: ControlStream, stages: Sequence[Stage], collectives: BucketCollectives) -> str:
    """Say what must be as it was for a rank to go on from what it has stored: its part in the job, and its stages."""
    owned = [schedule.owned for schedule in collectives.bucket_schedules]
    return "\n".join(
        [f"rank {job.rank}{_OF}{job.world_size}", *(repr(stage.plan) for stage in stages), f"shards {owned}"]
    )


def _num_ranks(manifest: Manifest) -> int:
    """Return how many ranks the job had that a manifest describes."""
    return int(manifest.description.partition("\n")[0].rpartition(_OF)[2])


def _check_job(storage: Folder, resumed: Manifest, description: str) -> None:
    pairs = zip_longest(resumed.description.split("\n"), description.split("\n"), fillvalue="nothing")
    for before, now in pairs:
        if before != now:
            raise UpdateError(
                f"{storage.place} holds step {resumed.step} of another job: it was {before[:200]!r}, and now is "
                f"{now[:200]!r}; start the same number of ranks with the same stages, optimizer groups, topology and "
                "sizes, or name another folder"
            )


@torch.no_grad()
def _restore_buffers(storage: Folder, manifest: Manifest, stages: Sequence[Stage]) -> None:
    for stage in stages:
        file, _ = manifest.files.get(stage_file(stage.number, "buffers"), (None, 0))
        stored = storage.read(file)[0] if file is not None else {}
        for name, buffer in stage.module.named_buffers():
            if name not in stored or stored[name].shape != buffer.shape:
                raise UpdateError(
                    f"{storage.place} holds step {manifest.step} of another job: buffer {name!r} of stage "
                    f"{stage.number} was not there, or had another shape; build the same stages, or name another folder"
                )
            buffer.copy_(stored[name])
