"""Time to a loss on slow networks: what is compared there, what one training told, and the tables of both.

A rule is judged by two things: the steps that it needs to the loss that synchronous training has after so many, found
in one process (:mod:`syncline.bench.ranks.learning`), and the time of a step on a network, which is predicted. The
product is the time to the loss. Trainings are written one by one, so that an interrupt keeps those before.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from rich.table import Table

from syncline.bench.task import check_known
from syncline.errors import ConfigurationError
from syncline.report.terminal import new_table
from syncline.schedule.period import USUAL
from syncline.topology import Topology
from syncline.units import format_size

TASKS = ("gpt", "digits-by-label", "digits-by-label-adam", "digits-mixed", "digits-mixed-adam", "convolution")
REFERENCE = "ddp"
CONFIDENCE = 0.95

Timing = Literal["advice", "in turn", "overlapped", "sites", "stale", "servers", "apart"]
"""By what a step is predicted; see :mod:`syncline.cli.convergence`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A rule with its settings. ``group``: of its methods the best is shown. ``steps_of``: whose steps it makes."""

    name: str
    rule: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timing: Timing = "advice"
    advised: str = ""
    """Its name in ``syncline advise``."""
    group: str = ""
    steps_of: str = ""

    @property
    def period(self) -> int:
        """Of local steps."""
        return int(self.arguments.get("period", USUAL))

    @property
    def has_own_pace(self) -> bool:
        """Whether each site makes as many steps as it can: networks say how many, as here all compute alike."""
        return self.arguments.get("pace") == "own"

    @property
    def is_automatic(self) -> bool:
        """Whether the network says which period it has: it is trained with that one, as here networks take no time."""
        return self.arguments.get("period") == "auto"

    def with_period(self, period: int) -> Method:
        """Return what it is on a network where it has this period; of the same group."""
        arguments = {**self.arguments, "period": period}
        return replace(self, name=f"{self.name}, {period}", arguments=arguments, group=self.group or self.name)

    def with_speeds(self, speeds: Mapping[str, float]) -> Method:
        """Return what it is where hosts compute so fast; of the same group."""
        told = ", ".join(f"{speed:g}" for speed in sorted(set(speeds.values())))
        arguments = {**self.arguments, "pace": dict(speeds)}
        return replace(self, name=f"{self.name}, {told}", arguments=arguments, group=self.group or self.name)

    def with_distances(self, away: Mapping[str, float]) -> Method:
        """Return what it is where transfers from each site to the first one take so many steps; of the same group."""
        arguments = {**self.arguments, "away": dict(away)}
        return replace(self, name=f"{self.name}, {max(away.values()):.1f} away", arguments=arguments)

    def speed_of(self, host: str) -> float:
        """Return how many of the fastest site's steps a host makes, of 1."""
        pace = self.arguments.get("pace")
        return pace[host] if isinstance(pace, Mapping) else 1.0


def _local(name: str, timing: Timing, group: str = "", **arguments: Any) -> Method:
    return Method(name=name, rule="LocalSteps", arguments=arguments, timing=timing, group=group)


def _rounds_in_turn(name: str, group: str, period: int, **arguments: Any) -> Method:
    own = {"period": period, "fragments": 1, "overlap": False, "parties": None}
    return _local(f"{name}, period {period}", "in turn", group, **own, **arguments)


# By the sites' servers and by the global one: how much of the mean difference of a round is added, and the momentum;
# first as the authors of HALoS publish them.
_SERVERS = (("with momentum", (0.8, 0.6), (0.9, 0.5)), ("plain", (1.0, 1.0), (0.0, 0.0)))


def _servers(
    local_steps: int, rounds: int, told: str, rates: tuple[float, float], momenta: tuple[float, float]
) -> Method:
    settings = {
        "local_steps": local_steps,
        "rounds": rounds,
        "rates": rates,
        "momenta": momenta,
        "pace": "own",
        "away": {},
    }
    name = f"HALoS {local_steps}x{rounds} {told}"
    return Method(name=name, rule="HALoS", arguments=settings, timing="apart", group="HALoS")


