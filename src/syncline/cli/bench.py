"""``syncline bench``: this library and its peers on the same network, in the same run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.console import Console
from rich.table import Table

from syncline.bench.convergence import (
    GROUPS,
    NETWORKS,
    TASKS,
    choose_methods,
    choose_tasks,
    convergence_tables,
    find_network,
    first_of_groups,
)
from syncline.bench.record import collect_facts, default_folder, write_record, write_results
from syncline.bench.rows import bench_table, group_rows
from syncline.bench.running import Place, collect_rows, run_orders
from syncline.bench.task import (
    COLLECTIVES,
    ORDERS,
    CollectiveName,
    ModelShape,
    Order,
    Pace,
    Task,
    check_known,
    choose_peers,
    listed,
)
from syncline.cli.commands import make_folder, new_app, parse_compute, spread, writing
from syncline.cli.lab import LabOptions
from syncline.cli.launcher.launch import Request, launch
from syncline.cli.launcher.scratch import shared_secret
from syncline.errors import ConfigurationError, LaunchError
from syncline.lab.lab import LabSettings
from syncline.topology import Topology
from syncline.units import parse_size
from syncline.variables import process_variables

DEFAULT_SIZES = ("16 MiB", "64 MiB")
QUICK_TASKS, QUICK_STEPS = ("gpt", "digits-by-label"), 16
WIDTH = 150
"""Of a table in a file, in characters."""

app = new_app(
    about="Measure this library and its peers on an emulated network of this machine, in turns in the same run."
)

TopologyArgument = Annotated[
    list[str], typer.Argument(metavar="TOPOLOGY", help="Topology files, or names of shipped ones.")
]
NOTEWORTHY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(LabOptions):
    """The options that both commands have: how often to measure, what beside, where, and where to write it down."""

    order: Annotated[
        Literal["topology", "interleaved", "both"], typer.Option(help="Ranks as in TOPOLOGY, or dealt to racks.")
    ] = "both"
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds; the median counts.")] = 5
    warm_ups: Annotated[int, typer.Option(metavar="N", min=0, help="Rounds before, not counted.")] = 2
    record: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where it is kept.", show_default="benchmarks/records/DATE_THEME"),
    ] = None
    peers: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this peer (repeat it), or none.")] = None
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Without the lab: rates are not emulated. So it is without root.")
    ] = False

    @property
    def pace(self) -> Pace:
        """How often each method is measured."""
        return Pace(num_rounds=self.rounds, num_warm_ups=self.warm_ups)


@app.command()
@spread(Settings, into="settings")
def collectives(
    topologies: TopologyArgument,
    *,
    names: Annotated[
        list[str] | None,
        typer.Option("--collective", metavar="NAME", help="Of all-reduce (default), reduce-scatter, all-gather."),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--bytes", metavar="SIZE", help="Of the tensor; repeat it.", show_default=", ".join(DEFAULT_SIZES)
        ),
    ] = None,
    planners: Annotated[
        list[str] | None, typer.Option("--planners", metavar="NAME", help="This planner too; repeat it.")
    ] = None,
    settings: Settings,
) -> None:
    """All-reduce, reduce-scatter and all-gather: Syncline and gloo."""
    task = Task(
        experiment="collectives",
        collectives=_check_collectives(names or ()),
        sizes_bytes=tuple(parse_size(text) for text in sizes or DEFAULT_SIZES),
        pace=settings.pace,
        peers=choose_peers("collectives", settings.peers or ()),
        planners=_check_planners(planners or ()),
    )
    measure(task, _load(topologies), settings)


@app.command()
@spread(Settings, into="settings")
def training(
    topologies: TopologyArgument,
    *,
    blocks: Annotated[int, typer.Option(metavar="N", min=1, help="Residual blocks of the model.")] = 8,
    width: Annotated[int, typer.Option(metavar="N", min=1, help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each rank in a step.")] = 64,
    settings: Settings,
) -> None:
    """Training steps: Syncline, DDP, DDP with ZeroRedundancyOptimizer, FSDP2 and PostLocalSGD over gloo."""
    task = Task(
        experiment="training",
        pace=settings.pace,
        peers=choose_peers("training", settings.peers or ()),
        shape=ModelShape(num_blocks=blocks, width=width, batch_size=batch),
    )
    measure(task, _load(topologies), settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceSettings:
    """What is trained by which methods, how often and how far."""

    tasks: Annotated[
        list[str] | None, typer.Option("--task", metavar="NAME", help=f"Of {', '.join(TASKS)}; repeat it.")
    ] = None
    methods: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help=f"Of {listed(GROUPS)}; repeat it.")
    ] = None
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Trainings of each, from 0 on.")] = 3
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Of synchronous training, whose loss is the goal.")] = (
        64
    )
    compute: Annotated[str, typer.Option(metavar="DURATION", help="What a rank computes in a step.")] = "100ms"
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One seed and setting, 16 steps; one network and two tasks, unless named."),
    ] = False
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where it is kept; trainings that are there are not made again.",
            show_default="benchmarks/records/DATE_convergence",
        ),
    ] = None


@app.command()
@spread(ConvergenceSettings, into="settings")
def convergence(
    networks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NETWORK]", help="Topology files or names, and of those below.", show_default="; ".join(NETWORKS)
        ),
    ] = None,
    *,
    settings: ConvergenceSettings,
) -> None:
    """Time to a loss: synchronous rules, codes, averages, DiLoCo, HALoS, LocalSteps, Overlapped and Clustered.

    Losses are found in one process, the ranks being threads; steps are predicted for an idle network.
    """
    from syncline.cli.convergence import Plan, Trainings  # loads numpy

    folder, quick = settings.record or default_folder("convergence"), settings.quick
    methods = choose_methods(settings.methods or ())
    plan = Plan(
        tasks=choose_tasks(settings.tasks or (QUICK_TASKS if quick else ())),
        methods=first_of_groups(methods) if quick else methods,
        networks=tuple(map(find_network, networks or (NETWORKS[:1] if quick else NETWORKS))),
        num_seeds=1 if quick else settings.seeds,
        num_steps=QUICK_STEPS if quick else settings.steps,
        compute_s=parse_compute(settings.compute),
        path=folder / "trainings.jsonl",
    )
    topologies = [network.topology for network in plan.networks]
    facts = collect_facts(["syncline", *sys.argv[1:]], topologies, network="predicted; losses in one process")
    make_folder(folder, "--record")
    trainings, is_whole = Trainings(plan), True
    try:
        trainings.run()
    except KeyboardInterrupt:
        is_whole = False
    rows = list(trainings.rows())
    facts["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
    text = _show(convergence_tables(rows))
    with writing(folder, "--record"):
        write_results(folder, [row.to_dict() for row in rows], facts, text)
    _report(f"record: {folder}")
    if not is_whole:
        raise LaunchError(f"the benchmark was interrupted; give --record {folder} again to go on with what is there")


def measure(task: Task, topologies: list[Topology], settings: Settings) -> None:
    """Run the task in the orders that are asked for, print the table and write the record."""
    orders: Sequence[Order] = ORDERS if settings.order == "both" else (settings.order,)
    folder = settings.record or default_folder("-".join([task.experiment, *(topology.name for topology in topologies)]))
    _check_record(folder)
    with choose_place(settings.settings(), is_on_loopback=settings.loopback) as place:
        facts = collect_facts(["syncline", *sys.argv[1:]], topologies, network=place.name)
        stolen_share()
        rows, broken = collect_rows(run_orders(task, each, orders, place, report=_report) for each in topologies)
    if not rows and broken:
        raise broken
    facts |= {
        "load_average_after": [round(load, 2) for load in os.getloadavg()],
        "stolen_share": round(stolen_share(), 3),
    }
    text = _show([bench_table(group) for group in group_rows(rows)])
    with writing(folder, "--record"):
        notes = write_record(folder, rows, facts, text)
    for note in notes:
        _report(note)
    if facts["stolen_share"] > NOTEWORTHY:
        _report(
            f"other machines had {facts['stolen_share']:.0%} of the processors' time: figures may be too long; repeat "
            "rows whose min and max are far apart"
        )
    _report(f"record: {folder}")
    if broken:
        raise LaunchError(f"{broken}; what was measured before is recorded")


def _check_record(folder: Path) -> None:
    """Raise :class:`ConfigurationError` now, not when all is measured, if a record cannot be kept there."""
    is_new = not folder.exists()
    make_folder(folder, "--record")
    if is_new:
        folder.rmdir()  # what is measured makes it again; if that fails there is no record


@contextmanager
def choose_place(settings: LabSettings, *, is_on_loopback: bool) -> Iterator[Place]:
    """Choose the lab, unless the user wants loopback or is not root; the hosts of a lab share a fresh secret."""
    if is_on_loopback or os.geteuid() != 0:
        if settings != LabOptions().settings():
            raise ConfigurationError(
                "--queues, --congestion and --packet-filters are the lab's, but ranks would run on loopback; run it as "
                "root, without --loopback, or leave them out"
            )
        why = "--loopback" if is_on_loopback else "the lab needs root"
        _report(f"ranks on loopback ({why}): the topology is planned for, but its rates are not emulated")
        yield Place(launch_on_loopback=_launch)
        return
    with shared_secret(process_variables()) as secret:
        yield Place(environment={"OMP_NUM_THREADS": "1", **secret}, settings=settings)


def _launch(command: tuple[str, ...], topology_file: str) -> int:
    return launch(Request(command=command, topology=topology_file))


def _load(names: list[str]) -> list[Topology]:
    return [Topology.load(name) for name in names]


def _check_collectives(names: list[str] | tuple[str, ...]) -> tuple[CollectiveName, ...]:
    check_known("--collective", names, COLLECTIVES)
    return tuple(name for name in COLLECTIVES if name in names) or COLLECTIVES[:1]


def _check_planners(names: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    from syncline.schedule import PLANNERS, Collective  # loads numpy

    known = [planner.name for planner in PLANNERS.values() if Collective.ALL_REDUCE in planner.collectives]
    check_known("--planners", names, known)
    return tuple(dict.fromkeys(names))


def _show(tables: Sequence[Table]) -> str:
    """Print the tables, and return them as a file has them."""
    written = io.StringIO()
    Console(file=written, width=WIDTH).print(*tables, sep="\n")
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(*tables, sep="\n")
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _report(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr)


def stolen_share() -> float:
    """Return what part of the processors' time other machines had since this was asked last in this thread.

    Where machines do not share them, or the kernel does not tell, nothing was stolen.
    """
    return float(getattr(psutil.cpu_times_percent(), "steal", 0.0)) / 100
