"""Two senders with bulk to a third rank over one bottleneck; then one of them sends an urgent message (Linux, root).

How long does that message take, and how many times as long as on the idle link? In the lab, with real sockets:

    python benchmarks/incast.py --record benchmarks/records/DATE_incast

Variants: what orders the senders is the network (marks, and switches that honour them), the receiver's grants, both, or
neither. Each pair of figures, idle and loaded, is taken in turns in one run; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syncline.bench.record import collect_facts
from syncline.lab import Lab
from syncline.topology import Topology
from syncline.units import format_rate, format_size, parse_rate, parse_size

RANK = Path(__file__).with_name("incast_rank.py")
DEFAULT_SIZES = ("64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB")
NO_GRANTS = {"grant_window_bytes": 1 << 30}
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Who orders the senders."""

    name: str
    has_switch_priorities: bool = False
    num_classes: int = 4
    bulk_class: int = 3
    bulk_urgency: int = 9
    knows_rates: bool = True
    """Without the topology's rates, and with an endless window, grants order nothing."""
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "both": Variant(name="switch priorities and grants", has_switch_priorities=True),
    "grants": Variant(name="grants alone"),
    "grants-one": Variant(name="grants alone, one connection", num_classes=1, bulk_class=0),
    "switches": Variant(
        name="switch priorities alone", has_switch_priorities=True, knows_rates=False, options=NO_GRANTS
    ),
    "urgency-none": Variant(name="neither: one class, one urgency", num_classes=1, bulk_class=0, bulk_urgency=0),
    "none": Variant(name="neither: no grants, TCP shares", knows_rates=False, options=NO_GRANTS),
}


def run_variant(
    variant: Variant, *, rate: float, sizes: Sequence[int], rounds: int, wire_bytes: int = 0, congestion: str = ""
) -> dict[str, Any]:
    """Run one variant in a lab of its own; return rank 0's findings, and what the bottleneck's queues carried."""
    topology = Topology.flat(3, rate=rate)
    with (
        Lab(topology, priorities=variant.has_switch_priorities) as lab,
        tempfile.TemporaryDirectory(prefix="syncline-incast-") as store,
    ):
        order = {
            "store": store,
            "sizes": list(sizes),
            "rounds": rounds,
            "wire_bytes": wire_bytes,
            "num_classes": variant.num_classes,
            "bulk_class": variant.bulk_class,
            "bulk_urgency": variant.bulk_urgency,
            "knows_rates": variant.knows_rates,
            "options": variant.options | ({"congestion": congestion} if congestion else {}),
        }
        processes = [
            lab.spawn(
                f"h{rank}",
                [sys.executable, str(RANK), json.dumps({**order, "rank": rank})],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        with QueueSampler(lab) if wire_bytes and variant.has_switch_priorities else nullcontext() as sampler:
            outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes), [process.returncode for process in processes]
        found: dict[str, Any] = json.loads(outputs[0])
        if sampler is not None:
            found["queues"] = sampler.samples
        return found | {"shares": shares_of_urgent(found) if variant.num_classes > 1 else {}}


class QueueSampler:
    """Reads what each priority's queue at the receiver's port has sent, some hundred times a second."""

    def __init__(self, lab: Lab) -> None:
        (port,) = (link.upper_interface for link in lab.plan.links if link.child == "h0")
        self._command = ["ip", "netns", "exec", lab.plan.switch_namespace, "tc", "-s", "class", "show", "dev", port]
        self.samples: list[tuple[float, dict[int, int]]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> QueueSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.004):
            text = subprocess.run(self._command, capture_output=True, text=True, check=True).stdout
            self.samples.append((time.monotonic(), parse_classes(text)))


def parse_classes(text: str) -> dict[int, int]:
    """Return the bytes that each leaf class of a lab's queue has sent, by priority."""
    found: dict[int, int] = {}
    priority = None
    for line in text.splitlines():
        words = line.split()
        if line.startswith("class htb"):
            priority = int(words[2].partition(":")[2], 16) - 10 if "leaf" in words else None
        elif words[:1] == ["Sent"] and priority is not None:
            found[priority] = int(words[1])
    return found


def share_of_urgent(samples: Sequence[tuple[float, dict[Any, int]]], started_s: float, ended_s: float) -> float:
    """Return class 0's share of the bytes that went by while the urgent message was on its way."""
    first = max((sample for sample in samples if sample[0] <= started_s), key=lambda sample: sample[0])
    last = max((sample for sample in samples if sample[0] <= ended_s), key=lambda sample: sample[0])
    moved = {number: last[1][number] - first[1].get(number, 0) for number in last[1]}
    urgent = moved.get(0, moved.get("0", 0))
    return urgent / (sum(moved.values()) or 1)


def ratio(row: dict[str, Any]) -> float:
    """How many times as long as on the idle link."""
    return statistics.median(row["loaded_s"]) / statistics.median(row["idle_s"])


def main() -> None:
    """Run the variants, print the table, and record it."""
    options = parse()
    results: dict[str, dict[str, Any]] = {}
    rate, sizes = parse_rate(options.rate), [parse_size(size) for size in options.sizes]
    for name in options.variants:
        results[name] = run_variant(
            VARIANTS[name],
            rate=rate,
            sizes=sizes,
            rounds=options.rounds,
            wire_bytes=parse_size(options.wire),
            congestion=options.congestion,
        )
        print(VARIANTS[name].name, *(f"{ratio(row):.2f}" for row in results[name]["rows"]), flush=True)
    text = table(results, rate)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results))
    if options.record:
        write_record(options.record, results, text, Topology.flat(3, rate=rate))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rate", default="200 Mbit/s", help="of each host's link")
    parser.add_argument("--sizes", nargs="+", default=DEFAULT_SIZES, help="of the urgent message")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wire", default="4 MiB", help="size of the message that is watched on the wire; '0 B': none")
    parser.add_argument(
        "--congestion", default="", help="TCP's control for all connections; default: as the fabric has it"
    )
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument("--record", type=Path, help="folder for table.txt, results.json and plot.png")
    return parser.parse_args()


