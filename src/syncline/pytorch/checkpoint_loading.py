"""Loading one folder: its files are checked by all ranks together, then each takes what it owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from syncline.errors import CheckpointError
from syncline.pytorch import checkpoint_folder as place
from syncline.pytorch.checkpoint_chunk import Chunk
from syncline.pytorch.checkpoint_contents import CheckpointContents, read_contents
from syncline.pytorch.checkpoint_group import CheckpointGroup
from syncline.pytorch.checkpoint_parts import Stateful, load_part
from syncline.pytorch.checkpoint_state import CheckpointState


def check(folder: Path, group: CheckpointGroup) -> None:
    """Raise :class:`CheckpointError` if it is damaged, as far as this rank's share of the files tells."""
    if (folder / place.MANIFEST).is_file() or not place.is_checkpoint(folder):
        files = place.read_manifest(folder).files
        place.check_files(folder, files, part=group.rank, num_parts=group.world_size)


def load(
    folder: Path, model: nn.Module, group: CheckpointGroup, parts: Mapping[str, Stateful], *, strict: bool
) -> CheckpointContents:
    """Take from a folder what this rank needs, and return what it holds beside that."""
    targets = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    contents = read_contents(folder, targets.keys(), group.slots(), group.names_by_group())
    wanted = _model_chunks(contents, targets, strict=strict)
    missing = [name for name in parts if name not in contents.parts]
    if strict and missing:
        raise CheckpointError(
            f"The checkpoint {folder} has no state of {missing[0]}=; save_checkpoint(..., {missing[0]}=...) writes it, "
            "and strict=False goes on without"
        )
    if group.optimizer is not None:
        if contents.catalogue is None:
            raise CheckpointError(f"The checkpoint {folder} was saved without an optimizer; load it without one")
        source = CheckpointState(contents.catalogue, prefix=contents.state_prefix)
        group.load_groups(contents.groups)
        group.load_state(source)
        wanted += source.wanted
    with torch.no_grad():
        contents.table.read(wanted)
    for name, part in parts.items():
        if name in contents.parts:
            load_part(name, part, contents.parts[name])
    group.go_on_from(contents.iteration)
    return contents


def _model_chunks(contents: CheckpointContents, targets: Mapping[str, torch.Tensor], *, strict: bool) -> list[Chunk]:
    stored, names = contents.model_names, set(targets)
    if strict and names != stored:
        missing, unknown = sorted(names - stored)[:5], sorted(stored - names)[:5]
        raise CheckpointError(
            f"The checkpoint {contents.table.folder} is of another model: it lacks {missing}, and has {unknown} that "
            "the model lacks"
        )
    chunks = [Chunk.whole(name, value) for name, value in targets.items() if name in stored]
    return [replace(chunk, name=f"{contents.model_prefix}{chunk.name}") for chunk in chunks]
