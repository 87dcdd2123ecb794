"""``syncline run``: start this host's ranks of a training script."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.commands import new_app, options_of, spread
from syncline.cli.launcher.environment import Elasticity
from syncline.cli.launcher.launch import Request, launch
from syncline.cli.launcher.supervisor import Limits, RestartLimits
from syncline.endpoints import MAX_PORT
from syncline.errors import ConfigurationError

app = new_app()


_UNSHOWN: Any = partial(typer.Option, show_default=False)
_JOB_OPTIONS = {
    "topology": _UNSHOWN(metavar="FILE|NAME", help="The network; or SYNCLINE_TOPOLOGY."),
    "num_ranks": _UNSHOWN("--ranks", metavar="N", min=1, help="Number of ranks."),
    "host": _UNSHOWN(metavar="NAME", help="Start this host's ranks only; or SYNCLINE_HOST."),
    "master": _UNSHOWN(metavar="HOST:PORT", help="Where rank 0 listens (several machines)."),
    "secret_file": _UNSHOWN(metavar="FILE", help="The job's shared secret (mode 0600)."),
    "trace": _UNSHOWN(metavar="FILE", help="Write a trace for Perfetto; or SYNCLINE_TRACE."),
    "report": _UNSHOWN(metavar="FILE", help="Write one HTML file of the run; or SYNCLINE_REPORT."),
    "log_folder": _UNSHOWN(
        "--log-dir", metavar="DIR", help="Write each rank's output to DIR/rank-N.log too; or SYNCLINE_LOG_DIR."
    ),
    "behind": _UNSHOWN(
        metavar="S", help="Say who is behind after S seconds without a finished step (60), or off; or SYNCLINE_BEHIND."
    ),
    "is_live": typer.Option("--live", help="Show ranks, links and waits as they are; or SYNCLINE_LIVE."),
    "metrics": _UNSHOWN(metavar="PORT|DIR", help="Serve Prometheus, or write files for it; or SYNCLINE_METRICS."),
    "terminal_rank": _UNSHOWN("--foreground", metavar="RANK", help="Let this rank write to the terminal itself."),
    "on_preemption": _UNSHOWN(
        help="What ranks do when they, or this command, get SIGTERM or SIGUSR2 (25 s): leave an elastic job, or save."
    ),
}
"""By the field of a :class:`Request`."""
_RESTART_OPTIONS = {
    "count": typer.Option("--restarts", metavar="N", min=0, help="Start again what died, this often in the period."),
    "period_s": typer.Option(
        "--restart-period", metavar="S", min=0.001, help="After so many seconds a restart is forgotten."
    ),
}
"""By the field of :class:`RestartLimits`."""
_ELASTIC_OPTIONS = {
    "min_ranks": _UNSHOWN(metavar="N", min=1, help="With --elastic: stop with fewer."),
    "join": _UNSHOWN(metavar="HOST:PORT", help="Join a running elastic job, at any of its ranks."),
    "join_port": _UNSHOWN(
        metavar="PORT", min=1, max=MAX_PORT, help="With --elastic: where a machine's first rank lets others in."
    ),
}
"""By the field of :class:`Elasticity`."""


@app.command(context_settings={"allow_interspersed_args": False})
@spread(options_of(Elasticity, _ELASTIC_OPTIONS), into="elasticity")
@spread(options_of(RestartLimits, _RESTART_OPTIONS), into="restarts")
@spread(options_of(Request, _JOB_OPTIONS), into="job")
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, or module, or program.", show_default=False)
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.", show_default=False)] = None,
    *,
    job: dict[str, Any],
    restarts: dict[str, Any],
    elasticity: dict[str, Any],
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as python -m has it.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program of its own.")] = False,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="If a rank fails, let the others go on, as Clustered and Overlapped can."),
    ] = False,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Let the job go on without lost ranks; a restarted one joins it again.")
    ] = False,
) -> None:
    """Start this host's ranks of a training script, and end them together.

    Each rank gets torchrun's environment variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), so a script that
    uses torch.distributed alone starts too.

    Which ranks start here: those of --host; else of SYNCLINE_HOST; else of the topology's host that is named like this
    machine; else all of them, so that one machine stands for all hosts.

    If a rank fails, the others get 5 s to end by themselves, then SIGTERM, then SIGKILL: all within 10 s. With
    --keep-going or --elastic they may go on for as long as they like. Then the exit code is 0 if at least as many ranks
    end well as fail by themselves; those that were killed (a lost machine, no memory) are reported, and do not count.

    With --restarts a job that has failed is started again, by the launcher of each machine: the script goes on from its
    last checkpoint. With --elastic only the rank that failed is, and joins the others, as long as any of them lives.
    """
    request = Request(
        command=build_command(script, tuple(args or ()), is_module=module, is_program=no_python),
        limits=Limits(grace_s=math.inf) if keep_going else Limits(),
        restarts=RestartLimits(**restarts),
        elastic=build_elasticity(elasticity, is_elastic=elastic),
        **job,
    )
    raise typer.Exit(launch(request))


def build_elasticity(said: Mapping[str, Any], *, is_elastic: bool) -> Elasticity | None:
    """Return what was said of an elastic job; None if it is none."""
    if is_elastic or said["join"] is not None:
        return Elasticity(**said)
    for name, value in said.items():
        if value is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} {value} is said of an elastic job; add --elastic")
    return None


def build_command(script: str, args: tuple[str, ...], *, is_module: bool, is_program: bool) -> tuple[str, ...]:
    """Build the command line of a rank."""
    if is_module and is_program:
        raise ConfigurationError("--module and --no-python exclude each other; give one of them")
    if is_program:
        return (script, *args)
    if is_module:
        return (sys.executable, "-m", script, *args)
    if not Path(script).is_file():
        raise ConfigurationError(f"there is no script '{script}'; -m starts a module, --no-python any program")
    return (sys.executable, script, *args)
