"""The report of a job: one HTML file that fetches nothing, for a browser of any width, light or dark, and for readers.

Tables say everything that pictures show. Pictures are SVG, drawn here: rectangles and lines are all that is needed, and
a plotting library would bring a megabyte of scripts.

Under any launcher (``SYNCLINE_REPORT``) every rank traces, and rank 0 writes the page when its process ends.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from syncline.errors import ConfigurationError
from syncline.observe import say
from syncline.report.explanation import (
    COMPUTING,
    ELSEWHERE,
    LATE,
    MEANING,
    NETWORK,
    UNKNOWN,
    Explanation,
    LinkShare,
    StepPath,
    explain,
)
from syncline.report.job_trace import JobTrace, RankTrace, Span, read_job_trace
from syncline.report.terminal import format_rates, network_links
from syncline.topology import DirectedLink
from syncline.units import counted, format_duration, format_size

WIDTH, LEFT = 1000, 110
"""Of a picture; where the time begins in a timeline."""
LEAST_WIDTH = 0.5
ROW, STRIP = 30, 11
"""Heights in the timeline: of a rank, of one of its two strips."""
MOST_POINTS = 400
TEXT = "text"
"""What an event says in a sentence, among what else it tells."""
LEAST_SPREAD = 0.05
"""Of a curve's values, in parts of the largest."""
MOST_ROWS = 200
"""Of a table of what happened; a job that breaks once a second would fill the file with it."""
STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --faint: #66707c; --paper: #fff; --line: #d9dee4; --soft: #f4f6f8;
  --forward: #4c86c6; --backward: #2b5c9e; --step: #2f9e8f; --elsewhere: #7f8b98; --wait: #e3bd6d; --network: #d46a26;
  --late: #b24c63; --unknown: #9a7fd1; --full: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --faint: #9aa5b1; --paper: #14181d; --line: #323a44;
  --soft: #1d2329; --forward: #7fb0e6; --backward: #3f74bd; --elsewhere: #9aa5b1; --wait: #b59c58; --late: #d0667f;
  --network: #e07b39; --unknown: #8a76b8; --full: #ff7b72; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 68rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.faint, caption, figcaption, small { color: var(--faint); } caption { text-align: left; padding-bottom: .4rem; }
caption span { display: inline-block; position: sticky; left: 0; max-width: min(66rem, calc(100vw - 2rem)); }
.wide + .wide, .time + .wide, details + details, figure + figure { margin-top: 1rem; } summary { padding: .2rem 0; }
.said { background: var(--soft); border-left: 4px solid var(--step); padding: .8rem 1rem .8rem 2.2rem; }
.said li { font-size: 1.1rem; margin: .25rem 0; } .failed { border-color: var(--full); }
.wide { overflow-x: auto; } .wide:focus-visible, summary:focus-visible { outline: 2px solid var(--forward); }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } th[scope=row] { white-space: normal; min-width: 10.5rem; position: sticky; left: 0;
  background: var(--paper); } thead th { vertical-align: bottom; } th.n { white-space: normal; }
td.n, th.n { text-align: right; }
tr.full th, tr.full td { color: var(--full); font-weight: 600; }
.bar { display: inline-block; width: 7rem; height: .7rem; background: var(--line); vertical-align: middle; }
.bar i { display: block; height: 100%; } .long { white-space: normal; }
.parts { display: flex; height: 1.1rem; min-width: 16rem; } .parts i { display: block; height: 100%; }
figure { margin: 0; } svg { display: block; width: 100%; min-width: 640px; height: auto; }
.timeline svg { min-width: 900px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); } .spark { width: 9rem; min-width: 0; height: 1.4rem; }
.grid { stroke: var(--line); } .curve { fill: none; stroke: var(--backward); stroke-width: 1.5; }
.spark path { fill: var(--network); } tr.full path { fill: var(--full); } .path { fill: var(--ink); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none; font-size: .9rem; }
.key i { display: inline-block; width: .9rem; height: .9rem; vertical-align: -.1rem; margin-right: .35rem; }
@media (max-width: 40rem) { body { font-size: 14px; padding-top: 1rem; } svg text { font-size: 14px; }
  .timeline svg text { font-size: 11px; } .said li { font-size: 1rem; } .time .bar { display: block; }
  th, td { padding-right: .6rem; } th[scope=row] { min-width: 9.5rem; max-width: 14rem; } .parts { min-width: 10rem; } }
