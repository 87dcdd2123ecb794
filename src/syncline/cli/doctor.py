"""``syncline doctor``: what this machine lacks, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from syncline.cli.commands import new_app
from syncline.cli.diagnosis import Finding, Verdict, diagnose
from syncline.endpoints import PROBE_PORT
from syncline.errors import ConfigurationError

app = new_app()


@app.command()
def doctor(
    *,
    path: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Tell whether DSCP marks survive to HOST and back.")
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Answer --path of other machines, for a while.")] = False,
    hosts: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Tell which of these hosts can dial which, as 'a[0-3],b0'.")
    ] = None,
    ports: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="Ports of --hosts (default: SYNCLINE_PORTS).")
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Where --listen listens (0: any).")
    ] = PROBE_PORT,
    for_s: Annotated[
        float, typer.Option("--for", metavar="SECONDS", min=0.1, max=86400, help="How long --listen or --hosts last.")
    ] = 600.0,
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The secret of --path, --listen and --hosts (mode 0600).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings for programs.")] = False,
) -> None:
    """Say what this machine lacks, and what to do about it.

    --path HOST needs `syncline doctor --listen` on HOST. With --secret-file (or SYNCLINE_SECRET_FILE), both need
    the same secret.

    --hosts is to run on all of these hosts at once, before the job does; it ends when all know all.

    Exit code 1 if training cannot work here, no mark comes through, or two hosts could not meet; whatever is merely
    limited leaves it at 0.
    """
    if (path is not None) + listen + (hosts is not None) > 1:
        raise ConfigurationError("--path asks, --listen answers, and --hosts does both; give one of them")
    if ports is not None and hosts is None:
        raise ConfigurationError("--ports says which ports of --hosts are tried; give both")
    if path is not None or listen or hosts is not None:
        from syncline.cli.path_diagnosis import choose_key, listen_for_probes, show_path  # loads the fabric
        from syncline.cli.port_diagnosis import show_ports

        key = choose_key(secret_file)
        if hosts is not None:
            raise typer.Exit(show_ports(hosts, ports, for_s=for_s, as_json=as_json, key=key))
        if path is not None:
            raise typer.Exit(show_path(path, as_json=as_json, key=key))
        listen_for_probes(port, for_s=for_s, key=key)
        return
    findings = diagnose()
    if as_json:
        _print_json(findings)
    else:
        _print_table(findings)
    raise typer.Exit(1 if any(finding.verdict is Verdict.LACKING for finding in findings) else 0)


def _print_json(findings: tuple[Finding, ...]) -> None:
    print(json.dumps([asdict(finding) | {"verdict": finding.verdict.value} for finding in findings], indent=2))


def _print_table(findings: tuple[Finding, ...]) -> None:
    colours = {Verdict.FINE: "green", Verdict.LIMITED: "yellow", Verdict.LACKING: "bold red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "subject", "found"):
        table.add_column(heading)
    for finding in findings:
        remedy = f"\n[bold]{escape(finding.remedy)}[/]" if finding.remedy else ""
        colour = colours[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict.value}[/]", finding.subject, escape(finding.what) + remedy)
    Console().print(table)
