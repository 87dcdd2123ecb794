"""Bars of a benchmark as a picture (PNG), with the spread and the bound. Needs matplotlib, the extra ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_WIDTH_INCHES = 7.5
_BAR_INCHES = 0.32
_MARGIN_INCHES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A panel: a bar for each method, a whisker from the fastest to the slowest round, a line at the bound if any."""

    title: str
    labels: tuple[str, ...]
    medians_s: tuple[float, ...]
    least_s: tuple[float, ...]
    most_s: tuple[float, ...]
    bound_s: float


def has_matplotlib() -> bool:
    """Whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


def draw_bars(path: Path, panels: Sequence[Bars], *, title: str) -> None:
    """Draw the panels one below the other and save the picture; no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_MARGIN_INCHES + _BAR_INCHES * len(panel.labels) for panel in panels]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        below = [median - least for median, least in zip(panel.medians_s, panel.least_s, strict=True)]
        above = [most - median for median, most in zip(panel.medians_s, panel.most_s, strict=True)]
        colours = ["#2a9d8f" if label.startswith("Syncline") else "#8d99ae" for label in panel.labels]
        axis.barh(range(len(panel.labels)), panel.medians_s, xerr=(below, above), color=colours, capsize=2)
        axis_label = "seconds of the slowest rank, median (whiskers: min, max)"
        if panel.bound_s:
            axis.axvline(panel.bound_s, color="#d62828", linewidth=1)
            axis_label += f"; red: the wire's bound, {panel.bound_s:.3g} s"  # a legend would cover a bar's whiskers
        axis.set_yticks(range(len(panel.labels)), panel.labels)
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_xlabel(axis_label, fontsize="small")
        axis.set_title(panel.title, fontsize="medium", loc="left")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=130)
