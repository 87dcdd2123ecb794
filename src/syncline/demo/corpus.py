"""The source text of Python's own standard library, split into training and validation files."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Folders that are not prose in Python: test data, tables of characters, other people's packages.
LEFT_OUT = frozenset({"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})
NUM_VALIDATION_PER_256 = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two runs of bytes (1-D, uint8)."""

    training: Tensor
    validation: Tensor
    num_files: int

    def batch(self, *, num_sequences: int, context_length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Random windows of the training text: inputs and the bytes that follow, both (sequences, context) of int64.

        The same ``seed`` draws the same windows, on every machine.
        """
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.training) - context_length - 1, (num_sequences,), generator=generator)
        return _windows(self.training, starts, context_length)

    def validation_batch(self, *, num_sequences: int, context_length: int) -> tuple[Tensor, Tensor]:
        """Windows spread evenly over the validation text, always the same ones."""
        last = len(self.validation) - context_length - 1
        return _windows(self.validation, torch.linspace(0, last, num_sequences).long(), context_length)


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the ``*.py`` files below ``folder`` (the standard library).

    Whether a file is for validation depends on its path alone, so that the split is the same in every run and process.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in source_files(folder):
        digest = hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()
        parts[digest[0] < NUM_VALIDATION_PER_256].append(path.read_bytes())
    return Corpus(
        training=_tensor(parts[False]),
        validation=_tensor(parts[True]),
        num_files=sum(len(files) for files in parts.values()),
    )


def source_files(folder: Path) -> list[Path]:
    """List the Python files below ``folder`` in a fixed order."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - LEFT_OUT  # so that large ones are not even entered
        found += [Path(place) / name for name in files if name.endswith(".py")]
    return sorted(found)


def _tensor(files: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context_length: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(context_length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
