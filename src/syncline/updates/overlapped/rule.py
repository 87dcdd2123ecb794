"""The overlapped update as an update rule: the user's choice, and the updater that does it for one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch

from syncline.arguments import Count, Whole, check_fields
from syncline.errors import ConfigurationError, UpdateError
from syncline.schedule.replicas import find_parties
from syncline.updates.bucket import Bucket, placed, take_written
from syncline.updates.combinations import OF_INDEPENDENT_RANKS, WHOLE_STATE, Combination, one_gateway
from syncline.updates.inner import check_is_real, is_torchs, make_inner, why_not_independent
from syncline.updates.overlapped.link import BucketLayout, Feed
from syncline.updates.overlapped.placement import DEDICATED, ServerLayout, place_relays, place_shards, server_ranks
from syncline.updates.overlapped.rebase import Collect, Rebase
from syncline.updates.overlapped.server_client import OverlappedStatistics, ServerClient
from syncline.updates.report import PendingReport
from syncline.updates.rule import MemberNews, NonfiniteOrigin, Setting, WholeRule, WholeUpdater
from syncline.updates.state import StateSource

Kind = Literal["swap", "rebase"]
FRESH = 8
"""With gradients that may be staler than so many iterations "rebase" is not the default (decision 0012)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped(WholeRule):
    """Step on the own gradient at once; fold in the global gradient of M workers when it comes.

    `docs/mechanisms.md`, Overlapped update.

    ``period`` (K): after so many iterations the parameters are averaged over all workers; with M = N and shared servers
    by an all-reduce, else through the servers, which costs slow links more. ``quorum`` (M): so many workers' gradients
    make a global one. By default it is those of all workers that live: when one dies the others go on (and from then on
    end periods through the servers), as long as they are more than half of the workers, or half with the lowest rank
    among them; for a rank cannot tell a death from a cut of the network, of which at most one side may go on. A number
    is what is needed to the end: with fewer workers the job ends; with M of at most N/2, both sides of a cut go on.
    With the default, and shared servers, an elastic job takes newcomers in when a period ends, and until a rank is
    lost a site sums its gradients before they leave it (see :mod:`syncline.updates.overlapped`).

    ``servers``: ``"shared"`` keeps the server shards on the ranks, spread by what their links carry;
    ``"dedicated:k"`` on the last k ranks, which do not train: there, ``optimizer.is_server`` is True, and
    ``optimizer.serve()`` stands in place of the training loop. ``rule``: ``"swap"`` replaces the own gradient by the
    global one in the sum that the optimizer is fed, which is right for plain SGD; ``"rebase"`` redoes own steps on top
    of the global ones, which is better wherever the optimizer keeps anything (momentum, Adam) as long as gradients are
    fresh (see :mod:`.rebase`; it keeps two copies of the parameters and one of the state): one or two iterations late
    it takes about as many samples as synchronous training, and rank 0 says after a minute where they are later.
    Default: ``"swap"``, but ``"rebase"`` with momentum and optimizers other than SGD where ``max_staleness`` is at
    most 8.

    ``max_staleness``: with more own iterations than that for which no global gradient has come, ``step()`` waits; 0 is
    synchronous training, None never waits. When too few workers live, or no server, each gets :class:`QuorumLostError`;
    ``distribute(..., save_on_failure=...)`` saves what they have. :meth:`literal` adds gradients as the sources say.

    With M < N a slow worker makes fewer steps than the others in a period, so train until ``optimizer.iteration`` has
    come far enough, not for a number of steps. Parameters are equal on all ranks only when a period has ended; end it
    with ``optimizer.end_period()`` before you save or evaluate a model. Buffers (BatchNorm) stay each rank's own.

    Raises :class:`ConfigurationError` for values that are out of range, ``distribute()`` also for a quorum above the
    number of workers, and :class:`UpdateError` for an optimizer that wants a closure, for complex parameters, and with
    ``"rebase"`` for an optimizer whose steps cannot be made again for some parameters alone. ``step()``, on the
    training thread, raises :class:`QuorumLostError`, and :class:`DeadlineError` where nothing came within
    ``timeout_s``.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Overlapped(period=64, max_staleness=8))
    >>> while optimizer.iteration < 3:
    ...     model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
    >>> optimizer.end_period()
    """

    period: Count = 64
    quorum: Count | None = None
    servers: Annotated[str, '"shared" or "dedicated:k"'] = "shared"
    rule: Kind | None = None
    max_staleness: Whole | None = 8
    bucket_bytes: Count = 512 * 1024
    """Smaller than with collectives, so that a small model is spread over several servers too."""
    is_literal: bool = field(default=False, init=False)
    combinations: ClassVar[tuple[Combination, ...]] = (
        *OF_INDEPENDENT_RANKS,
        WHOLE_STATE,
        one_gateway("in which every rank sends its gradients to the servers itself"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.servers != "shared" and not self.servers.startswith(DEDICATED):
            raise ConfigurationError(f'Overlapped: servers must be "shared" or "dedicated:k", not {self.servers!r}')

    @classmethod
    def literal(cls, **settings: Any) -> Overlapped:
        """Return the rule that the sources describe; settings are those of :class:`Overlapped`, without ``rule``.

        A global gradient is added to the own one of the step at hand. The worker's own part of it was stepped on
        before, so it counts twice, and the loss is worse than with any other rule. Raises :class:`ConfigurationError`
        for a ``rule``.

        >>> syncline.Overlapped.literal(period=4).is_literal
        True
        """
        literal = cls(**settings)
        if literal.rule is not None:
            raise ConfigurationError(f"Overlapped.literal: rule must be left out, not {literal.rule!r}")
        object.__setattr__(literal, "is_literal", True)
        return literal

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` for a closure, complex parameters, and steps that cannot be redone in part."""
        WholeRule.check(self, optimizer)
        check_is_real(optimizer, "Overlapped")
        if self.kind(optimizer) != "rebase" or is_torchs(type(optimizer)):
            return
        if why := why_not_independent(partial(make_inner, optimizer, 0)):
            raise UpdateError(
                f'Overlapped(rule="rebase"), the default here, redoes steps of some parameters alone, which does not '
                f'suit {type(optimizer).__name__}: {why}; use rule="swap", or update=AllReduce()'
            )

    def start(self, setting: Setting) -> OverlappedUpdater:
        """Begin to work on a model, and to serve the buckets whose servers are here."""
        return OverlappedUpdater(setting, self)

    def kind(self, optimizer: torch.optim.Optimizer) -> Kind | Literal["literal"]:
        """Return the rule that is meant with ``optimizer``: of plain SGD steps add up as gradients do, of others not.

        Steps that are redone many times on few global gradients are no better than those that are left alone.
        """
        is_fresh = self.max_staleness is not None and self.max_staleness <= FRESH
        if self.is_literal:
            return "literal"
        is_plain = isinstance(optimizer, torch.optim.SGD) and not any(
            group["momentum"] for group in optimizer.param_groups
        )
        return self.rule or ("rebase" if is_fresh and not is_plain else "swap")

    def layout(self, world_size: int) -> ServerLayout:
        """Return what follows for so many ranks; raises :class:`ConfigurationError` if the quorum is too large."""
        servers = server_ranks(self.servers, world_size)
        is_shared = self.servers == "shared"
        workers = tuple(rank for rank in range(world_size) if is_shared or rank not in servers)
        quorum = self.quorum if self.quorum is not None else len(workers)
        if quorum > len(workers):
            raise ConfigurationError(f"Overlapped: quorum {quorum} is more than the {len(workers)} workers")
        return ServerLayout(
            world_size=world_size,
            workers=workers,
            servers=servers,
            quorum=quorum,
            period=self.period,
            ends_on_tree=quorum == world_size,
            shrinks=self.quorum is None,
        )


class OverlappedUpdater(WholeUpdater):
    """The overlapped update at work on one model."""

    is_synchronous = False

    def __init__(self, setting: Setting, rule: Overlapped) -> None:
        super().__init__(setting)
        communicator = self.collectives.communicator
        layout, kind = rule.layout(communicator.world_size), rule.kind(self.optimizer)
        plans, topology = [bucket.plan for bucket in self.buckets], communicator.topology
        num_bytes = [plan.num_bytes for plan in plans]
        servers = place_shards(topology, layout.servers, num_bytes)
        relays = place_relays(layout, find_parties(topology, "auto"), servers, num_bytes)
        buckets = [
            BucketLayout(
                index=plan.index,
                stream=self.collectives.bucket_schedules[plan.index].stream,
                connection_class=self.collectives.classes[plan.index],
                num_elements=plan.num_elements,
                dtype=plan.dtype,
                world_size=layout.world_size,
                server=server,
                relay_of=relay_of,
            )
            for plan, server, relay_of in zip(plans, servers, relays, strict=True)
        ]
        self._collects = [Collect() for _ in buckets if kind == "rebase"]
        self._rebase = Rebase(self.buckets, self.optimizer) if kind == "rebase" else None
        self.client = ServerClient(
            communicator.open_port(f"overlapped update {layout}"),
            layout,
            buckets,
            max_staleness=rule.max_staleness,
            feeds=self._collects or [Feed(replaces=kind == "swap") for _ in buckets],
            copiers=[bucket.copier for bucket in self.buckets],
            timeout_s=self.collectives.timeout_s,
            trace=self.collectives.trace,
            newcomers=setting.newcomers,
        )
        self._weight = 0.0
        self._nonfinite = 0
        """Position, counted from 1, of the parameter where the last pass has a gradient that is not finite; else 0."""
        self._has_told_nonfinite = False
        self._num_before = 0
        self.is_server = not self.client.links
        self._note_start()
        self.client.start()

    def _note_start(self) -> None:
        """Take note of what a period begins with, which a checkpoint may have brought."""
        for link, bucket in zip(self.client.links, self.buckets, strict=False):
            link.keep_start(bucket.parameters)
        if self._rebase is not None:
            self._rebase.begin()

    def load_state(self, source: StateSource) -> None:
        """Take the whole state, for steps that are redone too."""
        super().load_state(source)
        if self._rebase is not None:
            self._rebase.take_state()

    @property
    def iteration(self) -> int:
        """Iterations of the fleet: all ranks reach a number at about the same time.

        A period that was ended early counts the iterations of the worker that came furthest in it.
        """
        return self._num_before + self.client.iteration

    def go_on_from(self, iteration: int) -> None:
        """Count from there on."""
        self._num_before = iteration - self.client.iteration

    @property
    def nonfinite_origin(self) -> NonfiniteOrigin | None:
        """Where another rank told that NaN or infinity began first."""
        return self.client.nonfinite

    @property
    def is_at_period_start(self) -> bool:
        """Whether a period has just ended, so that all ranks have the same parameters."""
        return self.client.clock.num_steps == 0

    @property
    def checkpoint_writer(self) -> int | None:
        """Of a fleet that goes on without lost ranks, or has ranks that only serve, the lowest worker that lives.

        A server that all workers have left is not one of them, so it writes nothing.
        """
        layout, lost = self.client.layout, self.client.lost
        if layout.quorum == layout.world_size and not layout.shrinks:
            return None
        return min((rank for rank in layout.workers if rank not in lost), default=layout.workers[0])

    def begin_backward(self) -> None:
        """Raise what went wrong since the last step; a server has no gradients to give."""
        self._check_trains()
        self.client.raise_failure()

    def serve(self) -> None:
        """Wait while the communication thread serves; a cut connection or a closed fleet raises."""
        self.client.serve()

    def reduce(self, bucket: Bucket) -> None:
        """Wait for the step: the own gradient is pushed as it is used, clipped if the user does so."""

    def finish_backward(self, report: PendingReport) -> Sequence[bool]:
        """Take note of how many samples are behind the gradients."""
        self._weight = report.total
        _, self._nonfinite, *_ = map(int, report.notes[0]) if report.notes else (0, 0)
        return report.present

    def step(self) -> None:
        """Push the own gradients, fold in what has come, and step the user's optimizer; at its end, average."""
        self._check_trains()
        trace = self.collectives.trace
        start_ns = trace.now_ns()
        if self.is_at_period_start:
            self._note_start()
        if self._nonfinite and not self._has_told_nonfinite:
            self._has_told_nonfinite = True
            self.client.tell_nonfinite(self.iteration + 1, self._nonfinite - 1)
        take_written(self.buckets)
        self.client.step([bucket.gradients for bucket in self.buckets], weight=self._weight)
        if self._rebase is None:
            self._show_gradients()
            self.optimizer.step()
        else:
            own = [link.unsettled() for link in self.client.links]
            self._rebase.step([collect.collected() for collect in self._collects], own)
        self._weight = 0.0
        trace.span("local step", "update", start_ns, trace.now_ns(), step=self.step_number)
        self.step_number += 1
        if self.client.clock.is_last:
            self.end_period()

    def end_period(self) -> None:
        """End the period now, if it has begun: average over all workers. Every worker calls it, or ends its period."""
        if self.is_at_period_start:
            return
        if self._rebase is not None:
            self._rebase.finish([link.unsettled() for link in self.client.links])
        trace = self.collectives.trace
        start_ns, number = trace.now_ns(), self.client.counts.num_periods
        on_tree = self.client.layout.ends_on_tree
        if not on_tree or not self.client.end_together(self.collectives.control, self.buckets):
            self.client.end_period([bucket.parameters for bucket in self.buckets])
        trace.span("period end", "update", start_ns, trace.now_ns(), period=number)

    def take_news(self) -> MemberNews | None:
        """Return once what was told of members when the last period ended."""
        news, self.client.news = self.client.news, None
        return news

    @property
    def mean_staleness(self) -> float:
        """As the statistics tell it."""
        return self.client.statistics().mean_staleness

    def statistics(self) -> OverlappedStatistics:
        """Return what was stale, dropped and waited for on this rank."""
        return self.client.statistics()

    def finish(self) -> None:
        """End the period that is under way: after a close, all workers have the same parameters."""
        if self.is_server:
            self.serve()
            return
        self.client.is_ending = True
        self.end_period()
        self.client.drain()

    def close(self) -> None:
        """Release everything; what is under way is given up."""
        self.client.close()

    def _check_trains(self) -> None:
        if self.is_server:
            raise UpdateError(
                f"rank {self.collectives.rank} is a dedicated server, which does not train; write `if "
                "optimizer.is_server: optimizer.serve()` before the training loop, and the loop under its `else:`"
            )

    def _show_gradients(self) -> None:
        """Let the optimizer see what others have for parameters without an own gradient."""
        for bucket, slot, tensor in placed(self.buckets):
            if tensor.grad is None and bool(bucket.gradient(slot).any()):
                tensor.grad = bucket.shown_gradient(slot)
