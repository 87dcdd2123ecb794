"""How a rank of a soak saves: every few steps, in the background or not, now and then on a disk that has no room."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import syncline

MOST_TEXT = 1800
"""What is written to a pipe at once is written whole up to 4,096 bytes."""
SMALL_FILE_BYTES = 2048
STEPS_BESIDE = 3
"""So many steps are made while a checkpoint is written in the background."""


class Saver:
    """Saves every ``checkpoint_every`` steps, every second time in the background; ``faults`` are those of the rank."""

    def __init__(self, config: dict[str, Any], faults: Sequence[dict[str, Any]], tell: Callable[..., None]) -> None:
        self._every = config["checkpoint_every"] if config["plan"]["saves"] else 0
        self._place = Path(config["folder"]) / "checkpoints"
        self._ballast = self._place / f"ballast-{config['rank']}"
        self._faults, self._tell = faults, tell
        self._work: Any = None
        self._end_at = 0
        self._limits = ExitStack()

    def after_step(self, model: Any, optimizer: Any, step: int) -> None:
        """Save if it is time to; one that cannot be written is no reason to end."""
        if self._work is not None and step >= self._end_at:
            self.finish()
        if not self._every or step % self._every:
            return
        self._tell(event="saving", step=step)
        self._limits.enter_context(self._no_room(step))
        self._limits.enter_context(self._small_files(step))
        is_beside = step // self._every % 2 == 0
        self._step, self._end_at = step, step + STEPS_BESIDE
        arguments = (self._place / "last", model, optimizer)
        if is_beside:
            self._work = syncline.save_checkpoint(*arguments, extra={"step": step}, wait=False)
        else:
            self._end(lambda: syncline.save_checkpoint(*arguments, extra={"step": step}))

    def finish(self) -> None:
        """Wait for what is being written."""
        if self._work is not None:
            work, self._work = self._work, None
            self._end(work.wait)

    def _end(self, write: Callable[[], object]) -> None:
        with self._limits:
            try:
                write()
            except syncline.CheckpointError as error:
                self._tell(event="unsaved", step=self._step, text=str(error)[:MOST_TEXT])
                return
        self._tell(event="saved", step=self._step)

    @contextmanager
    def _no_room(self, step: int) -> Iterator[None]:
        if not self._is_due("full-disk", step):
            yield
            return
        room = os.statvfs(self._place)
        with contextlib.suppress(OSError):  # another rank, whose disk it is too, may fill it at the same time
            self._ballast.write_bytes(bytes(room.f_bavail * room.f_frsize))
        self._tell(event="struck", kind="full-disk", step=step)
        try:
            yield
        finally:
            self._ballast.unlink(missing_ok=True)

    @contextmanager
    def _small_files(self, step: int) -> Iterator[None]:
        if not self._is_due("file-size-limit", step):
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, hard))
        self._tell(event="struck", kind="file-size-limit", step=step)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def _is_due(self, kind: str, step: int) -> bool:
        """Whether this is the first checkpoint after the fault's step."""
        return any(fault["kind"] == kind and step - self._every < fault["at_step"] <= step for fault in self._faults)
