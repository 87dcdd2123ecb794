"""A folder that is written until a chosen moment, and what ranks leave in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from syncline.updates.phased.storage import SUFFIX, Folder
from syncline.updates.phased.versions import read_manifests


class CrashError(Exception):
    """The process that would have ended here."""


class CrashingFolder(Folder):
    """Ends the process, or raises, in its operation number ``last``; a file is half written then."""

    def __init__(self, path: str | Path, *, last: int | None, kills: bool = False) -> None:
        super().__init__(path)
        self.num_operations = 0
        self._last, self._kills = last, kills

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> int:
        if self.num_operations + 1 == self._last:
            (Path(self.place) / (name + SUFFIX)).with_suffix(".new").write_bytes(b"half of a f")
        self._count()
        return super().write(name, tensors, notes)

    def sync(self, names: Iterable[str]) -> None:
        self._count()
        super().sync(names)

    def remove(self, name: str) -> None:
        self._count()
        super().remove(name)

    def _count(self) -> None:
        self.num_operations += 1
        if self._last is None or self.num_operations < self._last:
            return
        if self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise CrashError(f"in operation {self._last}")


def stored_step(path: Path, step: int) -> dict[str, Any]:
    """Return the checksums of all that a rank has stored of ``step``: two that are equal say the same, bit for bit."""
    manifest = read_manifests(Folder(path))[step]
    assert manifest.is_whole(Folder(path))
    return {name: check for name, (_, check) in manifest.files.items()}