METHODS: tuple[Method, ...] = (
    Method(name=REFERENCE, rule="AllReduce", advised="DDP's ring"),
    Method(name="AllReduce", rule="AllReduce", advised="AllReduce()", steps_of=REFERENCE),
    Method(name="Sharded", rule="Sharded", advised="Sharded()", steps_of=REFERENCE),
    *(
        Method(
            name=f"Sharded {bits}",
            rule="Sharded",
            arguments={"compress": bits},
            advised=f'Sharded(compress="{bits}")',
        )
        for bits in ("int8", "int4")
    ),
    Method(
        name="AllReduce int4",
        rule="AllReduce",
        arguments={"compress": "int4"},
        advised='AllReduce(compress="int4")',
    ),
    *(_rounds_in_turn("averages", "averages", period) for period in (8, 32)),
    *(
        _rounds_in_turn(f"DiLoCo {rate}/{momentum}", "DiLoCo", period, outer=(rate, momentum))
        for period in (8, 16, 32)
        for rate, momentum in ((0.7, 0.9), (1.0, 0.5))
    ),
    *(
        _servers(local_steps, rounds, *server)
        for local_steps, rounds in ((2, 2), (8, 2), (8, 8))
        for server in _SERVERS
    ),
    _local("LocalSteps", "overlapped", parties=None, period=USUAL),
    _local("LocalSteps, sites", "sites", period=USUAL),
    _local("LocalSteps, auto", "sites", period="auto"),
    _local("LocalSteps, own pace", "sites", pace="own", period="auto"),
    Method(name="Overlapped", rule="Overlapped", timing="stale"),
    Method(name="Clustered", rule="Clustered", timing="servers"),
)
GROUPS = tuple(dict.fromkeys(method.group or method.name for method in METHODS))
"""What a user names, and a table has rows of."""


def choose_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """Return the methods of these groups (default: all), with those that the others are measured by."""
    check_known("--method", names, GROUPS)
    wanted = {*(names or GROUPS), REFERENCE}
    return tuple(method for method in METHODS if (method.group or method.name) in wanted)


def first_of_groups(methods: Sequence[Method]) -> tuple[Method, ...]:
    """Return one setting of each group."""
    return tuple({method.group or method.name: method for method in reversed(methods)}.values())[::-1]


def choose_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks of these names; all by default."""
    check_known("--task", names, TASKS)
    return tuple(task for task in TASKS if task in (names or TASKS))


def sites_of(topology: Topology) -> dict[str, list[int]]:
    """Return the ranks below each child of a network's root, by its name."""
    ranks = range(topology.num_ranks)
    return {child.name: [rank for rank in ranks if child in topology.path(rank)] for child in topology.root.children}


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A topology, and how many times as long its last site computes."""

    name: str
    topology: Topology
    slowdown: float = 1.0

    @property
    def speeds(self) -> dict[str, float]:
        """How fast each host computes, of the fastest."""
        slow = self.topology.root.children[-1]
        return {
            host.name: 1 / self.slowdown if slow in self.topology.path(host.ranks[0].rank) else 1.0
            for host in self.topology.hosts
        }

    @property
    def sites(self) -> str:
        """Which ranks are together: trainings with the same sites have the same losses."""
        return " ".join(",".join(map(str, ranks)) for ranks in sites_of(self.topology).values())


NETWORKS = ("two-sites", "two-sites at 100 Mbit/s", "three-racks-uneven-uplinks", "two-sites, one at half speed")


def find_network(name: str) -> Network:
    """Return one of :data:`NETWORKS`, or the network of a topology that is shipped or in a file."""
    where = name if name not in NETWORKS else name.partition(",")[0].partition(" ")[0]
    topology = Topology.load(where)
    if not topology.has_rates or topology.num_ranks < 2:
        raise ConfigurationError(
            f"topology {topology.name!r} has one rank, or no link with a rate, so that no step can be predicted; give "
            f"one of several ranks, with rates, or of {', '.join(NETWORKS)}"
        )
    if "100 Mbit/s" in name:
        topology = Topology.parse(topology.to_yaml().replace("20 Mbit/s", "100 Mbit/s"))
    return Network(name=name, topology=topology, slowdown=2.0 if "half speed" in name else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """One training: its loss after so many steps, and the payload of a step on each link."""

    num_bytes: int
    """Of the parameters."""
    curve: tuple[tuple[int, float], ...]
    link_bytes: Mapping[str, int] = field(default_factory=dict)

    def steps_to(self, target: float) -> float | None:
        """Return after how many steps the loss is first ``target``, between two judgements in proportion; or None."""
        before: tuple[int, float] | None = None
        for step, loss in self.curve:
            if loss <= target:
                part = 1.0 if before is None or before[1] <= loss else (before[1] - target) / (before[1] - loss)
                begun = 0 if before is None else before[0]
                return begun + part * (step - begun)
            before = step, loss
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Which training it is, and what it told: a line of a record."""

    task: str
    sites: str
    method: str
    seed: int
    num_steps: int
    every: int
    learning: Learning

    @property
    def key(self) -> tuple[object, ...]:
        """Tell it from others."""
        return self.task, self.sites, self.method, self.seed, self.num_steps, self.every


