"""Runs a benchmark: all ranks of a topology, once for each order of ranks, in the lab or on loopback."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from syncline.bench.orders import in_order
from syncline.bench.rows import Row, load_rows
from syncline.bench.task import Order, Task
from syncline.errors import LaunchError
from syncline.lab import operations
from syncline.lab.lab import LabSettings
from syncline.topology import Topology

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
) -> list[Row]:
    """Run ``task`` in each order of ranks, and return all rows, which name the topology."""
    rows = []
    for order in orders:
        report(f"{task.experiment} on {topology.name}, {topology.num_ranks} ranks in {order} order, {place.name}")
        rows += _run(replace(task, order=order), in_order(topology, order), place, report)
    return [replace(row, topology=topology.name) for row in rows]


def _run(task: Task, topology: Topology, place: Place, report: Callable[[str], None]) -> list[Row]:
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
        if status == 128 + signal.SIGINT:
            raise LaunchError("the benchmark was interrupted, so nothing is recorded")
        if status or not rows_file.exists():
            raise LaunchError(
                f"the benchmark of {task.experiment} in {task.order} order ended with status {status}; what the ranks "
                "said stands above"
            )
        rows = load_rows(rows_file)
    return rows if place.launch_on_loopback is None else [_without_rates(row) for row in rows]


def _without_rates(row: Row) -> Row:
    """Leave out what follows from rates that the network does not have."""
    return replace(row, bound_s=0.0, predicted_s=None)


def _run_in_lab(topology: Topology, arguments: Sequence[str], place: Place, report: Callable[[str], None]) -> int:
    """Start this host's ranks on every host; the output of the ranks does not mix with the table."""
    command = [sys.executable, "-m", "syncline.cli.main", "run", "-m", RANK_MODULE, *arguments]
    return operations.run(topology, command, env=place.environment, output=sys.stderr, report=report, **place.settings)
