"""Going on after a crash: which stored step all ranks of a phased model begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch

from syncline.errors import ConfigurationError, UpdateError
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.control import ControlStream
from syncline.updates.phased.stage import Stage
from syncline.updates.phased.stage_store import buffers_name
from syncline.updates.phased.storage import Storage
from syncline.updates.phased.versions import (
    NUM_VERSIONS,
    Files,
    Manifest,
    common_steps,
    forget,
    read_manifests,
)

_OF = " of "


def find_manifest(storage: Storage, job: ControlStream) -> Manifest | None:
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


def _check_num_ranks(storage: Storage, found: Mapping[int, Manifest], job: ControlStream) -> None:
    own = max((_num_ranks(manifest) for manifest in found.values()), default=0)
    for rank, number in enumerate(job.gather_numbers(own, "number of ranks that have stored")):
        if number not in (0, job.world_size):
            raise ConfigurationError(
                f"phase(resume=True) goes on with as many ranks as have stored the model, that is {number:.0f} in the "
                f"folder of rank {rank}, and this job has {job.world_size} ({storage.place} here): start "
                f"{number:.0f} ranks, each where its folder is, or name another folder with storage= to begin anew"
            )


def begin_versions(
    storage: Storage,
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


def _check_job(storage: Storage, resumed: Manifest, description: str) -> None:
    pairs = zip_longest(resumed.description.split("\n"), description.split("\n"), fillvalue="nothing")
    for before, now in pairs:
        if before != now:
            raise UpdateError(
                f"{storage.place} holds step {resumed.step} of another job: it was {before[:200]!r}, and now is "
                f"{now[:200]!r}; start the same number of ranks with the same stages, optimizer groups, topology and "
                "sizes, or name another folder"
            )


@torch.no_grad()
def _restore_buffers(storage: Storage, manifest: Manifest, stages: Sequence[Stage]) -> None:
    for stage in stages:
        file, _ = manifest.files.get(buffers_name(stage.number), (None, 0))
        stored = storage.read(file)[0] if file is not None else {}
        for name, buffer in stage.module.named_buffers():
            if name not in stored or stored[name].shape != buffer.shape:
                raise UpdateError(
                    f"{storage.place} holds step {manifest.step} of another job: buffer {name!r} of stage "
                    f"{stage.number} was not there, or had another shape; build the same stages, or name another folder"
                )
            buffer.copy_(stored[name])