def load_trainings(path: Path) -> list[Training]:
    """Read what :func:`add_training` wrote."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [TypeAdapter(Training).validate_json(line) for line in lines]


def add_training(path: Path, training: Training) -> None:
    """Write one more line."""
    with path.open("a") as lines:
        lines.write(json.dumps(asdict(training)) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceRow:
    """One method for one task on one network, over all seeds."""

    task: str
    network: str
    method: str
    group: str
    step_s: float
    link: str
    """The one that is busy longest, and what a step puts on it."""
    link_bytes: int
    steps: tuple[float | None, ...]
    """To the loss of synchronous training, by seed; None where it was never reached."""
    most_steps: int
    """That were made."""
    is_stale: bool = False
    """Whether gradients would be staler on the network than in the training, so that times are lower bounds."""

    @property
    def times_s(self) -> tuple[float | None, ...]:
        """To that loss."""
        return tuple(None if steps is None else steps * self.step_s for steps in self.steps)

    @property
    def mean_s(self) -> float:
        """Over the seeds; infinite if one did not reach the loss."""
        return math.inf if None in self.times_s else statistics.mean(each or 0.0 for each in self.times_s)

    @property
    def interval_s(self) -> float | None:
        """Half of the interval that has the mean with a probability of 95 %, by Student's t; None for one seed."""
        if len(self.steps) < 2 or math.isinf(self.mean_s):
            return None
        from scipy.stats import t

        deviation = statistics.stdev(each or 0.0 for each in self.times_s)
        quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(self.steps) - 1))
        return quantile * deviation / math.sqrt(len(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and the figures that follow from them, for JSON."""
        mean_s = None if math.isinf(self.mean_s) else self.mean_s
        return {**asdict(self), "times_s": self.times_s, "mean_s": mean_s, "interval_s": self.interval_s}


def best_of_groups(rows: Iterable[ConvergenceRow]) -> list[ConvergenceRow]:
    """Keep, of each group of a task and network, the row that has the loss first."""
    best: dict[tuple[str, str, str], ConvergenceRow] = {}
    for row in rows:
        key = row.task, row.network, row.group
        if key not in best or _order(row) < _order(best[key]):
            best[key] = row
    return list(best.values())


def _order(row: ConvergenceRow) -> tuple[float, ...]:
    return sum(steps is None for steps in row.steps), sum(each or 0.0 for each in row.times_s)


def convergence_tables(rows: Sequence[ConvergenceRow]) -> list[Table]:
    """Lay out a table for each task and network, with the best setting of each group; the fastest is green."""
    tables = []
    shown = best_of_groups(rows)
    for task, network in dict.fromkeys((row.task, row.network) for row in shown):
        here = [row for row in shown if (row.task, row.network) == (task, network)]
        reference_s = next(row.mean_s for row in here if row.method == REFERENCE)
        headings = ("step (s)", "steps", "to the loss (s)", "+-", f"x {REFERENCE}", "busiest link, a step")
        table = new_table("method", *headings, title=f"{task} on {network}", no_wrap=True)
        least_s = min(row.mean_s for row in here if not row.is_stale)
        for row in here:
            is_first = row.mean_s == least_s and not row.is_stale
            table.add_row(*_cells(row, reference_s), style="green" if is_first else "")
        tables.append(table)
    return tables


def _cells(row: ConvergenceRow, reference_s: float) -> tuple[str, ...]:
    reached = [steps for steps in row.steps if steps is not None]
    link = f"{row.link} {format_size(row.link_bytes)}"
    if len(reached) < len(row.steps):
        count = f"{len(reached)} of {len(row.steps)}" if reached else "never"
        return row.method, f"{row.step_s:.3f}", count, f"> {row.most_steps * row.step_s:.1f}", "", "", link
    if row.is_stale:
        return row.method, f"{row.step_s:.3f}", f"> {statistics.mean(reached):.0f}", f"> {row.mean_s:.1f}", "", "", link
    return (
        row.method,
        f"{row.step_s:.3f}",
        f"{statistics.mean(reached):.0f}",
        f"{row.mean_s:.1f}",
        "" if row.interval_s is None else f"{row.interval_s:.1f}",
        f"{reference_s / row.mean_s:.1f}",
        link,
    )
