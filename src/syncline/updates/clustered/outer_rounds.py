"""The servers' outer rounds, reckoned and moved: a weighted mean of all clusters' vectors for each of them.

- The mean is the same for all: one all-reduce of what each brings, weighted by its share. A server sends about 2 (C-1)/C of a vector, however many clusters there are.
- Each cluster weights the others in its own way (`Clustered.literal()`, but not in averages of parameters): one
  all-gather, so that each server has all vectors, and reckons its own mean and the new table of contributions. A server
  receives C-1 vectors.

Both run on the schedule that the planner finds for the servers' part of the network.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable

import numpy as np

from syncline.runtime.port import Port
from syncline.runtime.tags import NUMBER_MASK, first_tag
from syncline.schedule import Collective, Layout, Schedule, Target, choose
from syncline.topology import Topology
from syncline.updates.clustered.contribution import (
    MIN_WEIGHT,
    mixing_shares,
    mixing_weights,
    resized,
    update_contributions,
)
from syncline.updates.clustered.instructions import Run
from syncline.updates.clustered.messages import Participants
from syncline.updates.clustered.record_schedule import Kind, Record
from syncline.updates.clustered.schedule_executor import ScheduleExecutor, Slice
from syncline.updates.clustered.view import View
from syncline.updates.flat import Vector, combine, shares

SLICE_BYTES = 1 << 20
MAX_SCHEDULES = 256
FIRST_SLICE = 16
"""Slices of outer rounds are numbered from here; below are the lanes of messages."""

Finish = Callable[[Run, Vector, tuple[float, ...]], None]


class OuterRounds:
    """Runs the outer rounds that the protocol asks for. On the loop's thread alone."""

    def __init__(self, port: Port, topology: Topology, *, stream: int, view: View, is_uniform: bool) -> None:
        self._port = port
        self._topology = topology
        self._stream = stream
        self._view = view
        self._is_uniform = is_uniform
        self._schedules: dict[tuple[Participants, Collective], Schedule] = {}
        self._executors: dict[tuple[int, Participants], ScheduleExecutor] = {}
        self._abandoned: list[ScheduleExecutor] = []
        self.sent_bytes = 0

    def run(self, run: Run, contributions: tuple[float, ...], finish: Finish) -> None:
        """Begin an outer round; ``contributions`` is the table as this cluster knows it."""
        if self._is_uniform or run.record.kind is Kind.AVERAGE:
            self._run_shared(run, contributions, finish)
        else:
            self._run_cosine(run, contributions, finish)

    def abandon(self, record: Record, participants: Participants) -> None:
        """Give up an outer round."""
        executor = self._executors.pop((record.index, participants), None)
        if executor is not None:
            executor.abandon()
            self._abandoned.append(executor)

    def _run_shared(self, run: Run, contributions: tuple[float, ...], finish: Finish) -> None:
        mean = run.payload.copy().scale(shares(run.samples)[_place(run, self._port.rank)])
        schedule = self._schedule(run.participants, Collective.ALL_REDUCE, mean.shape.num_bytes)
        slices = []
        for part in mean.parts:
            layout = Layout.build(schedule, part.numel(), max(1, SLICE_BYTES // part.element_size()))
            slices += [Slice(tensor=part, offsets=offsets) for offsets in layout.slices]
        self._executor(run, schedule, slices, lambda: finish(run, mean, contributions))

    def _run_cosine(self, run: Run, contributions: tuple[float, ...], finish: Finish) -> None:
        """Gather all vectors: part by part, those of all clusters one after the other."""
        import torch

        own: Vector = run.payload
        place = _place(run, self._port.rank)
        num = len(run.participants)
        schedule = self._schedule(run.participants, Collective.ALL_GATHER, num * own.shape.num_bytes)
        gathered = [torch.empty(num * part.numel(), dtype=part.dtype) for part in own.parts]
        for whole, part in zip(gathered, own.parts, strict=True):
            whole[place * part.numel() : (place + 1) * part.numel()].copy_(part)
        slices = [Slice(tensor=whole, offsets=schedule.offsets(whole.numel())) for whole in gathered]

        def done() -> None:
            vectors = [own.shape.empty() for _ in range(num)]
            for number, whole in enumerate(gathered):
                for vector, piece in zip(vectors, whole.chunk(num), strict=True):
                    vector.parts[number].copy_(piece)
            finish(run, *self._weigh(run, vectors, contributions))

        self._executor(run, schedule, slices, done)

    def _weigh(
        self, run: Run, vectors: list[Vector], contributions: tuple[float, ...]
    ) -> tuple[Vector, tuple[float, ...]]:
        """Return this cluster's mean, weighted by past contributions, and the table with this period in it."""
        size = len(self._view.clusters(run.record.term))
        table = resized(contributions, size)
        present = [cluster for cluster, _ in run.participants]
        own = present[_place(run, self._port.rank)]
        weights = mixing_weights(table, own, present, min_weight=MIN_WEIGHT)
        mixed = mixing_shares(run.samples, weights[present])
        gram = np.zeros((size, size))
        for i, first in enumerate(present):
            for j, second in enumerate(present[: i + 1]):
                gram[first, second] = gram[second, first] = vectors[i].dot(vectors[j])
        updated = update_contributions(table, gram, present)
        return combine(vectors, mixed.tolist()), tuple(updated.ravel().tolist())

    def _schedule(self, participants: Participants, collective: Collective, num_bytes: int) -> Schedule:
        key = (participants, collective)
        if key not in self._schedules:
            if len(self._schedules) >= MAX_SCHEDULES:
                self._schedules.clear()
            servers = self._topology.restricted([rank for _, rank in participants])
            target: Target = "rank_order" if collective is Collective.ALL_GATHER else "balanced"
            self._schedules[key] = choose(servers, collective, num_bytes, target=target)
        return self._schedules[key]

    def _executor(self, run: Run, schedule: Schedule, slices: list[Slice], done: Callable[[], None]) -> None:
        key = (run.record.index, run.participants)
        attempt = zlib.crc32(json.dumps([*key, schedule.digest]).encode()) & NUMBER_MASK

        def finished() -> None:
            self.sent_bytes += sum(executor.sent_bytes.values())
            del self._executors[key]
            for abandoned in self._abandoned:
                abandoned.forget()
            self._abandoned.clear()
            done()

        executor = ScheduleExecutor(
            self._port,
            schedule,
            [rank for _, rank in run.participants],
            slices,
            first_tags=[first_tag(self._stream, attempt, FIRST_SLICE + number) for number in range(len(slices))],
            on_done=finished,
        )
        self._executors[key] = executor
        executor.start()


def _place(run: Run, rank: int) -> int:
    return [server for _, server in run.participants].index(rank)
