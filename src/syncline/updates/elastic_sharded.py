"""The sharded update in a job that outlives the loss of ranks: state goes on with owners, spares or replicas.

A pass is committed at its end: until then this rank keeps its own gradients, and reductions that were cut off begin
again from them. A step begins when all ranks have agreed to it in one small sum; who knows that they have steps what it
owns and what it is the spare of, without anybody's help. So after a loss all that are left are at the same step, and
what is divided (state, combined gradients that were not stepped on yet, parameters that were not gathered everywhere)
moves to the owners of the new epoch before anything else goes on. Nothing that was moved is dropped before all ranks
have it, so that a loss meanwhile finds it still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.updates.bucket import Bucket
from syncline.updates.control import ControlStream
from syncline.updates.elastic_calls import ElasticCall, recovering
from syncline.updates.inner import all_hyperparameters
from syncline.updates.ownership import Portions
from syncline.updates.peer_state import BESIDE, HeldState, PeerState, StateLostError, redistribute
from syncline.updates.report import PendingReport
from syncline.updates.rule import Setting
from syncline.updates.shard import segments_of
from syncline.updates.sharded_updater import ShardedUpdater

_VALUE = f"{BESIDE}value"
_LOST = -1
"""What a rank tells in place of its step."""


@dataclass(slots=True, kw_only=True)
class _UpdateUnderWay:
    """A step from its beginning until all parameters are gathered."""

    options: tuple[dict[str, Any], ...]
    """Hyper-parameters of each group."""
    commit: ElasticCall | None = None
    is_applied: bool = False
    is_made: bool = False
    """Whether it has changed the shards: not where state is lost."""

    @property
    def is_agreed(self) -> bool:
        """Whether every rank has come to this step."""
        return self.commit is not None and self.commit.is_complete


class ElasticShardedUpdater(ShardedUpdater):
    """The sharded update at work on one model of an elastic job; parameters are final when ``step()`` returns."""

    def __init__(self, setting: Setting, *, whole_parameters: bool, portions: Portions) -> None:
        super().__init__(setting, whole_parameters=whole_parameters, overlap_forward=False, portions=portions)
        assert setting.recover is not None and setting.start_commit is not None, "the job is elastic"  # noqa: PT018
        self._recover, self._start_commit = setting.recover, setting.start_commit
        self._kept = [torch.empty_like(bucket.wire_gradients) for bucket in self.buckets]
        self._begun: set[int] = set()
        """Buckets whose reductions began in the pass that is not committed."""
        self._report: PendingReport | None = None
        self._update_under_way: _UpdateUnderWay | None = None
        self._gathers: dict[int, Work] = {}
        self._fresh: dict[int, list[tuple[int, int]]] = {}
        """The ranges whose parameters are new, of each bucket that is not gathered."""
        self._former: list[HeldState] = []
        """What this rank had before state moved, until all ranks have what was moved."""
        self._is_empty = False
        """Whether the shards wait for state that ranks had before, and have none of their own to tell of."""
        self._num_moves = 0
        self._has_checkpoints = setting.has_checkpoints
        self._went_back: ElasticCall | None = None
        self.lost_state: StateLostError | None = None
        """What is missing until :meth:`go_back`; steps change nothing until then."""
        self._is_behind = False
        """Whether other ranks have ended the step that was under way here when state moved."""

    def release(self) -> None:
        """Let go of the memory."""
        super().release()
        for memory in (self._kept, self._former, self.shards):
            memory.clear()

    def reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket, and keep its gradients."""
        bucket.stage_gradients()
        bucket.wait_staged()
        self._kept[bucket.index].copy_(bucket.wire_gradients)
        self._begun.add(bucket.index)
        self._reduce(bucket)

    def finish_backward(self, report: PendingReport) -> None:
        """Wait for the combined gradients, until all ranks have them; go on without those that are lost meanwhile."""
        self._report = report
        while not report.is_done:
            with recovering(self._recover):
                self._gradients.wait_reductions()
                report.commit()
        self._end_pass()

    def step(self) -> None:
        """Step the shard once all ranks have come to it, and gather the parameters."""
        self._update_under_way = under_way = _UpdateUnderWay(options=all_hyperparameters(self.optimizer))
        while not under_way.is_agreed:
            with recovering(self._recover):
                under_way.commit = self._start_commit("begin of a step")
                under_way.commit.wait_in_epoch()
        if not under_way.is_applied:
            self._apply(under_way, gathers=True)
        while self._fresh:
            with recovering(self._recover):
                for index, work in tuple(self._gathers.items()):
                    work.wait()
                    self._take_gathered(index)
        self._update_under_way = None

    def wait_parameters(self, buckets: Iterable[int]) -> None:
        """Parameters are final when ``step()`` returns."""

    def resume(self) -> None:
        """Bring all that was agreed on to its end, divide state among the ranks of the new epoch, and begin again."""
        if self._report is not None and self._report.is_done:
            self._end_pass()
        under_way = self._update_under_way
        if under_way is not None and under_way.is_agreed and not under_way.is_applied:
            self._apply(under_way, gathers=False)
        self._gathers.clear()
        self._move()
        for index in sorted(self._begun):
            bucket = self.buckets[index]
            bucket.wire_gradients.copy_(self._kept[index])
            self._reduce(bucket)

    def admit(self, held: Sequence[HeldState]) -> None:
        """Go on with what the ranks of a larger job have ``held``, divided anew; every rank calls it before a step.

        Who has come brings nothing, and all count the same steps. Where a rank is lost meanwhile, the others go on.
        """
        self._former, self._is_empty = list(held), True
        with recovering(self._recover):  # whose last part is a move
            self._move()

    def must_go_back(self) -> bool:
        """Whether all ranks go back to a checkpoint at the end of this step; asked once for each.

        Where some ranks had ended it already when state was lost, all go back at the end of the next one.
        """
        is_behind, self._is_behind = self._is_behind, False
        return self.lost_state is not None and not is_behind

    def go_back(self, load: Callable[[], None]) -> None:
        """Let ``load`` bring back parameters, state and iteration on all ranks, between two steps."""
        while self.lost_state is not None:
            num_moves = self._num_moves
            load()
            if self._num_moves != num_moves:
                continue  # for a division that is over
            with recovering(self._recover):
                self._went_back = self._start_commit("return to a checkpoint")
                self._went_back.wait_in_epoch()
            if self._went_back is not None and self._went_back.is_complete:
                self.lost_state = self._went_back = None

    def _reduce(self, bucket: Bucket) -> None:
        self._gradients.add(bucket, self.collectives.start(bucket, Collective.REDUCE_SCATTER, self.step_number))

    def _end_pass(self) -> None:
        """Take the combined gradients of a pass that is committed."""
        if self._report is None:
            return
        report, self._report = self._report, None
        self._begun.clear()
        self._gradients.end_pass(report)
        self._gradients.inspect()

    def _apply(self, under_way: _UpdateUnderWay, *, gathers: bool) -> None:
        """Step what this rank keeps; ``gathers``: let the all-gathers follow."""
        gradients = self._gradients.hand_over()
        under_way.is_applied = True
        if self.lost_state is not None:
            return
        under_way.is_made = True
        present, factors = gradients.present(), gradients.factors()
        for bucket in self.buckets:
            self._step_shard(bucket, self.step_number, under_way.options, present=present, factors=factors)
            self._fresh[bucket.index] = [
                (segment.start, segment.stop) for segment in self.shards[bucket.index].segments
            ]
            if gathers:
                self._gather(bucket)
        self.step_number += 1

    def _gather(self, bucket: Bucket) -> None:
        self._gathers[bucket.index] = self.collectives.start(bucket, Collective.ALL_GATHER, self.step_number)

    def _take_gathered(self, index: int) -> None:
        self.buckets[index].unstage_parameters()
        del self._fresh[index], self._gathers[index]

    def _move(self) -> None:
        """Divide what the ranks keep as the schedules of the new epoch say; a collective, which may be cut off."""
        control = self._control_of_move()
        self._num_moves += 1
        self._gradients.forget_stepped()
        self._agree_on_step(control)
        source = self._redistribute(control)
        self._take_over(source)
        self._is_empty = False
        if source is None:
            self._fresh.clear()
        else:
            self._gather_anew(control)
        control.sum(torch.zeros(1), "all have what was moved")
        self._former.clear()

    def _agree_on_step(self, control: ControlStream) -> None:
        """See that all ranks are at the same step; what is lost on one is lost on all."""
        is_lost = self.lost_state is not None and not (self._went_back is not None and self._went_back.is_complete)
        told = control.gather_numbers(_LOST if is_lost else self.step_number, "steps made")
        if len({step for step in told if step != _LOST}) > 1:
            raise UpdateError(f"Ranks are at different steps after a loss: {told}; restart from a checkpoint")
        if _LOST in told:
            self.lost_state = self.lost_state or StateLostError(())
        is_ending = self._update_under_way is not None and self._update_under_way.is_made
        self._is_behind = not all(control.gather_numbers(is_ending, "ranks in the end of a step")) and is_ending

    def _redistribute(self, control: ControlStream) -> PeerState | None:
        """Return what this rank is to keep; None where state is lost, and a checkpoint has it."""
        if self.lost_state is not None:
            return None
        self._former += [] if self._is_empty else self._held()
        try:
            return redistribute(control, self._former, self._wanted(self.buckets), distance=self._distance)
        except StateLostError as error:
            if not self._has_checkpoints:
                raise
            self.lost_state = error
            return None

    def _gather_anew(self, control: ControlStream) -> None:
        """Let all ranks have the parameters that any of them lacks."""
        lacking = torch.tensor([float(bucket.index in self._fresh) for bucket in self.buckets])
        counts = control.sum(lacking, "buckets that are not gathered").tolist()
        buckets = [bucket for bucket, count in zip(self.buckets, counts, strict=True) if count]
        if not buckets:
            return
        values = [
            HeldState(part=segment.part, divided={_VALUE: bucket.stepped[segment.start : segment.stop]})
            for bucket in buckets
            for segment in segments_of(
                bucket.plan.slots, tuple(self._fresh.get(bucket.index, [(0, bucket.plan.num_elements)]))
            )
        ]
        source = redistribute(control, values, self._wanted(buckets), label="redistribution of parameters")
        for bucket in buckets:
            for segment in self.shards[bucket.index].segments:
                source.copy(segment.part, _VALUE, bucket.stepped[segment.start : segment.stop])
                if bucket.index in self._fresh:
                    self._fresh[bucket.index].append((segment.start, segment.stop))
            bucket.stage_parameters()
            self._gather(bucket)
        for bucket in buckets:
            self._gathers.pop(bucket.index).wait()
            bucket.unstage_parameters()
            self._fresh.pop(bucket.index, None)
