"""A job as it runs, in lines: what rank 0 has heard of all ranks, for logs, for a terminal and for ``syncline top``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from syncline.observe import say
from syncline.units import format_rate

ON = "on"
LINE_EVERY = 5
"""Views between two lines in a log: one each ten seconds."""
LEAST_SHOWN = 0.005
"""Of what is sent on a link, lost on its way."""
_lines_left: list[int] = [0]


def write_view(view: Mapping[str, Any], place: str) -> None:
    """Write a view to the file ``place``, or a line of it to standard error now and then where that is "on"."""
    if place != ON:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            path = Path(place)
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_text(json.dumps(view))
            whole.replace(path)
        return
    _lines_left[0] -= 1
    if _lines_left[0] < 0:
        _lines_left[0] = LINE_EVERY - 1
        say(summary(view))


def summary(view: Mapping[str, Any]) -> str:
    """Return the view of a job in one line.

    >>> summary({"seconds": 8, "ranks": [], "links": [], "said": []})
    '8 s: no rank has said anything yet'
    """
    ranks: Sequence[Mapping[str, Any]] = view["ranks"]
    if not ranks:
        return f"{view['seconds']:.0f} s: no rank has said anything yet"
    steps = [rank["steps"] for rank in ranks]
    reached = f"step {min(steps)}" + (f" to {max(steps)}" if max(steps) > min(steps) else "")
    parts = [f"{view['seconds']:.0f} s: {reached}", f"{min(rank['steps_per_s'] for rank in ranks):.3g} steps/s"]
    samples = [rank["samples_per_s"] for rank in ranks]
    if None not in samples:
        parts.append(f"{sum(samples):.4g} samples/s")
    losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.4g}")
    waits = sorted(ranks, key=lambda rank: rank["waited"])
    parts.append(f"waits {waits[0]['waited']:.0%} ({waits[0]['name']}) to {waits[-1]['waited']:.0%}")
    if view["links"]:
        link = view["links"][0]
        parts.append(f"link of {link['link']} {link['use']:.0%} full")
    return ", ".join(parts)


def render(view: Mapping[str, Any], *, height: int = 24) -> list[str]:
    """Return the view as lines of a terminal of so many; where not all ranks have room, those that wait least."""
    if not view["ranks"]:
        return [summary(view), *view["said"]]
    ranks = sorted(view["ranks"], key=lambda rank: rank["waited"])
    links = view["links"][: max(1, height // 6)]
    room = max(1, height - 5 - len(links) - len(view["said"]))
    shown = sorted(ranks[:room], key=lambda rank: rank["rank"])
    width = max((len(rank["name"]) for rank in shown), default=4)
    lines = [summary(view), f"{'rank':<{width}} {'step':>8} {'steps/s':>8} {'waits':>6} {'no proc':>8}  where"]
    for rank in shown:
        where = "waits in " * rank["is_waiting"] + rank["phase"]
        if rank["silent_s"] > 10:
            where = f"silent for {rank['silent_s']:.0f} s, was: {where}"
        numbers = f"{rank['steps']:>8} {rank['steps_per_s']:>8.3g} {rank['waited']:>6.0%} {rank['lacked']:>8.0%}"
        lines.append(f"{rank['name']:<{width}} {numbers}  {where}")
    if len(ranks) > len(shown):
        lines.append(f"... and {len(ranks) - len(shown)} that wait more")
    for link in links:
        bar = "#" * round(20 * min(1.0, link["use"]))
        lost = f", {link['lost']:.0%} lost" if link["lost"] >= LEAST_SHOWN else ""
        used = f"{link['use']:>5.0%} of {format_rate(link['rate'])}"
        lines.append(f"link of {link['link']:<16} [{bar:<20}] {used}{lost}")
    return [*lines, *view["said"]]
