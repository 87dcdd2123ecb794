"""What was decided in a run, so that it can be done again in one process, to the bit (see :mod:`.replay`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from syncline.updates.overlapped.events import Contribution, WorkerInstruction


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNote:
    """A global gradient (``what`` is ``"fold"``) or an average (``"average"``), and who is in it with which weight."""

    bucket: int
    what: str
    period: int
    number: int
    """The round, or the part."""
    members: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Recorder:
    """The decisions of one rank: its worker's, step by step, and those of the server shards that it hosts."""

    steps: list[list[tuple[int, WorkerInstruction]]] = field(default_factory=list)
    """For each step, the instructions of all buckets (index, instruction), in the order in which they were obeyed."""
    ends: list[int] = field(default_factory=list)
    """Number of steps before each end of a period."""
    servers: list[ServerNote] = field(default_factory=list)

    def note_server(self, bucket: int, what: str, period: int, number: int, given: Iterable[Contribution]) -> None:
        """Record a decision of a hosted shard."""
        members = tuple((one.worker, one.weight) for one in given)
        self.servers.append(ServerNote(bucket=bucket, what=what, period=period, number=number, members=members))

    def note_mean(self, num_buckets: int, period: int, num_samples: Sequence[float]) -> None:
        """Record a period's average that no server made: of all ranks' parameters, by samples."""
        members = tuple(enumerate(num_samples))
        self.servers += [
            ServerNote(bucket=bucket, what="average", period=period, number=0, members=members)
            for bucket in range(num_buckets)
        ]

    def begin_step(self) -> None:
        """Begin a step of the worker."""
        self.steps.append([])

    def note_worker(self, bucket: int, instruction: WorkerInstruction) -> None:
        """Record what the worker was told to do in this step."""
        self.steps[-1].append((bucket, instruction))

    def note_end(self) -> None:
        """Record that the worker ended its period."""
        self.ends.append(len(self.steps))
