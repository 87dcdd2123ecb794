"""How much a user can say: the parameters of all that is public, which must not grow.

Public is what ``syncline.__all__`` names, and ``syncline.data`` (docs/reference/index.md: the other rooms may change).
Counted is each parameter of ``init()`` and ``distribute()``, and of each class that a user makes. Not counted are
``self``, errors and warnings, what the library makes and hands out (:data:`HANDED_OUT`), and what stands for the same
setting twice: the fields of ``BackendOptions`` are arguments of ``init()``, by inheritance.
"""

from __future__ import annotations

import inspect

import syncline
from syncline.pytorch.environment import Arguments

MOST = 66
APART = {"Overlapped": 6, "Clustered": 8, "LocalSteps": 8}
"""Rules with many settings of their own, each of which a page explains; at most so many."""
HANDED_OUT = {
    "MembershipChange",
    "PhasedTrainer",
    "Resumption",
    "CheckpointWork",
    "Reconfiguration",
    "GroupCodec",
    "Fleet",
    "DistributedOptimizer",
}
"""Classes whose objects a user is given, and does not make."""


def parameters_of(value: object) -> list[str]:
    assert callable(value)
    return list(inspect.signature(value).parameters)


def is_made_by_users(name: str, value: object) -> bool:
    return inspect.isclass(value) and not issubclass(value, BaseException) and name not in HANDED_OUT


PUBLIC = {name: getattr(syncline, name) for name in syncline.__all__} | vars(syncline.data)
COUNTED = {
    name: parameters_of(value)
    for name, value in PUBLIC.items()
    if name in {"init", "distribute"}
    or (is_made_by_users(name, value) and value.__module__.startswith("syncline.") and name in syncline.__all__)
    or name == "ElasticSampler"
}


def test_options_of_a_group_are_arguments_of_init() -> None:
    assert set(COUNTED["BackendOptions"]) <= set(COUNTED["init"]) == set(parameters_of(Arguments))


def test_no_rule_grows() -> None:
    assert {name: len(COUNTED[name]) for name in APART} == APART


def test_parameters_do_not_become_more() -> None:
    counted = {name: found for name, found in COUNTED.items() if name not in {*APART, "BackendOptions"}}
    assert sum(map(len, counted.values())) <= MOST, counted
    assert {"init", "distribute", "Sharded", "Priorities", "Topology", "ElasticSampler"} <= counted.keys()
