"""From what the user asked for to a finished job: the one door for ``syncline run`` and ``syncline demo``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from syncline.cli.launcher.environment import Elasticity, elastic_environment, elastic_limits, rank_environment
from syncline.cli.launcher.job import Job, build_job, choose_host, choose_master, newcomers
from syncline.cli.launcher.scratch import (
    check_place,
    merge_trace_parts,
    open_logs,
    own_folder,
    own_target,
    prepare_secret,
    reserved_port,
    trace_parts,
)
from syncline.cli.launcher.session import Session, run_job
from syncline.cli.launcher.supervisor import Limits, RestartLimits
from syncline.cli.launcher.terminal import Terminal, labels
from syncline.endpoints import MAX_PORT, metrics_endpoint, own_address
from syncline.errors import ConfigurationError
from syncline.last_words import LAST_WORDS
from syncline.pytorch.secret import choose_secret
from syncline.topology import Topology
from syncline.variables import (
    BEHIND,
    FLIGHT,
    LIVE,
    METRICS,
    REPORT,
    TRACE,
    behind_limit_s,
    live_place,
    process_variables,
)

ON_PREEMPTION = "SYNCLINE_ON_PREEMPTION"
TRACE_NAME = "trace.json"
NOTICE_S = 25.0
"""What ranks have from SIGTERM to SIGKILL where they save or leave: schedulers give 30 s to the launcher itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; None where they said nothing."""

    command: tuple[str, ...]
    topology: str | None = None
    num_ranks: int | None = None
    host: str | None = None
    starts_all: bool = False
    """Start all ranks here, whatever this machine is called."""
    master: str | None = None
    secret_file: Path | None = None
    trace: Path | None = None
    report: Path | None = None
    log_folder: Path | None = None
    behind: str | None = None
    is_live: bool = False
    metrics: str | None = None
    terminal_rank: int | None = None
    limits: Limits = field(default_factory=Limits)
    restarts: RestartLimits = field(default_factory=RestartLimits)
    elastic: Elasticity | None = None
    on_preemption: Literal["leave", "checkpoint"] | None = None


def launch(request: Request, *, terminal: Terminal | None = None) -> int:
    """Start this host's ranks and wait for them; returns the exit code."""
    terminal = terminal or Terminal()
    if request.report is None and (named := process_variables().get(REPORT)):
        request = replace(request, report=Path(named))
    if request.trace is None and (named := process_variables().get(TRACE)):
        request = replace(request, trace=Path(named, TRACE_NAME) if Path(named).is_dir() else Path(named))
    if request.trace:
        check_place(request.trace, "--trace")
    if request.report:
        check_place(request.report, "--report")
    if request.elastic is not None and request.elastic.join is not None:
        with own_folder() as scratch:
            return _run_in(scratch, request, _newcomers(request, request.elastic.join), request.host, terminal)
    topology, named_as = _find_topology(request)
    host = None
    if named_as and not request.starts_all:
        host = choose_host(topology, asked=request.host, environment=process_variables())
    is_whole = host is None or len(topology.ranks_of(host)) == topology.num_ranks
    with own_folder() as scratch, reserved_port() as port:
        master = choose_master(
            asked=request.master, environment=process_variables(), is_whole=is_whole, free_port=port, host=host
        )
        job = build_job(topology, command=request.command, host=host, master=master, named_as=named_as)
        return _run_in(scratch, request, job, host, terminal)


def _run_in(scratch: Path, request: Request, job: Job, host: str | None, terminal: Terminal) -> int:
    base = _base_variables(request)
    _check_request(request, job, base)
    view = scratch / "view.json" if request.is_live and terminal.is_screen and request.terminal_rank is None else None
    if request.is_live:
        base = {**base, LIVE: str(view or "on")}
    limits = replace(request.limits, stubborn_s=NOTICE_S) if base.get(ON_PREEMPTION) else request.limits
    secret = prepare_secret(job, asked=request.secret_file, environment=process_variables(), folder=scratch)
    asked = request.trace or (scratch / TRACE_NAME if request.report else None)
    target = own_target(job, asked, host) if asked else None
    traces = trace_parts(job, target) if target else {}
    environments = {
        process.rank: rank_environment(
            job,
            process,
            base=base,
            num_cores=len(os.sched_getaffinity(0)),
            secret_file=secret,
            trace_file=traces.get(process.rank),
            elastic=elastic_environment(request.elastic, job, process),
        )
        | {LAST_WORDS: str(scratch / f"last-words-{process.rank}.json")}
        for process in job.processes
    }
    session = Session(
        job=job,
        environments=environments,
        labels=labels(job, is_in_lab="SYNCLINE_LAB" in process_variables()),
        limits=elastic_limits(request.elastic, job, limits, request.restarts),
        logs=open_logs(job, request.log_folder, base),
        terminal_rank=_terminal_rank(request, job),
        restarts=request.restarts,
        view=view,
    )
    code = run_job(session, terminal)
    if target and _save_trace(target, traces, terminal, is_told=request.trace is not None) and request.report:
        _save_report(target, own_target(job, request.report, host), request.command, terminal)
    return code


