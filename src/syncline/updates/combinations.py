"""What goes with what: whoever trains declares the settings beside it that it does not honour; one place looks.

A rule's class attribute ``combinations``, and one constant each for ``phase()`` and for process groups, list what is
refused, because the result would not be what was asked, and what is ignored with a warning, because it is harmless.
Whatever is not listed is honoured. The table in docs/guide/combinations.md is made from the same lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncline.errors import SynclineError, SynclineWarning, UpdateError
from syncline.priorities.settings import Priorities
from syncline.topology import Topology


class TrainingRequest(NamedTuple):
    """What a training or a process group is given beside its rule."""

    topology: Topology
    priorities: Priorities | None = None
    """Those that somebody asked for; None for the defaults."""
    elastic: Any = None
    """The :class:`~syncline.members.Elastic` of an elastic job, else None."""
    preemption: str | None = None
    """``init(on_preemption=)``."""
    saves_on_failure: bool = False
    checks: bool = False
    """Whether ``distribute(check_every=)`` was given another number than the default."""


SETTINGS: dict[str, Callable[[TrainingRequest], bool]] = {
    "gateway: one": lambda request: bool(request.topology.gateways) and not request.topology.helpers,
    "gateway: helper": lambda request: bool(request.topology.helpers),
    "memory": lambda request: any(host.memory_bytes is not None for host in request.topology.hosts),
    'Priorities(search="auto")': lambda request: request.priorities is not None and request.priorities.is_searched,
    'Priorities(search="equal")': lambda request: (
        request.priorities is not None and request.priorities.is_on and not request.priorities.is_searched
    ),
    "elastic=True": lambda request: request.elastic is not None,
    "overlap_forward=True with elastic=": lambda request: request.elastic is not None,
    "Elastic(min_ranks=)": lambda request: request.elastic is not None and request.elastic.min_ranks > 1,
    'on_preemption="leave"': lambda request: request.preemption == "leave",
    'on_preemption="checkpoint"': lambda request: request.preemption == "checkpoint",
    "save_on_failure=": lambda request: request.saves_on_failure,
    "check_every=": lambda request: request.checks,
}
"""By the name that a user knows them by: keys of a topology, priorities, arguments."""


class Combination(NamedTuple):
    """A setting that is not honoured; it is ignored with a warning unless ``is_refused``."""

    setting: str
    why: str
    """Goes on after "SETTING does not go with RULE(),"."""
    remedy: str
    is_refused: bool = True
    when: Callable[[Any, TrainingRequest], bool] = lambda _rule, _beside: True
    """Holds of the rule, and of what is beside it."""


def find_combinations(rule: object, request: TrainingRequest) -> list[Combination]:
    """Return what of ``request`` is not honoured by a rule, or by a list of combinations, refusals first."""
    declared: Sequence[Combination] = rule if isinstance(rule, tuple) else getattr(rule, "combinations", UNDECLARED)
    found = [one for one in declared if SETTINGS[one.setting](request) and one.when(rule, request)]
    return sorted(found, key=lambda one: not one.is_refused)


def check_combinations(
    rule: object, name: str, request: TrainingRequest, *, tells: bool, error: type[SynclineError] = UpdateError
) -> None:
    """Raise ``error`` for the first setting that is refused; else warn of those that are ignored, if this rank tells.

    All ranks are given the same, and raise alike. ``name`` is what errors call the rule.
    """
    for one in find_combinations(rule, request):
        text = f"{one.setting} does not go with {name}, {one.why}; {one.remedy}"
        if one.is_refused:
            raise error(text)
        if tells:
            warnings.warn(f"{one.setting} is ignored by {name}, {one.why}; {one.remedy}", SynclineWarning, stacklevel=5)


WRITE_ONE = "write 'gateway: one' in the topology"
ELASTIC_WITH_HELPERS = Combination(
    "gateway: helper",
    "if elastic= is given: who is left after a loss could not do what a helper did",
    f"{WRITE_ONE}, or leave out elastic=",
    when=lambda _, request: request.elastic is not None,
)
LEAVING = Combination(
    'on_preemption="leave"',
    "unless its job goes on without a rank",
    'say distribute(..., elastic=True), or take on_preemption="checkpoint"',
    when=lambda _, request: request.elastic is None,
)
NOBODY_WAITS = Combination(
    'Priorities(search="auto")',
    "which has no forward pass that waits for parameters, so that nothing could be measured: all goes in one class",
    'take Sharded(overlap_forward=True), or search="equal", or leave out priorities',
    is_refused=False,
)
"""Of rules in which no classes are searched for."""
NOT_EQUAL = Combination(
    "check_every=",
    "in which parameters differ between ranks, and so are not compared",
    "leave it out",
    is_refused=False,
)
WHOLE_STATE = Combination(
    "memory",
    "in which every rank keeps all of the optimizer state, whatever its host has room for",
    "take Sharded(), or leave memory out of the topology",
    is_refused=False,
)
OF_DIVIDING_PARTIES = (
    WHOLE_STATE._replace(
        remedy="take within=Sharded(), or leave memory out of the topology", when=lambda rule, _: not rule.divides
    ),
    Combination(
        "save_on_failure=",
        "with within=Sharded(), of whose state each rank has a part",
        "save checkpoints on the way (save_checkpoint(..., keep=2, wait=False)), or take within=AllReduce()",
        when=lambda rule, _: rule.divides,
    ),
)
"""Of rules whose parties may divide the state."""
_CODES, _NO_GATEWAY = "in which each rank sends codes to other sites itself", "leave gateway out of the topology"
COMPRESSED = tuple(
    Combination(
        setting, f"with compress, {why}", f'{remedy}, or compress="off"', when=lambda rule, _: rule.compress != "off"
    )
    for setting, why, remedy in (
        ("elastic=True", "whose codes lack what is lost with a rank", "leave out elastic="),
        ("gateway: one", _CODES, _NO_GATEWAY),
        ("gateway: helper", _CODES, _NO_GATEWAY),
    )
)
"""Of rules with codes on slow links."""


def on_preemption(why: str, remedy: str) -> tuple[Combination, ...]:
    """Refuse both wishes of ``on_preemption``."""
    return tuple(Combination(f'on_preemption="{wish}"', why, remedy) for wish in ("leave", "checkpoint"))


def one_gateway(why: str, *, others: str = "take AllReduce() or Sharded(), or ") -> Combination:
    """Ignore that a host has one gateway; ``others`` are what else helps."""
    return Combination("gateway: one", why, f"{others}write 'gateway: every' in the topology", is_refused=False)


_APART = "whose ranks do not end each step together"
_NOT_EVERY_STEP = Combination(
    "gateway: helper", "in which not every rank makes every step", f"take AllReduce() or Sharded(), or {WRITE_ONE}"
)
OF_INDEPENDENT_RANKS = (
    _NOT_EVERY_STEP,
    Combination(
        "Elastic(min_ranks=)",
        "which has a quorum of its own and goes on without lost ranks by that",
        "say elastic=True, and give the rule a quorum",
    ),
    *on_preemption(
        _APART, "leave it out, and call optimizer.end_period() and save_checkpoint() from a handler of your own"
    ),
    NOBODY_WAITS,
    NOT_EQUAL,
)
"""Of rules in which ranks do not wait for each other in every step."""
OF_LOCAL_STEPS = (
    _NOT_EVERY_STEP,
    *on_preemption(_APART, "leave it out, and call save_checkpoint() on all ranks at the same step"),
    NOBODY_WAITS,
    NOT_EQUAL,
)
"""Of rules in which ranks meet once in a period."""
UNDECLARED = tuple(
    Combination(
        setting,
        "which does not say that it serves that",
        "take AllReduce() or Sharded(), or let the rule's class say combinations = () if it does",
    )
    for setting in SETTINGS
    if setting.startswith(("gateway: helper", "elastic", "on_preemption", "save_on_failure"))
)
"""Of a rule that declares nothing."""
