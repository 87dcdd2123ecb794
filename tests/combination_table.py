"""The table of what goes with what, from the declarations of rules: ``python tests/combination_table.py`` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline import AllReduce, Clustered, Elastic, LocalSteps, Overlapped, Priorities, Sharded
from syncline.backend.creation import OF_GROUPS
from syncline.pytorch.phased import OF_PHASE
from syncline.topology import Topology
from syncline.updates.combinations import Combination, TrainingRequest, find_combinations

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "combinations.md"
HOST = "{{host: a, ranks: 2, {}}}"
"""One host of two ranks, with a key more."""
TRAINERS: dict[str, Any] = {
    "AllReduce()": AllReduce(),
    "Sharded()": Sharded(),
    "Sharded(overlap_forward=True)": Sharded(overlap_forward=True),
    "Sharded(step_in_backward=True)": Sharded(step_in_backward=True),
    "Sharded(spares=1)": Sharded(spares=1),
    "Sharded(spares=1, overlap_forward=True)": Sharded(spares=1, overlap_forward=True),
    'Sharded(compress="int8")': Sharded(compress="int8"),
    "LocalSteps()": LocalSteps(),
    "LocalSteps(within=Sharded())": LocalSteps(within=Sharded()),
    "Overlapped()": Overlapped(),
    "Clustered()": Clustered(),
    "Clustered(within=AllReduce())": Clustered(within=AllReduce()),
    "Clustered(within=Sharded())": Clustered(within=Sharded()),
    "phase()": OF_PHASE,
    "process groups": OF_GROUPS,
}
FLAT = Topology.flat(2)
REQUESTS: dict[str, TrainingRequest] = {
    "gateway: one": TrainingRequest(topology=Topology.parse(HOST.format("gateway: one"))),
    "gateway: helper": TrainingRequest(topology=Topology.parse(HOST.format("gateway: helper"))),
    "memory": TrainingRequest(topology=Topology.parse(HOST.format("memory: 1 GB"))),
    'Priorities(search="auto")': TrainingRequest(topology=FLAT, priorities=Priorities()),
    'Priorities(search="equal")': TrainingRequest(topology=FLAT, priorities=Priorities(search="equal")),
    "elastic=True": TrainingRequest(topology=FLAT, elastic=Elastic()),
    "Elastic(min_ranks=2)": TrainingRequest(topology=FLAT, elastic=Elastic(min_ranks=2)),
    "elastic=True, gateway: helper": TrainingRequest(
        topology=Topology.parse(HOST.format("gateway: helper")), elastic=Elastic()
    ),
    'on_preemption="leave"': TrainingRequest(topology=FLAT, preemption="leave"),
    'on_preemption="checkpoint"': TrainingRequest(topology=FLAT, preemption="checkpoint"),
    "save_on_failure=": TrainingRequest(topology=FLAT, saves_on_failure=True),
    "check_every=10": TrainingRequest(topology=FLAT, checks=True),
}
"""What may be asked for, by a name that a user knows."""
NOT_ASKED = {
    ("process groups", name) for name in REQUESTS if name.startswith(("elastic", "Elastic", "on_", "save_on", "check"))
} | {("phase()", "save_on_failure="), ("phase()", "check_every=10")}
"""Pairs of which the first has no such argument."""
HEAD = """\
# What goes with what

Made from the declarations of the rules by `python tests/combination_table.py`; a test holds the page to them, and
another tries each pair. What is *refused* is an error with the remedy, since the result would not be what was asked.
What is *ignored* is harmless, and rank 0 warns of it (`SynclineWarning`).

"""


def verdict(trainer: str, request: str) -> list[Combination]:
    """What is not honoured of a pair: the first refusal alone, or all that is ignored."""
    found = find_combinations(TRAINERS[trainer], REQUESTS[request])
    return found[:1] if found and found[0].is_refused else found


def word(trainer: str, request: str) -> str:
    """What the table says of a pair."""
    if (trainer, request) in NOT_ASKED:
        return ""
    found = verdict(trainer, request)
    return "yes" if not found else "refused" if found[0].is_refused else "ignored"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table of Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def page() -> str:
    """Return the page: all pairs, and the reasons of those that are not honoured."""
    names = [f"`{name}`" if "(" in name else name for name in TRAINERS]
    pairs = [[f"`{request}`", *(word(trainer, request) for trainer in TRAINERS)] for request in REQUESTS]
    reasons: dict[tuple[str, ...], list[str]] = {}
    for trainer, name in zip(TRAINERS, names, strict=True):
        for request in REQUESTS:
            for one in verdict(trainer, request) if (trainer, request) not in NOT_ASKED else ():
                row = (f"`{one.setting}`", "refused" if one.is_refused else "ignored", one.why, one.remedy)
                if name not in (seen := reasons.setdefault(row, [])):
                    seen.append(name)
    rows = [[row[0], ", ".join(seen), row[1], row[2], row[3]] for row, seen in reasons.items()]
    return (
        HEAD
        + table(["", *names], pairs)
        + "\n## Why, and what to do\n\n"
        + table(["asked for", "with", "is", "why", "remedy"], rows)
    )


if __name__ == "__main__":
    PAGE.write_text(page())