def _check_request(request: Request, job: Job, base: Mapping[str, str]) -> None:
    """Refuse once, in words that the user wrote, what every rank would end with in a traceback."""
    behind_limit_s(base, who=BEHIND if request.behind is None else "--behind")
    live_place(base)
    if (secret := choose_secret(request.secret_file)) is not None:
        from syncline.fabric import FabricOptions  # which loads numpy

        FabricOptions(secret=secret)
    if request.metrics is not None:
        _check_metrics(request.metrics, job)
    is_found_by_ranks = job.world_size > 1 and not base.get("SYNCLINE_INTERFACE")
    if request.master is not None and is_found_by_ranks and not request.restarts.count:  # which may wait for a name
        own_address(job.master_address, what="--master")
    least = 1 if request.elastic is None else request.elastic.min_ranks or 1
    if job.join is None and least > job.world_size:
        raise ConfigurationError(
            f"--min-ranks must be at most the number of ranks, {job.world_size}, not {least}: with fewer the job "
            "stops; start more ranks, or ask for fewer"
        )


def _check_metrics(place: str, job: Job) -> None:
    """Raise :class:`ConfigurationError` if ``--metrics`` names a port, and not each rank has one from there on."""
    endpoint = metrics_endpoint(place, what="--metrics")
    last = 0 if endpoint is None else endpoint[1] + job.world_size - 1
    if last > MAX_PORT:
        raise ConfigurationError(
            f"--metrics {place}: rank r serves at that port + r, up to {last}, but ports end at {MAX_PORT}; give a "
            f"port of at most {MAX_PORT + 1 - job.world_size}"
        )


def _base_variables(request: Request) -> Mapping[str, str]:
    """Return this process's variables, with what was asked for as the ranks are told it."""
    logs = None if request.log_folder is None else str(request.log_folder.absolute())
    asked = {ON_PREEMPTION: request.on_preemption, BEHIND: request.behind, METRICS: request.metrics, FLIGHT: logs}
    return {**process_variables(), **{name: value for name, value in asked.items() if value is not None}}


def _newcomers(request: Request, join: str) -> Job:
    """Describe the ranks that join a running job, which tells them all else."""
    topology = request.topology or process_variables().get("SYNCLINE_TOPOLOGY")
    if request.master is not None:
        raise ConfigurationError("--join says where a member of the job listens, and --master where a new one meets")
    return newcomers(
        request.num_ranks or 1,
        command=request.command,
        join=join,
        host=request.host or process_variables().get("SYNCLINE_HOST"),
        topology=None if topology is None else _as_ranks_load(topology),
    )


def _as_ranks_load(named: str) -> str:
    """Return a topology's name, or its path, as a rank may change its folder before it loads the file."""
    return str(Path(named).absolute()) if Path(named).is_file() else named


def _find_topology(request: Request) -> tuple[Topology, str | None]:
    """Find the topology, and what the ranks are told to load (None for one flat switch)."""
    # an argument, be it only --ranks, beats the environment
    named = request.topology or (process_variables().get("SYNCLINE_TOPOLOGY") if request.num_ranks is None else None)
    if named is None:
        if request.num_ranks is None:
            raise ConfigurationError("the number of ranks is not known; say --ranks N or --topology FILE")
        if request.host is not None:
            raise ConfigurationError(f"--host {request.host} needs a topology that names it; add --topology FILE")
        return Topology.flat(request.num_ranks), None
    topology = Topology.load(named)
    if request.num_ranks is not None:
        topology.check_world_size(request.num_ranks)
    return topology, _as_ranks_load(named)


def _terminal_rank(request: Request, job: Job) -> int | None:
    """Say which rank here writes to the terminal itself; None too where that one starts on another machine."""
    asked = request.terminal_rank
    if asked is not None and not 0 <= asked < job.world_size:
        raise ConfigurationError(f"--foreground must be a rank from 0 to {job.world_size - 1}, got {asked}")
    return asked if asked in [process.rank for process in job.processes] else None


def _save_trace(target: Path, parts: Mapping[int, Path], terminal: Terminal, *, is_told: bool) -> bool:
    """Merge what the ranks have written; returns whether there is anything."""
    try:
        num_written = merge_trace_parts(parts, target)
    except OSError as error:  # the job itself is over, and its exit code stands
        terminal.say(f"the trace {target} cannot be written: {error.strerror}", is_error=True)
        return False
    if not num_written:
        terminal.say("no rank wrote a trace; a script traces itself once it calls syncline.init()", is_error=True)
    elif is_told:
        terminal.say(f"trace of {num_written} of {len(parts)} ranks: {target} (opens in https://ui.perfetto.dev)")
    return num_written > 0


def _save_report(trace: Path, target: Path, command: tuple[str, ...], terminal: Terminal) -> None:
    from syncline.report.page import write_report

    title = next((Path(word).name for word in command if word.endswith(".py")), command[-1])
    try:
        write_report(trace, target, title=title)
    except ConfigurationError as error:  # the job itself is over, and its exit code stands
        terminal.say(str(error), is_error=True)
        return
    terminal.say(f"report: {target} (opens in a browser)")
