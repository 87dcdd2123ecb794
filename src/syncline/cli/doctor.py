"""``syncline doctor``: what this machine lacks, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from syncline.cli.diagnosis import Finding, Verdict, diagnose

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def doctor(*, as_json: Annotated[bool, typer.Option("--json", help="Print findings for programs.")] = False) -> None:
    """Say what this machine lacks, and what to do about it.

    Exit code 1 if training cannot work here; whatever is merely limited leaves it at 0.
    """
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
