"""The size of the cache against the quality reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keyshift.report.figures.canvas import (
    MOST_LABELS,
    Label,
    Picture,
    label_right,
    looks,
    name_in_figure,
    render,
    wide_axes,
)
from keyshift.report.formats import as_compact, as_loss, as_percent
from keyshift.report.numbers import summary_rows
from keyshift.report.outcomes import ceiling_remark
from keyshift.results import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_cache(report: Report) -> Picture | None:
    """One point per variant whose cache was measured and whose final quality is known, if they can be told
    apart."""
    task = report.kind == "task"
    noun, better, form = ("accuracy", "upper", as_percent) if task else ("loss", "lower", as_loss)
    final, size = f"final_{noun}", "cache_bytes_per_token_measured"
    everything = zip(looks(report), summary_rows(report), strict=True)
    shown = [(look, row) for look, row in everything if row[size] is not None and row[final]]
    if not 0 < len(shown) <= MOST_LABELS:
        return None
    labels = [
        Label(name_in_figure(row["variant"]), look.colour, row[size], row[final]["mean"])
        for look, row in shown
    ]
    figure, axes = wide_axes([label.text for label in labels])
    for (look, row), (_, colour, x, y) in zip(shown, labels, strict=True):
        error = [[y - row[final]["min"]], [row[final]["max"] - y]]
        axes.errorbar(x, y, error, fmt="none", ecolor=colour, elinewidth=1, capsize=3)
        axes.plot(x, y, look.marker, color=colour, markersize=7, markeredgecolor="white")
    _set_axes(axes, report.kind, labels)
    label_right(axes, labels)
    listing = "; ".join(f"{label.text}: {label.x:,g} bytes, {form(label.y)}" for label in labels)
    return render(
        figure,
        "cache",
        f"Cache against final {noun}",
        f"Final held-out {noun} (mean over finished seeds; whiskers: minimum to maximum) against allocated "
        f"cache bytes per token, all layers, one sequence. Better is to the {better} left. "
        f"{ceiling_remark(report, noun)}".rstrip(),
        f"Scatter plot of cache bytes per token against final held-out {noun}. {listing}.",
    )


def _set_axes(axes: Axes, kind: str, labels: Sequence[Label]) -> None:
    from matplotlib.ticker import LogLocator

    largest, smallest = max(label.x for label in labels), min(label.x for label in labels)
    if smallest > 0 and largest / smallest > 20:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
        axes.xaxis.set_major_formatter(lambda value, _: as_compact(value))
        axes.set_xlim(smallest / 1.5, largest * 1.5)
    else:
        axes.set_xlim(0, largest * 1.08 or 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel("Cache, measured bytes per token")
    if kind == "task":
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        axes.margins(y=0.12)
        axes.autoscale_view(scalex=False)
