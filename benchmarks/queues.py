"""An all-reduce on switches of several kinds, under each congestion control, in turns (Linux, root).

    python benchmarks/queues.py --record benchmarks/records/DATE_queues

Each combination has a lab of its own in each round. Beside the time stands what explains it and does not depend on what
else the machine does: packets that found a queue full, segments that were sent again, how many packets the links
carried for each megabyte (a token bucket cuts what the kernel hands on as one packet of up to 64 KiB into frames, and
each costs processor time at each hop), and what part of the processors' time was used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any

import psutil

from syncline.bench.record import collect_facts
from syncline.bench.running import in_order
from syncline.cli.bench import stolen_share
from syncline.lab import Lab
from syncline.lab.programs import run_program
from syncline.lab.queues import QUEUE_KINDS
from syncline.schedule import Collective, lower_bound
from syncline.topology import Topology
from syncline.units import parse_size

RANK = Path(__file__).with_name("queues_rank.py")
CONGESTION_CONTROLS = ("bbr", "cubic", "reno")
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Switches and senders of one kind."""

    queues: str
    congestion: str
    packet_filters: bool = False

    @property
    def name(self) -> str:
        """How the table calls it."""
        filters = ["filters on"] if self.packet_filters else []
        return ", ".join([self.queues, self.congestion, *filters])


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the lab and the machine have counted so far."""

    num_dropped: int
    num_resent: int
    num_packets: int
    num_bytes: int
    busy_s: float
    elapsed_s: float

    def since(self, before: Counts) -> Counts:
        """Return what was counted after ``before``."""
        earlier = asdict(before)
        return Counts(**{name: value - earlier[name] for name, value in asdict(self).items()})


def main() -> None:
    """Run all combinations in turns, print the table, and record it."""
    options = parse()
    topology = in_order(Topology.load(options.topology), options.order)
    combinations = [
        Combination(queues=queues, congestion=congestion, packet_filters=has_filters)
        for queues, congestion, has_filters in product(
            options.queues, options.congestion, (False, True) if options.packet_filters else (False,)
        )
    ]
    facts = collect_facts(["python", *sys.argv], [topology], network="in the lab")
    stolen_share()
    results: dict[str, list[dict[str, Any]]] = {combination.name: [] for combination in combinations}
    for number in range(options.rounds):
        for combination in combinations:
            found = run_combination(combination, topology, options)
            results[combination.name].append(found)
            print(f"round {number + 1}: {combination.name}: {statistics.median(found['times_s']):.3f} s", flush=True)
    facts["stolen_share"] = round(stolen_share(), 3)
    bound_s = float(lower_bound(topology, Collective.ALL_REDUCE, parse_size(options.bytes)))
    text = table(results, bound_s)
    print(text)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}: {value}" for name, value in facts.items()]
        (options.record / "table.txt").write_text("\n".join([*lines, "", text, ""]))
        found_all = {"facts": facts, "bound_s": bound_s, "results": results}
        (options.record / "results.json").write_text(json.dumps(found_all, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="two-racks-5-3")
    parser.add_argument("--order", choices=("topology", "interleaved"), default="topology")
    parser.add_argument("--queues", nargs="+", choices=QUEUE_KINDS, default=list(QUEUE_KINDS))
    parser.add_argument("--congestion", nargs="+", default=CONGESTION_CONTROLS)
    parser.add_argument("--packet-filters", action="store_true", help="each combination with filters left on, too")
    parser.add_argument("--bytes", default="16 MiB")
    parser.add_argument("--calls", type=int, default=5, help="all-reduces that count, in each lab")
    parser.add_argument("--rounds", type=int, default=3, help="labs of each combination")
    parser.add_argument("--fabric", type=json.loads, default={}, help="FabricOptions of all ranks, as JSON")
    parser.add_argument("--record", type=Path, help="folder for table.txt and results.json")
    return parser.parse_args()


def run_combination(combination: Combination, topology: Topology, options: argparse.Namespace) -> dict[str, Any]:
    """Run the calls in a lab of their own; return each call's time, of the slowest rank, and what was counted."""
    settings = {**asdict(combination)}
    with Lab(topology, **settings) as lab, tempfile.TemporaryDirectory(prefix="syncline-queues-") as store:
        order = {
            "store": store,
            "num_bytes": parse_size(options.bytes),
            "num_calls": options.calls,
            "options": {"congestion": combination.congestion, **options.fabric},
        }
        ranks = [
            lab.spawn(
                host.name,
                [sys.executable, str(RANK), json.dumps({**order, "rank": rank, "address": host.address})],
                env={"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in lab.plan.hosts
            for rank in topology.ranks_of(host.name)
        ]
        before, after = (read_when(ranks, rank_of_zero(topology), word, lab) for word in ("warm", "over"))
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), [process.returncode for process in ranks]
    times = zip(*(json.loads(output) for output in outputs), strict=True)
    return {"times_s": [max(times_s) for times_s in times], **asdict(after.since(before))}


def rank_of_zero(topology: Topology) -> int:
    """Return the index of rank 0 among the processes, which stand in the order of hosts."""
    return [rank for host in topology.hosts for rank in topology.ranks_of(host.name)].index(0)


def read_when(ranks: Sequence[subprocess.Popen[str]], zero: int, word: str, lab: Lab) -> Counts:
    """Read the counts once rank 0 says that it is time, and let it go on."""
    output, answers = ranks[zero].stdout, ranks[zero].stdin
    assert output is not None
    assert answers is not None
    said = output.readline().strip()
    assert said == word, f"rank 0 said {said!r} in place of {word!r}; what it wrote stands above"
    counts = count(lab)
    tell(answers)
    return counts


def tell(answers: IO[str]) -> None:
    """Let a rank go on."""
    answers.write("\n")
    answers.flush()


def count(lab: Lab) -> Counts:
    """Read all counters."""
    shown = json.loads(run_program("ip", "-n", lab.plan.switch_namespace, "-j", "-s", "link", "show"))
    ports = [
        link["stats64"]["rx"] for link in shown if link["ifname"] in {each.upper_interface for each in lab.plan.links}
    ]
    spent = psutil.cpu_times()
    return Counts(
        num_dropped=sum(lab.dropped_packets().values()),
        num_resent=lab.resent_segments(),
        num_packets=sum(port["packets"] for port in ports),
        num_bytes=sum(port["bytes"] for port in ports),
        busy_s=spent.user + spent.nice + spent.system + spent.irq + spent.softirq,
        elapsed_s=time.monotonic(),
    )


def table(results: dict[str, list[dict[str, Any]]], bound_s: float) -> str:
    """Lay out a row for each combination, with the median over all calls of all its labs."""
    medians = {name: statistics.median(times_of(labs)) for name, labs in results.items()}
    best_s = min(medians.values())
    heading = f"{'queues, congestion control':<34} {'median s':>8} {'min':>6} {'max':>6} {'x bound':>7} {'x best':>6}"
    lines = [f"{heading} {'dropped':>8} {'resent':>7} {'packets/MB':>10} {'busy':>5}"]
    for name, labs in results.items():
        times_s, total = times_of(labs), {key: sum(lab[key] for lab in labs) for key in labs[0] if key != "times_s"}
        median_s, num_calls = medians[name], len(times_s)
        packets_per_mb = 1e6 * total["num_packets"] / total["num_bytes"]
        busy = total["busy_s"] / (total["elapsed_s"] * (psutil.cpu_count() or 1))
        lines.append(
            f"{name:<34} {median_s:8.3f} {min(times_s):6.3f} {max(times_s):6.3f} {median_s / bound_s:7.2f} "
            f"{median_s / best_s:6.2f} {total['num_dropped'] / num_calls:8.1f} "
            f"{total['num_resent'] / num_calls:7.1f} {packets_per_mb:10.0f} {busy:5.0%}"
        )
    lines.append(
        f"lower bound {bound_s:.3f} s; dropped and resent are for each call; busy: part of the processors' time"
    )
    return "\n".join(lines)


def times_of(labs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the times of all calls."""
    return [time_s for lab in labs for time_s in lab["times_s"]]


if __name__ == "__main__":
    main()