def table(results: dict[str, dict[str, Any]], rate: float) -> str:
    """Lay out medians: milliseconds on the idle link, then times as long under bulk (least to most)."""
    lines = [
        f"each link {format_rate(rate)}; median ms on the idle link | under bulk | ratio (least to most of loaded)"
    ]
    for name, found in results.items():
        lines.append(f"\n{VARIANTS[name].name}")
        for row in found["rows"]:
            idle_s, loaded_s = statistics.median(row["idle_s"]), statistics.median(row["loaded_s"])
            lines.append(
                f"  {format_size(row['num_bytes']):>8} {1000 * idle_s:9.2f} {1000 * loaded_s:9.2f} {ratio(row):6.2f}"
                f"   ({min(row['loaded_s']) / idle_s:.2f} to {max(row['loaded_s']) / idle_s:.2f}; wire alone "
                f"{1000 * row['num_bytes'] / rate:.2f})"
            )
        lines += [f"  {line}" for line in describe_transport(found)]
    return "\n".join(lines)


def shares_of_urgent(found: dict[str, Any]) -> dict[str, float]:
    """Return class 0's share of the bytes while the watched message was under way, by who counted them."""
    wire = found.get("wire")
    if not wire:
        return {}
    started_s, ended_s = wire["started_s"], wire["started_s"] + wire["took_s"]
    counted = {"received by the fabric": wire["samples"], "sent by the switch": found.get("queues")}
    return {what: share_of_urgent(samples, started_s, ended_s) for what, samples in counted.items() if samples}


def describe_transport(found: dict[str, Any]) -> list[str]:
    """Say what share of the bytes was urgent while the urgent message was on its way."""
    return [
        f"while {format_size(found['wire']['num_bytes'])} were urgent, class 0 had {share:.0%} of what was {what}"
        for what, share in found["shares"].items()
    ]


def write_record(folder: Path, results: dict[str, dict[str, Any]], text: str, topology: Topology) -> None:
    """Write the table, the raw figures, and a picture of what went by on each class."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = collect_facts(["python", *sys.argv], [topology], network="lab")
    head = "\n".join(f"{name}: {value}" for name, value in facts.items())
    (folder / "table.txt").write_text(f"{head}\n\n{text}\n")
    rows = {name: {"rows": found["rows"], "shares": found["shares"]} for name, found in results.items()}
    (folder / "results.json").write_text(json.dumps({"facts": facts, "variants": rows}, indent=1) + "\n")
    watched = {name: found for name, found in results.items() if found.get("wire")}
    if watched:
        draw_wire(folder / "plot.png", watched)


def draw_wire(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Draw the bytes that each class had brought to the receiver, over time; the urgent message is shaded."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), 1, figsize=(8, 2.2 * len(results)), sharex=True, squeeze=False)
    for (name, found), axis in zip(results.items(), axes[:, 0], strict=True):
        wire = found["wire"]
        origin_s = wire["started_s"]
        times = [1000 * (time_s - origin_s) for time_s, _ in wire["samples"]]
        for number in sorted(wire["samples"][-1][1], key=int):
            counts = [counted.get(number, 0) for _, counted in wire["samples"]]
            if counts[-1] > counts[0]:
                axis.plot(times, [(count - counts[0]) / 2**20 for count in counts], label=f"class {number}")
        axis.axvspan(0, 1000 * wire["took_s"], alpha=0.15)
        axis.set_title(VARIANTS[name].name, fontsize=9)
        axis.set_ylabel("MiB received")
        axis.legend(fontsize=8, loc="upper left")
    axes[-1, 0].set_xlabel("ms since the urgent message was sent (shaded: under way)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
