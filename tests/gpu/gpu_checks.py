"""Checks of tensors on a device, and a table of what came of each: `make test-gpu`.

All are made by 2 and by 4 ranks, which share the GPUs that there are. Without a GPU those that can run on a stand-in
(the CPU, with copies by threads), and the table says of the others what they need.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from rank_scripts import run_script  # noqa: E402 - a program, which finds the other tests' modules by itself

COLOURS = {"passed": "green", "failed": "bold red", "not run": "dim"}
WIDTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a check on some ranks; ``state`` is passed, failed or not run."""

    check: str
    num_ranks: int
    device: str
    state: str
    note: str
    seconds: float


def merged(results: Sequence[Sequence[dict[str, object]]]) -> list[Outcome]:
    """Make one outcome of each check of all ranks' results: passed where it passed on all of them.

    A check that a rank did not come to has failed: its process ended in one before.
    """
    longest = max(results, key=len, default=())
    outcomes = []
    for number, first in enumerate(longest):
        of_ranks = [of_rank[number] for of_rank in results if number < len(of_rank)]
        failed = [f"rank {rank}: {one['note']}" for rank, one in enumerate(of_ranks) if one["state"] == "failed"]
        missing = [f"{len(results) - len(of_ranks)} ranks ended before"] if len(of_ranks) < len(results) else []
        state = "failed" if failed or missing else str(first["state"])
        outcomes.append(
            Outcome(
                check=str(first["check"]),
                num_ranks=len(results),
                device=str(first["device"]),
                state=state,
                note="; ".join(failed + missing) or str(of_ranks[0]["note"]),
                seconds=max(float(str(one["seconds"])) for one in of_ranks),
            )
        )
    return outcomes


def run_ranks(num_ranks: int) -> tuple[list[Outcome], str]:
    """Let so many ranks make all checks; return the outcomes, and what ranks said that failed."""
    with tempfile.TemporaryDirectory(prefix="syncline-gpu-") as folder:
        ended = run_script(HERE / "rank_checks.py", num_ranks, folder)
        files = [Path(folder) / f"rank-{rank}.jsonl" for rank in range(num_ranks)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
    results = [[json.loads(line) for line in of_rank] for of_rank in lines]
    outcomes = merged(results)
    said = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(ended) if text)
    broken = [str(rank) for rank, (status, _) in enumerate(ended) if status]
    if broken:
        note = f"ranks {', '.join(broken)} ended with an error; what they said stands above"
        whole = Outcome(check="all ranks end", num_ranks=num_ranks, device="", state="failed", note=note, seconds=0.0)
        outcomes.append(whole)
    return outcomes, said


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Lay the outcomes out, those of one check one below the other."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("check", "ranks", "device", "result", "s", "note"):
        table.add_column(heading, justify="right" if heading in {"ranks", "s"} else "left")
    order = {name: number for number, name in enumerate(dict.fromkeys(one.check for one in outcomes))}
    for one in sorted(outcomes, key=lambda one: (order[one.check], one.num_ranks)):
        seconds = f"{one.seconds:.1f}" if one.state != "not run" else ""
        state = f"[{COLOURS[one.state]}]{one.state}[/]"
        table.add_row(escape(one.check), str(one.num_ranks), one.device, state, seconds, escape(one.note))
    return table


def summary(outcomes: Sequence[Outcome]) -> str:
    """Count them in a sentence."""
    counts = {state: sum(one.state == state for one in outcomes) for state in COLOURS}
    text = f"{counts['passed']} passed, {counts['failed']} failed, {counts['not run']} not run here"
    if any(one.device == "stand-in" for one in outcomes):
        text += "; there is no GPU that PyTorch can use: what passed, passed on a stand-in, and nothing on a GPU"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 0, 1 where a check failed, 2 where a GPU was asked for and there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--need-gpu", action="store_true", help="end with status 2 where there is no GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, one after the other")
    chosen = parser.parse_args(arguments)
    if chosen.need_gpu and not torch.cuda.is_available():
        print(
            f"--need-gpu: PyTorch {torch.__version__} finds no GPU here, so nothing was run; leave --need-gpu out to "
            "run on a stand-in what can run there, or look at nvidia-smi and python -m torch.utils.collect_env",
            file=sys.stderr,
        )
        return 2
    outcomes: list[Outcome] = []
    for num_ranks in chosen.ranks:
        print(f"{num_ranks} ranks ...", flush=True)
        found, said = run_ranks(num_ranks)
        outcomes += found
        if said and any(one.state == "failed" for one in found):
            print(said, file=sys.stderr)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table_of(outcomes))
    console.print(summary(outcomes), soft_wrap=True)
    return int(any(one.state == "failed" for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
