"""Two versions of everything that a rank stores, so that after a crash one step is whole on all ranks.

The files of step k have k mod 2 in their names. What step k has made is written once all ranks have stored step k - 1
whole, and takes the place of step k - 2. When all stages of a rank are stored, its *manifest* of the step says so: it
names the file of each stage and of its state, with a checksum, and holds the state of the random generator. So whenever
processes end, all ranks have the newest step of the slowest one; what is half written has another checksum than its
manifest says, or none.

Deciding is apart from reading: :func:`common_steps` sees only numbers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from syncline.errors import StorageError, UpdateError
from syncline.tensors.memory import bytes_of
from syncline.updates.phased.storage import Folder, Tensors

Files = Mapping[str, tuple[str, int]]
"""For each thing that is stored: its file, and the checksum of that."""

FORMAT = 1
NUM_VERSIONS = 2
_GENERATOR = "generator"
_NOTE = "manifest"
_CHECK = "check"


def versioned(name: str, step: int) -> str:
    """Return what a version of ``name`` is stored as.

    >>> versioned("stage-0003.state", 7)
    'stage-0003.state.1'
    """
    return f"{name}.{step % NUM_VERSIONS}"


def checksum(tensors: Tensors, notes: Mapping[str, str]) -> int:
    """Return the CRC-32 of everything that is stored under one name: names, types, shapes, notes, elements."""
    kinds = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    check = zlib.crc32(json.dumps([kinds, dict(notes)], sort_keys=True).encode())
    for tensor in tensors.values():
        check = zlib.crc32(bytes_of(tensor), check)
    return check


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one rank has stored of one step."""

    step: int
    description: str
    """Of the job and its stages; another one cannot go on from here."""
    files: Files
    generator: torch.Tensor
    """The state of torch's random generator on the training thread, at the end of the step."""

    def write(self, storage: Folder) -> None:
        """Store it, once everything that it names cannot be lost any more."""
        storage.sync(file for file, _ in self.files.values())
        content = {"format": FORMAT, "step": self.step, "description": self.description, "files": dict(self.files)}
        text = json.dumps(content)
        tensors = {_GENERATOR: self.generator}
        storage.write(_name(self.step), tensors, {_NOTE: text, _CHECK: str(checksum(tensors, {_NOTE: text}))})
        storage.sync([_name(self.step)])

    @classmethod
    def read(cls, storage: Folder, slot: int) -> Manifest | None:
        """Return the manifest that is stored in a slot; None if there is none that is whole.

        Raises :class:`StorageError` if another version of Syncline wrote it.
        """
        try:
            tensors, notes = storage.read(_name(slot))
            text, generator = notes[_NOTE], tensors[_GENERATOR]
            if notes[_CHECK] != str(checksum({_GENERATOR: generator}, {_NOTE: text})):
                return None
            content = json.loads(text)
        except (StorageError, KeyError, ValueError):
            return None
        if content["format"] != FORMAT:
            raise StorageError(
                f"The versions in {storage.place} have format {content['format']}, and this Syncline reads {FORMAT}; "
                "go on with the one that wrote them, or name another folder"
            )
        files = {name: (file, check) for name, (file, check) in content["files"].items()}
        return cls(step=content["step"], description=content["description"], files=files, generator=generator)

    def is_whole(self, storage: Folder) -> bool:
        """Whether everything that it names is stored as it says; reads all of it, one file after another."""
        try:
            return all(checksum(*storage.read(file)) == check for file, check in self.files.values())
        except StorageError:
            return False


def read_manifests(storage: Folder) -> dict[int, Manifest]:
    """Return the manifests that are stored, by step."""
    found = (Manifest.read(storage, slot) for slot in range(NUM_VERSIONS))
    return {manifest.step: manifest for manifest in found if manifest is not None}


def forget(storage: Folder, step: int) -> None:
    """Remove the manifest whose place the one of ``step`` takes: its files are about to change."""
    storage.remove(_name(step))


def store_first(storage: Folder, stored: Mapping[str, Tensors]) -> Files:
    """Store what training begins with, which is step 0; returns the files."""
    notes = {"step": "0"}
    for name, tensors in stored.items():
        storage.write(versioned(name, 0), tensors, notes)
    return {name: (versioned(name, 0), checksum(tensors, notes)) for name, tensors in stored.items()}


def common_steps(steps: Sequence[Iterable[int]]) -> list[int]:
    """Return the steps that every rank has a manifest of, newest first; none if nothing was trained yet.

    ``steps`` are those of each rank. Raises :class:`UpdateError` if something was trained, and ranks have no step in
    common: then files were lost, and to begin anew would lose the rest.

    >>> common_steps([(4, 5), (5, 6), (5,)]), common_steps([(), (0,)])
    ([5], [])
    """
    found = [set(one) for one in steps]
    common = set.intersection(*found)
    newest = max((step for one in found for step in one), default=0)
    if not common and newest > 0:
        told = "; ".join(f"rank {rank} has {_list(one)}" for rank, one in enumerate(found))
        raise UpdateError(
            f"Training goes on from a step that all ranks have stored, but {told}: start each rank where its folder "
            "is, bring back what was removed, or name another folder to begin anew"
        )
    return sorted(common, reverse=True)


def _list(steps: set[int]) -> str:
    return " and ".join(f"step {step}" for step in sorted(steps)) or "none"


def _name(step: int) -> str:
    return versioned("versions", step)
