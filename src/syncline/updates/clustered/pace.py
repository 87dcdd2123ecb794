"""What a rank notes of its machine in each period: clocks and free memory, and its own seconds for a batch."""

from __future__ import annotations

import time
from collections.abc import Callable

from syncline.machines.features import BATCH, Feature, FeatureHistory, Features
from syncline.machines.measurement import read_moment
from syncline.machines.nvml import Gpu, find_gpu


class Pace:
    """The history of one rank's machine.

    A batch's own time is from one mean to the next that this rank asks for, without what it waited for others between;
    it is not taken in the first period, when much is done for the first time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, gpu: int | None = None) -> None:
        self._clock = clock
        self._history = FeatureHistory()
        self._gpu = Gpu(find_gpu(gpu))
        self._began_s: float | None = None
        self._waited_s = 0.0
        self._is_warm = False
        self._batches_s: list[float] = []

    def began(self) -> None:
        """Note that nothing is waited for any more."""
        self._began_s, self._waited_s = self._clock(), 0.0

    def waited(self, seconds: float) -> None:
        """Note that others were waited for."""
        self._waited_s += seconds

    def computed(self, *, is_batch: bool) -> None:
        """Note that a batch was computed; or only that one is over, in which this rank had nothing to do."""
        if is_batch and self._began_s is not None:
            self._batches_s.append(self._clock() - self._began_s - self._waited_s)
        self._began_s = None

    def end_period(self) -> None:
        """Record what the period was like."""
        has_pace = bool(self._batches_s) and self._is_warm
        own = {BATCH: sum(self._batches_s) / len(self._batches_s)} if has_pace else {}
        self._history.record(read_moment(self._gpu) | own)
        self._batches_s.clear()
        self._is_warm = True

    def close(self) -> None:
        """Release the GPU's library; what was noted is kept."""
        self._gpu.close()

    @property
    def periods(self) -> tuple[Features, ...]:
        """What was measured in each of the newest periods, oldest first."""
        return self._history.periods

    def summary(self) -> dict[str, Feature]:
        """Return the mean over past periods."""
        return self._history.summary()
