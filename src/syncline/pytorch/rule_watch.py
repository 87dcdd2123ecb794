"""What rank 0 says once, a minute after a training's first step: which other update rule would take less, or no more.

Where links hold up steps of ``AllReduce`` or ``Sharded``, codes or local steps send less. Where they are fast, a rule
that trades exactness for time gives it away for nothing; where global gradients of ``Overlapped`` come late, it takes
more samples. Computing and waiting are rank 0's own, as measured in that minute; what links need is the bound for all
parameters on the topology, so that only what differs clearly is said. Of ``LocalSteps`` all ranks tell how fast they
compute, so a party that holds the others up is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from syncline.observe import say
from syncline.pytorch.installation import Installation
from syncline.schedule import Collective, CostModel, lower_bound
from syncline.schedule.period import LESS, USUAL, shortest_period
from syncline.tensors.codec import Codec
from syncline.topology import Topology
from syncline.units import format_duration
from syncline.updates import AllReduce, LocalSteps, Sharded, UpdateRule
from syncline.updates.compression import choose_sites, time_with_codes_s
from syncline.updates.local_steps_updater import LocalStepsUpdater

FIRST_S = 60.0
MATTERS = 0.3
"""Links that need a smaller part of a step hold nobody up so that another rule would be worth its price."""
NO_MORE = 1.05
"""What a step by another rule takes at most, as a part of a step now, to be as fast."""
_CODE_BITS = 8
FRESH = 2.0
"""So many iterations late, on average, gradients of ``Overlapped`` train about as synchronous ones do (0012)."""


class RuleWatch:
    """One training's; rank 0 alone speaks, and nothing is sent."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._began: tuple[float, int, float, Topology] | None = None
        self._is_over = False

    def end_step(self) -> None:
        """Take note of a step; after the first minute, say what there is to say."""
        training, fleet = self._installation.training, self._installation.fleet
        if self._is_over or training is None or fleet.rank != 0:
            return
        now_s, iteration = time.monotonic(), training.updater.iteration
        if self._began is None or self._began[3] is not fleet.topology:  # links may have other rates since
            self._began = now_s, iteration, sum(fleet.statistics().waited_s.values()), fleet.topology
        began_s, first, waited_before_s, _ = self._began
        if now_s - began_s < FIRST_S or iteration == first:
            return
        self._is_over = True
        rule, updater, told = self._installation.rule, training.updater, ""
        if isinstance(updater, LocalStepsUpdater) and isinstance(rule, LocalSteps) and rule.pace == "equal":
            told = own_pace(updater.party_speeds, updater.parties, fleet.topology)
        told = told or late_gradients(updater.mean_staleness)
        if not told and fleet.topology.has_rates:
            num_bytes = sum(each.nbytes for each in training.model.parameters() if each.requires_grad)
            step_s = (now_s - began_s) / (iteration - first)
            waited_s = (sum(fleet.statistics().waited_s.values()) - waited_before_s) / (iteration - first)
            told = other_rule(rule, fleet.topology, num_bytes, step_s, min(waited_s, step_s))
        if told:
            fleet.trace.instant(told, "lookout")
            say(told)


def own_pace(speeds: Sequence[float], parties: Sequence[Sequence[int]], topology: Topology) -> str:
    """Say which party holds the others up where all make as many steps, and what their own pace would bring; or ""."""
    slowest = min(range(len(speeds)), key=lambda party: speeds[party], default=0)
    if not speeds or speeds[slowest] > LESS:
        return ""
    weights = [len(ranks) for ranks in parties]
    ratio = sum(weight * speed for weight, speed in zip(weights, speeds, strict=True)) / sum(weights) / speeds[slowest]
    hosts = dict.fromkeys(topology.host_of(rank).name for rank in parties[slowest])
    return (
        f"the party of {', '.join(hosts)} computes at {speeds[slowest]:.0%} of the fastest one's speed, and all make "
        f'as many steps; by prediction LocalSteps(pace="own") takes {ratio:.1f} times as many samples in the same time'
    )


def late_gradients(mean_staleness: float) -> str:
    """Say that global gradients come too late to train as well as synchronous steps do; "" if they do not."""
    if mean_staleness <= FRESH:
        return ""
    return (
        f"global gradients of Overlapped() come {mean_staleness:.1f} iterations late on average, and from {FRESH:g} on "
        "it takes more samples than synchronous training: compare losses, or take LocalSteps(), which sends less "
        "(`syncline advise` compares all rules)"
    )


def other_rule(rule: UpdateRule, topology: Topology, num_bytes: int, step_s: float, waited_s: float) -> str:
    """Say which rule would take less than a step that takes ``step_s``, ``waited_s`` of them waiting; "" if none."""
    links_s = lower_bound(topology, Collective.ALL_REDUCE, num_bytes) / CostModel().payload_share
    computed_s = step_s - waited_s
    if not isinstance(rule, AllReduce | Sharded):
        exact_s = computed_s + links_s  # nothing of it under the backward pass
        if exact_s > NO_MORE * step_s:
            return ""
        return (
            f"a step of {type(rule).__name__}() takes {format_duration(step_s)} on this network, and by prediction one "
            f"of Sharded() at most {format_duration(exact_s)}, whose steps are those of one process over all batches"
        )
    if rule.compress != "off" or links_s < MATTERS * step_s:
        return ""
    period = min(USUAL, shortest_period(links_s, computed_s))
    local_s = max(computed_s, links_s / period)
    found = [f"{format_duration(local_s)} by LocalSteps(period={period})"] if local_s < LESS * step_s else []
    sites, coded_s = choose_sites(topology, num_bytes, _CODE_BITS, None)
    if sites and not topology.gateways:
        coding_s = Codec(_CODE_BITS).measure_s_per_byte()
        coded_s = time_with_codes_s(coded_s / CostModel().payload_share, num_bytes, coding_s, 1)
        with_codes_s = computed_s + max(0.0, waited_s - max(0.0, links_s - coded_s))
        if with_codes_s < LESS * step_s:
            found.insert(0, f'{format_duration(with_codes_s)} by {type(rule).__name__}(compress="int8")')
    if not found:
        return ""
    return (
        f"for {format_duration(waited_s)} of a step's {format_duration(step_s)} rank 0 waits, and links need "
        f"{format_duration(links_s)}; by prediction a step takes {', and '.join(found)}, which are not the same steps: "
        "compare losses (`syncline advise` compares all rules)"
    )