""" + "".join(f".{kind} {{ fill: var(--{kind}); background: var(--{kind}); }}\n" for kind in (*MEANING, "wait"))
WAIT_S = 5.0
"""How long rank 0 waits until the other ranks have completed their traces."""
_TAIL = b"]\n"


def build_page(explanation: Explanation, *, title: str = "Syncline") -> str:
    """Return the report as HTML.

    >>> build_page(explain(JobTrace(ranks=(), topology=None))).startswith("<!doctype html>")
    True
    """
    job = explanation.job
    sections = (
        _head(explanation, title),
        _said(explanation),
        *(section(explanation) for section in (_time, _timeline, _network, _waits) if explanation.steps),
        _course(explanation),
        _plans(job),
        _updates(job),
        _events(job),
    )
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}: report</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(explanation: Explanation, title: str) -> str:
    job = explanation.job
    network = f" on {job.topology.name or 'a network without a name'}" if job.topology else ""
    num_steps = len(job.step_ends_s)
    facts = (
        f"{counted(len(job.ranks), 'rank')}{network}, {counted(num_steps, 'step')}"
        f"{f', {format_duration(job.end_s)} in all' if job.ranks else ''}"
    )
    return f'<header><h1>{escape(title)}</h1><p class="faint">{escape(facts)}</p></header>'


def _said(explanation: Explanation) -> str:
    kind = "said failed" if explanation.failures else "said"
    return f'<ul class="{kind}">{"".join(f"<li>{escape(said)}</li>" for said in explanation.sentences())}</ul>'


def _section(heading: str, *parts: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, full: int | None = None) -> str:
    """Lay out rows of HTML; heads that end in a blank are of numbers; the row ``full`` is marked."""
    numbers = [head.endswith(" ") for head in heads]
    cells = "".join(f'<th scope="col"{_n(n)}>{escape(head)}</th>' for head, n in zip(heads, numbers, strict=True))
    lines = []
    for place, (first, *others) in enumerate(rows):
        body = "".join(f"<td{_n(n)}>{cell}</td>" for cell, n in zip(others, numbers[1:], strict=True))
        mark = ' class="full"' if place == full else ""
        lines.append(f'<tr{mark}><th scope="row">{first}</th>{body}</tr>')
    head = f"<caption><span>{escape(caption)}</span></caption><thead><tr>{cells}</tr></thead>"
    return _wide(caption, f"<table>{head}<tbody>{''.join(lines)}</tbody></table>")


def _n(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def _time(explanation: Explanation) -> str:
    parts, step_s = explanation.parts_s, explanation.step_s
    rows = [
        (
            f'<span class="bar"><i class="{kind}" style="width:{parts[kind] / step_s:.1%}"></i></span> {MEANING[kind]}',
            format_duration(parts[kind]),
            f"{parts[kind] / step_s:.0%}",
        )
        for kind in MEANING
        if parts.get(kind, 0.0) > 0
    ]
    gains = [
        (escape(gain.change), format_duration(gain.seconds), f"{gain.seconds / step_s:.0%}")
        for gain in explanation.gains
    ]
    lacked = format_duration(explanation.lacked_s)
    note = (
        f'<p class="faint">For {lacked} of this a thread was ready and had no processor (the kernel\'s count, '
        "spread evenly over the time of the ranks on the path).</p>"
    )
    return _section(
        "Where a step's time goes",
        '<div class="time">',
        _table("The critical path of a step, mean", ("what", "seconds ", "part "), rows),
        "</div>",
        note if explanation.lacked_s else "",
        _table("What one change would give, at most", ("change", "of a step ", "part "), gains) if gains else "",
    )


def _timeline(explanation: Explanation) -> str:
    by_time = sorted(explanation.steps, key=lambda step: step.seconds)
    median, slowest = by_time[len(by_time) // 2], by_time[-1]
    key = "".join(
        f'<li><i class="{kind}"></i>{escape(meaning)}</li>'
        for kind, meaning in MEANING.items()
        if kind not in (LATE, UNKNOWN)
    )
    key += '<li><i class="wait"></i>waits for others</li><li><i style="background:var(--ink)"></i>critical path</li>'
    shown = [_step_picture(explanation.job, median, "a step of median length", is_open=True)]
    if slowest is not median:
        shown.append(_step_picture(explanation.job, slowest, "the slowest step", is_open=False))
    return _section("Timeline", f'<ul class="key">{key}</ul>', *shown)


def _wide(label: str, inner: str) -> str:
    """Wrap what may be wider than the screen, so that it can be moved by keyboard too."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{inner}</div>'


