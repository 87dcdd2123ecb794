"""Local steps as users ask for them; :mod:`syncline.updates.local_steps_updater` does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch

from syncline.arguments import Count, check_fields
from syncline.errors import ConfigurationError
from syncline.schedule.period import USUAL
from syncline.schedule.replicas import Replicate
from syncline.updates.allreduce import AllReduce
from syncline.updates.attendance import Grace
from syncline.updates.combinations import COMPRESSED, OF_DIVIDING_PARTIES, OF_LOCAL_STEPS, Combination
from syncline.updates.compression import Compress, compress
from syncline.updates.elastic_local_steps import ElasticLocalStepsUpdater
from syncline.updates.inner import check_is_real
from syncline.updates.late_parties import GraceLocalStepsUpdater
from syncline.updates.local_steps_updater import LocalStepsUpdater, Nesterov, Pace
from syncline.updates.party import PartyRule
from syncline.updates.rule import Setting
from syncline.updates.sharded import Sharded

__all__ = ["Grace", "LocalSteps", "Nesterov"]

_WHOLE = AllReduce(bucket_bytes=512 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps(PartyRule):
    """Sites make ``period`` steps by themselves, then what all have changed is averaged: for links that are slow.

    A link between sites carries the parameters once in each direction in a period, in place of the gradients in each
    batch. `docs/mechanisms.md`, Local steps.

    ``period``: steps between two rounds of a parameter. Twice as many halve what the links carry; the loss then needs
    more samples, the more so the more ranks' data differ. ``"auto"``: from 2 up, the shortest power of two whose rounds
    hold up steps for at most 5 % of the time, as all ranks measure it while they train; links are then as busy as they
    can be, and two runs need not have the same bits. None: that, but 16 at most; and 16 with ``outer``, without
    ``overlap``, and with a ``pace`` that measures nothing. ``outer``: what a round's averaged difference does. None
    takes the average, which is best where ranks see alike data or periods are short; :class:`Nesterov` gives the
    difference momentum (DiLoCo), for periods of a hundred steps and more. ``fragments``: parts of the parameters whose
    rounds follow each other (at most one after a step), so that links are busy evenly, and a rank keeps a copy of one
    part alone while it is on its way. ``overlap``: go on computing meanwhile, and merge a fragment when the next one
    goes. The step then takes no longer than computing, if the links carry a fragment in that time; the loss is that of
    averages ``period / fragments`` steps old. False waits for each round. ``parties``: who makes local steps together.
    ``"auto"``: what is below the first switch that divides the network (sites, racks, hosts of several ranks; on one
    host each rank is a party). The ranks of a party average their gradients in every batch, as with ``AllReduce()``, so
    that fewer parties drift apart, and slow links carry less. Others are named as with ``Sharded(replicate=)``; None:
    each rank. ``pace``: how many steps each party makes in a period. ``"equal"``: as many, so that the slowest holds up
    the others. ``"own"``: the fastest makes ``period``, others as many as they can make meanwhile, by what all measure
    while they train; or ``{"h0": 1.0, "h1": 0.5, ...}``, the speed of each host (a party is as fast as its slowest),
    which measures nothing. A party's move then has the weight of its samples for each step, so that each sample counts
    the same. :class:`Grace`: as many, but rounds wait for a late party for a while only, and go on without it until it
    comes; what it has moved meanwhile counts in its next round. All ranks count the same rounds, so a loop may end by
    ``optimizer.statistics().num_rounds``.
    ``compress``: what slow links carry of rounds, as with :class:`Sharded`.
    ``within``: what the ranks of a party do in every batch. ``AllReduce()``: each steps the user's optimizer, and keeps
    all of its state. ``Sharded()``: each keeps and steps its part, for models whose state has no room on one rank;
    ``align``, ``cost`` and ``portions`` (not those of hosts) count within the party. Its ``bucket_bytes`` say
    how much moves together, about; rounds cut buckets where a fragment ends, but not if they are compressed.

    The optimizer's state is each party's own; with PyTorch's SGD momentum follows the mean, of which rounds tell, but
    for ``outer`` and :class:`Grace` (:mod:`syncline.updates.mean_momentum`). Parameters are equal on all ranks when
    ``optimizer.end_period()`` has returned, which :func:`save_checkpoint` calls by itself; call it before you evaluate.
    Ranks may make different numbers of steps: ``end_period()``, and closing the fleet, follow the others until all end.
    Ranks of one party make as many, and so do all where a loop trains several models. Buffers are each rank's own, and
    become rank 0's when a period is ended.

    Each rank keeps a copy of the parameters, with ``outer`` two. A checkpoint holds the optimizer state of every party,
    so that training goes on to the bit with as many parties; with more, some begin with the state of others. With
    ``elastic=True`` the ranks that are left go on; what a lost one has moved since its last round is lost, and its
    optimizer's state. Newcomers come in when a round ends, with the global parameters and the optimizer's state of the
    nearest member.

    Raises :class:`ConfigurationError` for values that are out of range, for what does not suit a party in ``within``,
    for ``period="auto"`` with ``outer`` or :class:`Grace`, and for it and ``pace="own"`` without ``overlap``, and from
    ``distribute()`` for a ``pace`` that leaves out a host, or a quorum of more parties than there are; that raises
    :class:`TopologyError` for parties that are not in the topology, and :class:`UpdateError` for an optimizer that
    wants a closure, or complex parameters. ``step()`` raises what a collective does, and, on every rank, that
    parameters of a rank are not finite.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.LocalSteps(period=8))
    >>> model(x).sum().backward(); optimizer.step(); optimizer.end_period()
    >>> optimizer.statistics().num_steps
    1
    """

    period: Count | Literal["auto"] | None = None
    outer: Nesterov | None = None
    fragments: Count = 16
    overlap: bool = True
    parties: Replicate | None = "auto"
    pace: Pace = field(default="equal", hash=False)
    compress: Compress = "off"
    within: AllReduce | Sharded = _WHOLE
    combinations: ClassVar[tuple[Combination, ...]] = (
        *OF_LOCAL_STEPS,
        *OF_DIVIDING_PARTIES,
        Combination(
            "elastic=True",
            "with within=Sharded(): a part of the state would be lost with a rank",
            "take within=AllReduce(), or leave out elastic=",
            when=lambda rule, _: rule.divides,
        ),
        Combination(
            "elastic=True",
            "with pace=Grace(): a job that outlives losses counts on everyone in each round",
            'take pace="own" for ranks that are slow, or leave out elastic=',
            when=lambda rule, _: isinstance(rule.pace, Grace),
        ),
        *COMPRESSED,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_within("party", "give compress to LocalSteps itself")
        if self.period is None and not self._can_be_measured:
            object.__setattr__(self, "period", USUAL)
        if self.period == "auto" and (self.outer is not None or not self.overlap):
            raise ConfigurationError(
                'LocalSteps: period="auto" is the shortest that links carry while ranks compute, so it goes neither '
                "with outer, which wants long periods, nor with overlap=False, which waits; give a number of steps"
            )
        if self.period == "auto" and isinstance(self.pace, Grace):
            raise ConfigurationError(
                'LocalSteps: period="auto" follows from how long all ranks wait for rounds, and pace=Grace() lets them '
                "not wait; give a number of steps, or leave out pace"
            )
        if not self.pace:
            raise ConfigurationError(
                f"LocalSteps: pace must give the speed of each host, as {{'h0': 1.0}}, not {self.pace}"
            )
        if isinstance(self.pace, Mapping):  # ranks compare rules as texts
            object.__setattr__(self, "pace", dict(sorted(self.pace.items())))
        if self.pace == "own" and not self.overlap:
            raise ConfigurationError(
                'LocalSteps: pace="own" measures how long steps take while rounds pass under them, so it does not go '
                "with overlap=False, which waits; give the speed of each host, as pace={'h0': 1.0, 'h1': 0.5}"
            )

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` for complex parameters, and what the rule ``within`` cannot serve."""
        PartyRule.check(self, optimizer)
        check_is_real(optimizer, "LocalSteps")

    @property
    def _can_be_measured(self) -> bool:
        """Whether rounds tell which period links can carry."""
        return self.outer is None and self.overlap and isinstance(self.pace, str)

    @property
    def why_no_newcomers(self) -> str:
        """Why nobody can come into a job with it; empty if ranks can."""
        if self.parties not in (None, "host", "auto"):
            return "LocalSteps(parties=) names parts of its topology, and newcomers may be in none of them"
        return (
            ""
            if not isinstance(self.pace, Mapping)
            else "LocalSteps(pace=) gives the speeds of hosts, and newcomers may come on others"
        )

    def start(self, setting: Setting) -> LocalStepsUpdater:
        """Begin to work on a model; every rank calls it, on the training thread."""
        compress(setting, self.compress)
        kind: Callable[..., LocalStepsUpdater] = partial(LocalStepsUpdater, pace=self.pace)
        if isinstance(self.pace, Grace):
            kind = partial(GraceLocalStepsUpdater, grace=self.pace)
        elif setting.recover is not None:
            kind = partial(ElasticLocalStepsUpdater, pace=self.pace)
        return kind(
            setting,
            within=self.within,
            period=self.period,
            outer=self.outer,
            fragments=self.fragments,
            overlap=self.overlap,
            parties=self.parties,
        )
