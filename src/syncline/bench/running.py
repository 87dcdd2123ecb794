"""Runs a benchmark: all ranks of a topology, once for each order of ranks, in the lab or on loopback."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path

from syncline.bench.rows import Row, load_rows
from syncline.bench.task import Order, Task
from syncline.errors import LaunchError
from syncline.lab import operations
from syncline.lab.lab import LabSettings
from syncline.topology import Node, Rank, Topology

RANK_MODULE = "syncline.bench.ranks"

LoopbackLauncher = Callable[[tuple[str, ...], str], int]
"""Runs a command as every rank of the topology in a file, on this machine; returns the exit status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the ranks run: in the lab, unless there is a launcher for loopback."""

    launch_on_loopback: LoopbackLauncher | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """For the hosts of the lab; the secret that they share."""
    settings: LabSettings = field(default_factory=LabSettings)
    """How the lab differs from the usual one."""

    @property
    def name(self) -> str:
        """The network, in words."""
        if self.launch_on_loopback is not None:
            return "on loopback (rates are not emulated)"
        return ", ".join(["in the lab", *(f"{name} {value}" for name, value in self._differences())])

    def _differences(self) -> Iterator[tuple[str, object]]:
        for name, value in self.settings.items():
            if value not in (False, None, "default"):
                yield name.replace("_", " "), "on" if value is True else value


def run_orders(
    task: Task, topology: Topology, orders: Sequence[Order], place: Place, *, report: Callable[[str], None]
) -> Iterator[Row]:
    """Run ``task`` in each order of ranks, which rows name; :class:`LaunchError` after those of a broken run."""
    for order in orders:
        report(f"{task.experiment} on {topology.name}, {topology.num_ranks} ranks in {order} order, {place.name}")
        for row in _run(task, in_order(topology, order), order, place, report):
            yield replace(row, topology=topology.name, order=order)


def collect_rows(runs: Iterable[Iterable[Row]]) -> tuple[list[Row], LaunchError | None]:
    """Return all rows, or those before a run that broke, and how it did."""
    rows: list[Row] = []
    try:
        for row in chain.from_iterable(runs):
            rows.append(row)  # noqa: PERF402 - an error leaves those before
    except LaunchError as error:
        return rows, error
    return rows, None


def _run(task: Task, topology: Topology, order: Order, place: Place, report: Callable[[str], None]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        task_file, rows_file = Path(folder) / "task.json", Path(folder) / "rows.json"
        task.save(task_file)
        arguments = (str(task_file), str(rows_file))
        if place.launch_on_loopback is None:
            status = _run_in_lab(topology, arguments, place, report)
        else:
            topology_file = Path(folder) / "topology.yaml"
            topology_file.write_text(topology.to_yaml())
            status = place.launch_on_loopback((sys.executable, "-m", RANK_MODULE, *arguments), str(topology_file))
        rows = load_rows(rows_file) if rows_file.exists() else []
    yield from rows if place.launch_on_loopback is None else map(_without_rates, rows)
    if status == 128 + signal.SIGINT:
        raise LaunchError(f"the benchmark of {task.experiment} in {order} order was interrupted")
    if status or not rows:
        raise LaunchError(
            f"the benchmark of {task.experiment} in {order} order ended with status {status}; what the ranks "
            "said stands above"
        )


def _without_rates(row: Row) -> Row:
    """Leave out what follows from rates that the network does not have."""
    return replace(row, bound_s=0.0, predicted_s=None)


def _run_in_lab(topology: Topology, arguments: Sequence[str], place: Place, report: Callable[[str], None]) -> int:
    """Start this host's ranks on every host; the output of the ranks does not mix with the table."""
    command = [sys.executable, "-m", "syncline", "run", "-m", RANK_MODULE, *arguments]
    return operations.run(topology, command, env=place.environment, output=sys.stderr, report=report, **place.settings)


def in_order(topology: Topology, order: Order) -> Topology:
    """Return the tree with its ranks numbered as ``order`` says."""
    return topology if order == "topology" else topology.permuted(interleaved(topology.root))


def interleaved(node: Node) -> list[int]:
    """Deal the ranks below ``node`` from its children in turns: 0, 5, 1, 6, 2, 7, 3, 4 for racks of 5 and 3."""
    if isinstance(node, Rank):
        return [node.rank]
    turns = zip_longest(*(interleaved(child) for child in node.children))
    return [rank for rank in chain.from_iterable(turns) if rank is not None]
