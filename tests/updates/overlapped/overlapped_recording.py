"""What was decided in a run, so that it can be done again in one process, to the bit (see `overlapped_replay`).

Nothing in the library knows of it: the state machines of a rank are wrapped, and what they return is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from syncline.updates.overlapped.server import Average, Clear, Fold, Forward
from syncline.updates.overlapped.worker import Keep, Send, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """Step once more on what lies at these places: own gradients for which no global one has come (rule "rebase")."""

    runs: tuple[tuple[int, int], ...]
    """Place, and of how many iterations what lies there is the sum."""


WorkerDecision = Keep | Send | Use | Redo


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNote:
    """Who is in what with which weight: a global gradient (``"fold"``), the push of a relay, or an average.

    In a fold a relay stands for all who are in its push.
    """

    bucket: int
    what: str
    period: int
    number: int
    """The round; 0 of an average."""
    members: tuple[tuple[int, float], ...]
    relay: int | None = None
    """Whose push it is."""


@dataclass(slots=True)
class Recorder:
    """The decisions of one rank: its worker's, step by step, and those of the server shards that it hosts."""

    steps: list[list[tuple[int, WorkerDecision]]] = field(default_factory=list)
    """For each step, the instructions of all buckets (index, instruction), in the order in which they were obeyed."""
    ends: list[int] = field(default_factory=list)
    """Number of steps before each end of a period."""
    servers: list[ServerNote] = field(default_factory=list)


def record(updater: Any) -> Recorder:
    """Record what an updater does from now on; call it on every rank before any makes its first step."""
    recorder, client = Recorder(), updater.client
    _wrap(client, "step", before=lambda: recorder.steps.append([]))
    _wrap(client, "_begin_period", before=lambda: recorder.ends.append(len(recorder.steps)))
    for link in client.links:
        _record_worker(recorder, link)
    for bucket, shard in client.hosted.items():
        _record_server(recorder, bucket, shard)
    if client.layout.ends_on_tree and updater.collectives.rank == 0:

        def note_mean(ends: Any) -> None:
            members = tuple(enumerate(ends.num_samples))
            recorder.servers += [
                ServerNote(
                    bucket=link.bucket.index,
                    what="average",
                    period=client.counts.num_periods,
                    number=0,
                    members=members,
                )
                for link in client.links
            ]

        _wrap(client, "_sum_on_tree", after=note_mean)
    return recorder


def _record_worker(recorder: Recorder, link: Any) -> None:
    bucket, machine = link.bucket.index, link.machine

    def note(*decisions: WorkerDecision) -> None:
        recorder.steps[-1] += [(bucket, decision) for decision in decisions]

    _wrap(machine, "step", after=lambda decisions: note(*decisions))
    _wrap(machine, "hurry", after=lambda decisions: note(*decisions))
    _wrap(machine, "use", after=lambda use: note(*[use] if use is not None else []))
    _wrap(link, "unsettled", before=lambda: note(Redo(runs=tuple(machine.unsettled))))


def _record_server(recorder: Recorder, bucket: int, shard: Any) -> None:
    period = 0

    obey = shard.obey

    def note(instructions: list[Any]) -> None:
        nonlocal period
        for instruction in instructions:
            if isinstance(instruction, Clear):
                period = instruction.period
            elif isinstance(instruction, Fold | Average | Forward):
                recorder.servers.append(_note_of(instruction, bucket, period))
        obey(instructions)

    shard.obey = note


def _note_of(instruction: Fold | Average | Forward, bucket: int, period: int) -> ServerNote:
    members = tuple((one.worker, one.weight) for one in instruction.contributions)
    match instruction:
        case Fold(round_number=number):
            return ServerNote(bucket=bucket, what="fold", period=period, number=number, members=members)
        case Average(period=ended):
            return ServerNote(bucket=bucket, what="average", period=ended, number=0, members=members)
    push = instruction.push
    number, relay = push.round_number, push.worker
    return ServerNote(bucket=bucket, what="relay", period=push.period, number=number, members=members, relay=relay)


def _wrap(
    owner: Any, name: str, *, before: Callable[[], object] | None = None, after: Callable[[Any], object] | None = None
) -> None:
    """Let ``before`` and ``after`` (with what is returned) be called around a method of one object."""
    method = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before()
        result = method(*arguments, **options)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, call)
