"""A training that follows the rates of links: it looks, asks the other ranks, measures with them, and plans again.

Every few seconds all ranks sum two small numbers at the end of a step: who suspects a rate to have changed
(:mod:`syncline.discovery.following`), and how long a step takes, from which the step of the next look follows. So all
ranks measure and plan after the same step, from the same rates. Where nothing has changed after all, the next
measurement comes later, each time twice as late.

Where the network was measured in doubt, two plans are tried first, in turn on real steps: that for what was found, and
that for one switch of which nothing is known. The faster is kept.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from statistics import median

import torch

from syncline import discovery
from syncline.errors import UpdateError
from syncline.observe import say
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.installation import Installation
from syncline.topology import Topology
from syncline.topology.rendering import describe_link
from syncline.updates import AllReduce, Sharded, UpdateRule
from syncline.updates.control import ControlStream
from syncline.variables import process_variables

LOOK_S = 5.0
FIRST_REST_S, LONGEST_REST_S = 30.0, 3600.0
"""How long to leave it after a measurement that showed no change."""
NUM_LEADING, NUM_TIMED = 2, 4
"""Steps of each turn of a plan, of which the first ones, slow after a change, are not timed."""
LEAST_GAIN = 0.03
"""One switch is planned for only if steps are faster by this part: it tells nothing of rates."""


def why_not(rule: UpdateRule, *, is_elastic: bool, has_helpers: bool) -> str | None:
    """Say why a training cannot plan again; one that can makes the same calls on all ranks, between its steps."""
    if not isinstance(rule, AllReduce | Sharded):
        return f"{type(rule).__name__}() is neither AllReduce() nor Sharded()"
    if isinstance(rule, Sharded) and rule.step_in_backward:
        return "Sharded(step_in_backward=True) keeps a second copy of state"
    if rule.compress != "off":
        return f"compress={rule.compress!r} divides buckets by the sites of the start"
    if is_elastic:
        return "an elastic job plans by the rates of its start"
    return "helpers follow the others' steps" if has_helpers else None


class PlanTrial:
    """Which of two topologies has the faster steps: what was found, or one switch; every rank calls it alike."""

    def __init__(self, found: Topology, control: ControlStream) -> None:
        one_switch = Topology.flat_on([found.host_of(rank).name for rank in range(found.num_ranks)])
        self.found, self.one_switch = found, one_switch
        self._turns = [found, one_switch, one_switch, found]  # what changes meanwhile counts for both
        self._control = control
        self._ends_s: list[float] = []
        self._medians_s: list[float] = []

    def end_step(self) -> Topology | None:
        """Return the topology to plan on from now on, where it is another turn's, or at the end the faster one's."""
        self._ends_s.append(time.monotonic())
        if len(self._ends_s) < NUM_LEADING + NUM_TIMED:
            return None
        timed = self._ends_s[NUM_LEADING - 1 :]
        own = torch.tensor([median(after - before for before, after in pairwise(timed))], dtype=torch.float64)
        self._medians_s.append(self._control.sum(own, "steps on two plans").item() / self.found.num_ranks)
        self._ends_s.clear()
        return self._turns[len(self._medians_s)] if not self.is_over else self.faster

    @property
    def is_over(self) -> bool:
        """Whether each plan had its turns."""
        return len(self._medians_s) == len(self._turns)

    @property
    def steps_s(self) -> tuple[float, float]:
        """How long a step takes (s), by what was found and by one switch."""
        first, second, third, fourth = self._medians_s
        return (first + fourth) / 2, (second + third) / 2

    @property
    def faster(self) -> Topology:
        """What to go on with."""
        by_found, by_one_switch = self.steps_s
        return self.one_switch if by_one_switch < by_found * (1 - LEAST_GAIN) else self.found

    def __str__(self) -> str:
        by_found, by_one_switch = self.steps_s
        kept = "the second, and what was measured is not kept" if self.faster is self.one_switch else "the first"
        return (
            f"two plans were tried, as the network was measured in doubt: a step takes {by_found:.3g} s by what was "
            f"measured, and {by_one_switch:.3g} s as if it were one switch; the job goes on with {kept}"
        )


class RateFollower:
    """One rank's part in it, for all trainings of a fleet; every rank calls :meth:`end_step` alike, of the first."""

    def __init__(self, fleet: Fleet) -> None:
        self.trainings: list[Installation] = []
        self._fleet = fleet
        control, self._stream = fleet.reserve_streams(2)
        self._control = ControlStream(fleet.communicator, stream=control)
        self._watch = discovery.TrafficWatch()
        self._next_look = 2
        self._looked_at: tuple[int, float] | None = None
        self._rest_s, self._rests_until_s = FIRST_REST_S, 0.0
        self._trial = PlanTrial(fleet.topology, self._control) if fleet.is_network_in_doubt else None
        self.num_plans = 0
        """How often it has planned again."""

    def end_step(self) -> None:
        """Look, if it is time; where all agree that rates have changed, plan again."""
        first = self.trainings[0].training
        if first is None or first.is_joining:
            return
        if self._trial is not None:
            self._try_plans(self._trial, first.updater.iteration)
            return
        if first.updater.iteration < self._next_look:
            return
        step, now_s = first.updater.iteration, time.monotonic()
        moved = self._moved()
        before, self._looked_at = self._looked_at, (step, now_s)
        if before is None:
            self._watch.begin(now_s, moved)
        self._watch.see(now_s, moved)
        step_s = (now_s - before[1]) / max(1, step - before[0]) if before is not None else LOOK_S
        is_suspicious = self._watch.is_suspicious and now_s >= self._rests_until_s
        told = torch.tensor([float(is_suspicious), step_s], dtype=torch.float64)
        num_suspicious, all_steps_s = self._control.sum(told, "rates of links").tolist()
        self._next_look = step + max(1, round(LOOK_S * self._fleet.world_size / max(all_steps_s, 1e-3)))
        if num_suspicious:
            self._measure_again(step)

    def _try_plans(self, trial: PlanTrial, step: int) -> None:
        chosen = trial.end_step()
        if chosen is not None and chosen is not self._fleet.topology:
            self._plan_on(chosen)
        if not trial.is_over:
            return
        self._trial = None
        is_unknown = chosen is trial.one_switch
        self._next_look = sys.maxsize if is_unknown else step + 1
        self._fleet.trace.instant("two plans", "communication", steps_s=trial.steps_s)
        if self._fleet.rank == 0:
            if is_unknown:  # no rates to follow, and none for the next job
                discovery.forget(discovery.discovery_folder(process_variables()), trial.one_switch)
            say(str(trial))

    def _plan_on(self, topology: Topology) -> None:
        trainings = [each for each in self.trainings if each.training is not None]
        for each in trainings:
            each.synchronize()
        self._fleet.communicator.plan_anew(topology)
        for each in trainings:
            each.plan_again()
        self.num_plans += 1

    def _moved(self) -> dict[int, tuple[int, float]]:
        """Return by peer what was sent, and for how long that was busy."""
        moved: dict[int, tuple[int, float]] = {}
        for each in self._fleet.communicator.statistics().fabric.connections:
            num_bytes, busy_s = moved.get(each.peer, (0, 0.0))
            moved[each.peer] = num_bytes + each.sent_bytes * (each.busy_s > 0), busy_s + each.busy_s
        return moved

    def _measure_again(self, step: int) -> None:
        for each in self.trainings:
            if each.training is not None:
                each.synchronize()
        began_s = time.monotonic()
        communicator, before = self._fleet.communicator, self._fleet.topology
        found = discovery.measure_again(communicator.open_port("rates of links"), communicator, stream=self._stream)
        is_changed = found.digest != before.digest
        if is_changed:
            self._plan_on(found)
        now_s = time.monotonic()
        self._tell(step, before, found, now_s - began_s)
        self._rests_until_s = 0.0 if is_changed else now_s + self._rest_s
        self._rest_s = FIRST_REST_S if is_changed else min(2 * self._rest_s, LONGEST_REST_S)
        if is_changed:  # else what was usual stays so, and what is off is measured again after a while
            self._watch.begin(now_s, self._moved())
        else:
            self._watch.skip(now_s, self._moved())
        self._looked_at = step, now_s

    def _tell(self, step: int, before: Topology, found: Topology, seconds: float) -> None:
        old = dict(before.links())
        changed = [
            f"{name} {describe_link(link)} (was {describe_link(old[name])})"
            for name, link in found.links()
            if link != old[name]
        ]
        self._fleet.trace.instant("rates of links", "communication", changed=changed)
        if self._fleet.rank == 0 and changed:
            what = f"links have other rates: {', '.join(changed)}; planned again"
            say(f"after step {step} {what} ({seconds:.1f} s)")


def follow_rates(installation: Installation) -> RateFollower | None:
    """Let a training follow the rates of links, where the fleet is to; return what is told of each step's end, if any.

    Raises :class:`UpdateError` where that was asked for and is not possible.
    """
    fleet = installation.fleet
    if not fleet.replans or fleet.world_size == 1:
        return None
    is_elastic, has_helpers = installation.elastic is not None, bool(fleet.topology.helpers)
    why = why_not(installation.rule, is_elastic=is_elastic, has_helpers=has_helpers)
    if why is not None:
        if fleet.is_replan_asked:
            raise UpdateError(f"init(replan=True) does not go with this training: {why}; leave out replan")
        return None
    follower, is_first = fleet.follower, fleet.follower is None
    if follower is None:
        fleet.follower = follower = RateFollower(fleet)
    follower.trainings.append(installation)
    return follower if is_first else None