def _step_picture(job: JobTrace, step: StepPath, what: str, *, is_open: bool) -> str:
    height = 4 + ROW * len(job.ranks) + 16
    drawn = [_row_of(one, step, 4 + place * ROW) for place, one in enumerate(job.ranks)]
    for quarter, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        x = LEFT + (WIDTH - LEFT) * quarter / 4
        time = format_duration(step.seconds * quarter / 4) if quarter else "0"
        drawn.append(f'<text x="{x:.0f}" y="{height - 4}" text-anchor="{anchor}">{time}</text>')
    listed = [part for part in step.parts if part.seconds >= 0.01 * step.seconds]
    parts = ", ".join(f"{format_duration(part.seconds)} {part.kind} (rank {part.rank})" for part in listed)
    label = f"Step {step.number}, {what}: {format_duration(step.seconds)}"
    told = escape(f"{label}; its critical path: {parts}")
    picture = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{told}">{"".join(drawn)}</svg>'
    caption = f"<figcaption>Critical path: {escape(parts)}</figcaption>"
    opened = ' open="open"' if is_open else ""
    return (
        f"<details{opened}><summary>{escape(label)}</summary>"
        f'<figure class="timeline">{_wide(label, picture)}{caption}</figure></details>'
    )


def _row_of(one: RankTrace, step: StepPath, top: int) -> str:
    """Draw what one rank did in a step: phases and waits, below them its messages, and where the critical path is."""
    scale = (WIDTH - LEFT) / step.seconds
    drawn = [f'<text x="0" y="{top + 15}">{escape(_short(one.name))}</text>']

    def draw(span: Span, kind: str, y: int, height: int, told: str = "") -> None:
        start_s = max(span.start_s, step.start_s)
        width = (min(span.end_s, step.end_s) - start_s) * scale
        if width >= LEAST_WIDTH:
            x = LEFT + (start_s - step.start_s) * scale
            title = f"<title>{escape(told)}, {format_duration(span.seconds)}</title>" if told else ""
            where = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
            drawn.append(f'<rect class="{kind}" {where}>{title}</rect>')

    for span in one.between("compute", step.start_s, step.end_s):
        draw(span, span.name, top, STRIP, span.name)
    for span in one.between("wait", step.start_s, step.end_s):
        draw(span, "wait", top, STRIP, f"waits in {span.name}")
    for span in one.spans.get("communication", ()):
        draw(span, NETWORK, top + STRIP + 1, STRIP - 5, span.name)
    for part in step.parts:
        if part.rank == one.rank:
            draw(part, "path", top + 2 * STRIP - 2, 3)
    return "".join(drawn)


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"


def _network(explanation: Explanation) -> str:
    topology = explanation.job.topology
    if topology is None:
        return ""
    shares = {share.link: share for share in explanation.links}
    rows: list[Sequence[str]] = []
    full = None
    for name, link, depth in network_links(topology):
        both = [shares.get(DirectedLink(name, way)) for way in ("up", "down")]
        busiest = max(
            (share for share in both if share), key=lambda share: (share.use or 0.0, share.num_bytes), default=None
        )
        if busiest is not None and busiest is explanation.links[0] and busiest.use:
            full = len(rows)
        use = "" if busiest is None or busiest.use is None else f"{busiest.use:.0%}"
        rows.append(
            (
                "&emsp;" * depth + escape(name),
                escape(format_rates(link)) if link.up_bytes_per_s != float("inf") else "not known",
                *(format_size(share.num_bytes) if share else "-" for share in both),
                use,
                "" if busiest is None else _spark(busiest),
            )
        )
    heads = ("link above", "rate", "up ", "down ", "use ", "over time")
    caption = "Each link while steps were made: use is that of its busier direction; the busiest link is marked"
    return _section("Network", _table(caption, heads, rows, full=full))


def _spark(share: LinkShare) -> str:
    most = max(*share.over_time, 1e-9) if share.use is None else max(1.0, *share.over_time)
    num = len(share.over_time)
    path = (
        "M0 20"
        + "".join(f"V{20 - 20 * value / most:.1f}H{(k + 1) * 100 / num:.1f}" for k, value in enumerate(share.over_time))
        + "V20Z"
    )
    box = 'viewBox="0 0 100 20" preserveAspectRatio="none"'
    return f'<svg class="spark" {box} aria-hidden="true"><path d="{path}"/></svg>'


