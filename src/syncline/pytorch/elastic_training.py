"""An elastic training: what it makes calls with moves to the next epoch, the rest stays.

A training's hooks, buckets and optimizer stay as they are. What moves is what it makes collectives with: its control
streams (:class:`~syncline.updates.elastic_calls.ElasticControlStream`) and its bucket collectives, which all other
parts ask for rank, world size and members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from syncline import updates
from syncline.errors import UpdateError
from syncline.last_words import tell
from syncline.members import Elastic
from syncline.members.job_record import NO_FLAGS, Flags
from syncline.pytorch.epochs import FabricPlace, Recovery
from syncline.pytorch.fleet import Fleet
from syncline.updates.bucket_schedule import BucketSchedule
from syncline.updates.control import ControlStream
from syncline.updates.elastic_calls import ElasticCall, ElasticControlStream, ElasticReports, Positions
from syncline.updates.elastic_sharded import ElasticShardedUpdater
from syncline.updates.rule import Setting, Updater, UpdateRule


class ElasticTraining:
    """One training that goes on after losses: its streams and its bucket collectives move, the rest stays.

    ``plan`` returns the schedules of its buckets on the fleet's communicator, on streams from the given one on.
    """

    def __init__(self, recovery: Recovery, plan: Callable[[int], tuple[BucketSchedule, ...]]) -> None:
        self.recovery = recovery
        self._plan = plan
        self.load: Callable[[], None] | None = None
        """Loads the newest checkpoint on all ranks, where the settings name a folder."""
        self.leaving: Callable[[], int | None] = lambda: None
        """Returns who leaves at the end of this step; set by who knows the reports."""
        self._streams: list[ElasticControlStream] = []
        self._updater: Updater | None = None
        self._reports: ElasticReports | None = None

    def recover(self, error: BaseException) -> None:
        """Go on after a loss; before the training has begun it is an error, as in any job."""
        if self._updater is None:
            raise error
        self.recovery.recover(error)

    def open_stream(self, fleet: Fleet) -> ElasticControlStream:
        """Return a control stream that goes on in later epochs; every rank opens as many, in the same order."""
        (number,) = fleet.reserve_streams(1)
        stream = ElasticControlStream(
            fleet.communicator,
            stream=number,
            num_places=fleet.base.world_size,
            recover=self.recover,
        )
        self._streams.append(stream)
        return stream

    def extend(self, setting: Setting) -> Setting:
        """Return what a rule is given to work with in an elastic job."""
        self._reports = ElasticReports(self._streams[0], self._forget, self.recovery.flags)
        return replace(
            setting,
            recover=self.recover,
            reports=self._reports,
            start_commit=lambda label: self._streams[0].start_commit(lambda: torch.zeros(1), label),
            note_calls=self._note_calls,
            has_checkpoints=self.recovery.settings.checkpoint is not None,
        )

    def begin(self, updater: Updater) -> None:
        """Take part from now on."""
        self._updater = updater
        self.recovery.add(self)

    @property
    def iteration(self) -> int:
        """Steps that this rank has made."""
        return self._begun.iteration

    @property
    def streams(self) -> list[range]:
        """The streams that it uses in this epoch."""
        buckets = [range(one.stream, one.stream + 1) for one in self._begun.collectives.bucket_schedules]
        control = (range(stream.number, stream.number + 1) for stream in self._streams)
        return [*control, *buckets, *self._begun.streams]

    def positions(self) -> list[Positions]:
        """Return what this rank has of each stream's calls."""
        return [stream.positions() for stream in self._streams]

    def enter(self, fleet: FabricPlace) -> None:
        """Move all to the fleet's communicator."""
        for stream in self._streams:
            (number,) = fleet.reserve_streams(1)
            stream.enter(fleet.communicator, stream=number, num_places=fleet.base.world_size)
        collectives = self._begun.collectives
        first = fleet.reserve_streams(len(self._begun.buckets)).start
        collectives.enter(fleet.communicator, self._plan(first))

    def settle(self, told: Sequence[list[Positions]], control: ControlStream) -> None:
        """Share results that some have and others not, then begin again what nobody has."""
        for place, stream in enumerate(self._streams):
            stream.settle([positions[place] for positions in told], control)
        for stream in self._streams:
            stream.begin_again()
        self._begun.resume()

    def end_step(self) -> None:
        """Take note that a step has ended, with the same parameters on all members."""
        if isinstance(self._begun, ElasticShardedUpdater) and self._begun.must_go_back():
            self._go_back(self._begun)
        self.recovery.end_step(self.iteration)

    @property
    def flags(self) -> Flags:
        """What the first member has told of newcomers with the last pass."""
        return self._reports.flags if self._reports is not None else NO_FLAGS

    def end(self) -> None:
        """Take part no more: the fleet closes."""
        self.recovery.remove(self)

    def _go_back(self, updater: ElasticShardedUpdater) -> None:
        """Go on from the newest checkpoint, since what the step has left is not whole."""
        assert self.load is not None, "without checkpoints the loss of state is an error"
        before = updater.iteration
        updater.go_back(self.load)
        self.recovery.go_back(before + 1, updater.iteration)

    @property
    def _begun(self) -> Updater:
        assert self._updater is not None, "a training takes part once it has begun"
        return self._updater

    def _forget(self, commit: ElasticCall) -> None:
        for place, stream in enumerate(self._streams):
            stream.forget(before=stream.num_calls if place else commit.number)

    def _note_calls(self) -> Callable[[], None]:
        """Return what forgets the calls that were made so far, once all members are known to have made them."""
        made = [(stream, stream.num_calls) for stream in self._streams]

        def forget() -> None:
            for stream, number in made:
                stream.forget(before=number)

        return forget


def begin_elastic(
    fleet: Fleet, rule: UpdateRule, settings: Elastic | None, plan: Callable[[int], tuple[BucketSchedule, ...]]
) -> ElasticTraining | None:
    """Return how a training with ``rule`` goes on after losses; None if it does not, or does so by itself.

    Raises :class:`UpdateError` for models of one job of which not all can.
    """
    if fleet.is_elastic is not None and fleet.is_elastic != (settings is not None):
        raise UpdateError(
            "Either all models of a job are elastic or none is: give distribute() the same elastic= for each"
        )
    fleet.is_elastic = settings is not None
    survives = isinstance(rule, updates.Overlapped) or (isinstance(rule, updates.Clustered) and rule.is_served)
    if settings is not None or survives:
        tell(goes_on=True)
    if settings is None:
        return None
    if fleet.recovery is None:
        fleet.recovery = recovery = Recovery(fleet, settings, fleet.growth)
        fleet.on_close(lambda _: recovery.close())
    elif fleet.recovery.settings != settings:
        raise UpdateError(
            f"All models of a job have the same settings, here {fleet.recovery.settings!r}, not {settings!r}"
        )
    if survives:  # by itself
        return None
    fleet.recovery.begin()
    return ElasticTraining(fleet.recovery, plan)