def _waits(explanation: Explanation) -> str:
    start_s, end_s = explanation.steps[0].start_s, explanation.steps[-1].end_s
    span_s, rows = end_s - start_s, []
    for one in explanation.job.ranks:
        waits = one.between("wait", start_s, end_s)
        parts = dict.fromkeys((*COMPUTING, ELSEWHERE), 0.0)
        for span in one.between("compute", start_s, end_s):
            parts[span.name] = parts.get(span.name, 0.0) + span.overlap_s(start_s, end_s)
        waited: dict[str, float] = {}
        for wait in waits:
            waited[wait.name] = waited.get(wait.name, 0.0) + wait.overlap_s(start_s, end_s)
        for name, seconds in waited.items():
            if name in COMPUTING:
                parts[name] = max(0.0, parts[name] - seconds)
        parts["wait"] = sum(waited.values())
        parts[ELSEWHERE] = max(0.0, span_s - sum(parts.values()))
        bar = "".join(
            f'<i class="{kind}" style="width:{value / span_s:.1%}"></i>' for kind, value in parts.items() if value
        )
        reasons = ", ".join(
            f"{escape(name)} {seconds / span_s:.0%}"
            for name, seconds in sorted(waited.items(), key=lambda x: -x[1])
            if seconds >= 0.005 * span_s
        )
        rows.append(
            (
                escape(one.name),
                format_duration(explanation.own_s[one.rank]),
                f"{parts['wait'] / span_s:.0%}",
                f'<span class="parts">{bar}</span>',
                reasons,
            )
        )
    heads = ("rank", "own seconds of a step ", "waits ", "parts of its time", "it waits in")
    return _section("Ranks and their waits", _table("Who waits least is waited for", heads, rows))


def _course(explanation: Explanation) -> str:
    job = explanation.job
    curves = []
    ends = list(job.step_ends_s.items())
    if len(ends) > 2:
        seconds = [(number, end_s - before_s) for (_, before_s), (number, end_s) in pairwise(ends)]
        curves.append(_curve("Time of each step", seconds, "step", format_duration))
    losses = [[(time_s, values["value"]) for time_s, values in one.counters.get("loss", ())] for one in job.ranks]
    losses = [each for each in losses if each]
    if losses:
        mean = [
            (fmean(time_s for time_s, _ in each), fmean(loss for _, loss in each))
            for each in zip(*losses, strict=False)
        ]
        if len(mean) > 1:
            curves.append(_curve(f"Loss, mean of {counted(len(losses), 'rank')}", mean, "seconds", "{:.4g}".format))
    return _section("Course of the job", *curves) if curves else ""


def _curve(name: str, points: Sequence[tuple[float, float]], unit: str, spell: Callable[[float], str]) -> str:
    """Draw values over a number of ``unit``; from zero on, unless that would leave most of the picture empty."""
    size, ends = -(-len(points) // MOST_POINTS), (points[0][0], points[-1][0])
    name += f" (means of {size} in a row)" if size > 1 else ""
    bins = [points[k : k + size] for k in range(0, len(points), size)]
    points = [(fmean(x for x, _ in each), fmean(y for _, y in each)) for each in bins]
    left, top, bottom = 60, 8, 130
    (first, _), (last, _) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    if low >= 0 and (low < high / 2 or high - low < LEAST_SPREAD * high):  # what hardly changes shows as a flat line
        low = 0.0
    across, up = (WIDTH - left) / ((last - first) or 1.0), (bottom - top) / ((high - low) or 1.0)
    path = " ".join(f"{left + (x - first) * across:.1f},{bottom - (y - low) * up:.1f}" for x, y in points)
    least = min(y for _, y in points)
    label = f"{name}: from {spell(points[0][1])} to {spell(points[-1][1])}, between {spell(least)} and {spell(high)}"
    lines = "".join(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y}" y2="{y}"/>' for y in (top, bottom))
    marks = (
        (left - 6, top + 8, "end", spell(high)),
        (left - 6, bottom, "end", spell(low) if low else "0"),
        (left, 146, "start", f"{ends[0]:.4g}"),
        (WIDTH, 146, "end", f"{unit} {ends[1]:.4g}"),
    )
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in marks)
    curve = f'{lines}{texts}<polyline class="curve" points="{path}"/>'
    picture = f'<svg viewBox="0 0 {WIDTH} 150" role="img" aria-label="{escape(label)}">{curve}</svg>'
    return f"<figure><figcaption>{escape(name)}</figcaption>{_wide(name, picture)}</figure>"


def _plans(job: JobTrace) -> str:
    rows = []
    for plan in [plan for plan in job.plans() if plan["bytes"] >= 1 << 10][:12]:
        took = [
            span.seconds
            for one in job.ranks
            for span in one.spans.get("communication", ())
            if span.name.startswith(plan["collective"]) and span.args.get("bytes") == plan["bytes"]
        ]
        measured = format_duration(sorted(took)[len(took) // 2]) if took else "-"
        ratio = f"{plan['predicted_s'] / plan['bound_s']:.2f}" if plan["bound_s"] else "-"
        rows.append(
            (
                escape(plan["collective"].replace("_", "-")),
                format_size(plan["bytes"]),
                escape(plan["planner"]),
                format_duration(plan["bound_s"]),
                format_duration(plan["predicted_s"]),
                ratio,
                measured,
            )
        )
    if not rows:
        return ""
    heads = ("collective", "size ", "planner", "bound ", "predicted ", "of the bound ", "measured ")
    caption = (
        "The largest collectives: no schedule can take less than the bound. Measured is the median over ranks, "
        "from a rank's own begin: it has the time in it in which others came, and other collectives went first"
    )
    return _section("Plans beside the bound", _table(caption, heads, rows))


def _updates(job: JobTrace) -> str:
    words = ("stale", "dropped", "reconnects", "resent_bytes", "lost_ranks", "epoch", "goodput")
    totals = {one.name: one.facts["totals"][-1] for one in job.ranks if one.facts.get("totals")}
    names = sorted({name for each in totals.values() for name in each if any(word in name for word in words)})
    if not totals:
        return ""
    rows = [(escape(name), *(_number(each.get(key)) for key in names)) for name, each in totals.items()]
    heads = ("rank", *(f"{name.replace('_', ' ')} " for name in names))
    caption = "Faults, stale and dropped gradients, by rank; goodput is the part of the time that finished steps took"
    left = [one.name for one in job.ranks if one.name not in totals]
    note = (
        f'<p class="faint">Without totals, as they did not come to their end: {escape(", ".join(left))}.</p>'
        if left
        else ""
    )
    return _section("Totals", _table(caption, heads, rows), note)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _events(job: JobTrace) -> str:
    found = sorted(_instants(job.ranks), key=lambda event: event[0])
    rows = [
        (f"{time_s:.1f} s", escape(who), f'<span class="long">{escape(what)}</span>')
        for time_s, who, what in found[:MOST_ROWS]
    ]
    if not rows:
        return _section("Faults and members", "<p>Nothing of the kind was recorded.</p>")
    left = len(found) - MOST_ROWS
    note = f'<p class="faint">... and {left} more are in the trace.</p>' if left > 0 else ""
    return _section("Faults and members", _table("What happened, in its order", ("time", "on", "what"), rows), note)


def _instants(ranks: Sequence[RankTrace]) -> Iterator[tuple[float, str, str]]:
    for one in ranks:
        for span in one.instants:
            yield span.start_s, one.name, span.name + _args(span.args)


def _args(args: Mapping[str, object]) -> str:
    told = ", ".join(f"{key} {value}" for key, value in args.items() if key != TEXT)
    return (f" ({told})" if told else "") + (f": {args[TEXT]}" if TEXT in args else "")


def write_report(trace: Path, target: Path, *, title: str) -> None:
    """Read ``trace`` and write what it tells to ``target``; :class:`ConfigurationError` where either cannot be.

    >>> trace = syncline.observe.Trace(path="trace-0.json"); trace.close()
    >>> write_report(Path("trace-0.json"), Path("run.html"), title="train.py")
    """
    page = build_page(explain(read_job_trace(trace)), title=title)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"a report must be a file in a folder that can be written to; '{target}' is not: {error.strerror}"
        ) from error


def trace_folder(target: Path, kept: Path | None, *, rank: int, world_size: int) -> Path:
    """Return where the ranks write their traces; rank 0 makes the report of them when its process ends.

    That is ``kept``, a folder in which they stay, if there is one. Call it before the trace is opened, so that it is
    closed before. Raises :class:`ConfigurationError` if the folder cannot be made, or is a file. Traces that are on
    other machines are missing in the report.
    """
    target = target.absolute()
    folder = target.with_name(f"{target.name}.parts") if kept is None else kept
    if kept is not None and not kept.is_dir():
        raise ConfigurationError(
            f"SYNCLINE_REPORT is made of the traces of all ranks, and {kept} is a file for one; let SYNCLINE_TRACE "
            "name a folder that is there, or leave it out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"trace-{rank}.json").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"SYNCLINE_REPORT: {folder} cannot be made: {error.strerror}") from error
    if rank == 0:
        atexit.register(_write, folder, target, world_size, is_kept=kept is not None)
    return folder


def _write(folder: Path, target: Path, world_size: int, *, is_kept: bool) -> None:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s and sum(map(_is_complete, folder.glob("*.json"))) < world_size:
        time.sleep(0.05)
    try:
        write_report(folder, target, title=Path(sys.argv[0]).name)
    except ConfigurationError as error:
        say(str(error))
        return
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"report: {target}")


def _is_complete(path: Path) -> bool:
    return path.read_bytes()[-len(_TAIL) :] == _TAIL
