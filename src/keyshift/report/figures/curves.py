"""Learning curves: held-out accuracy or loss against training steps, every seed and the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from keyshift.report.figures.canvas import (
    FAINT,
    SMALL,
    SOFT,
    Label,
    Look,
    Picture,
    label_right,
    look_of,
    name_in_figure,
    render,
    wide_axes,
)
from keyshift.report.formats import as_loss, as_percent
from keyshift.results import Report, RunResult, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = list[tuple[int, float]]


def draw_curves(report: Report, field: Literal["accuracy", "loss"]) -> Picture | None:
    """The curves of every variant that has some."""
    shown = [(i, v, s) for i, v in enumerate(report.variants) if (s := _averaged(v.runs, field))]
    if not shown:
        return None
    names = [name_in_figure(variant.name) for _, variant, _ in shown]
    figure, axes = wide_axes(names)
    ends = []
    for (index, variant, seeds), name in zip(shown, names, strict=True):
        end = _draw_variant(axes, variant, seeds, look_of(index), field)
        ends.append(Label(name, look_of(index).colour, *end))
    axes.set_xlabel("Training steps")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    cropped = _set_limits(axes, report, field, [seeds for _, _, seeds in shown])
    if field == "accuracy":
        _mark_chance(axes, report.data.get("chance_level"))
    label_right(axes, ends)
    noun, form = ("accuracy", as_percent) if field == "accuracy" else ("loss (nats per token)", as_loss)
    listing = "; ".join(f"{label.text}: {form(label.y)} at step {label.x:,g}" for label in ends)
    return render(
        figure,
        field,
        f"Held-out {noun}",
        _caption([variant for _, variant, _ in shown], cropped) + _guessing(report, field),
        f"Line chart of held-out {noun} against training steps. Last values: {listing}.",
    )


def _series(run: RunResult, field: str) -> Series:
    points = ((point.step, getattr(point, field)) for point in run.curve)
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def _averaged(runs: Sequence[RunResult], field: str) -> list[Series]:
    """The seeds that enter the mean: the finished ones, or all of them as long as none has finished."""
    finished = [series for run in runs if run.status == "finished" and (series := _series(run, field))]
    return finished or [series for run in runs if (series := _series(run, field))]


def _band(seeds: Sequence[Series]) -> list[tuple[int, float, float, float]]:
    """(step, mean, min, max) at the steps that all ``seeds`` share."""
    tables = [dict(series) for series in seeds]
    shared = sorted(set.intersection(*map(set, tables)))
    columns = [(step, [table[step] for table in tables]) for step in shared]
    return [(step, fmean(values), min(values), max(values)) for step, values in columns]


def _draw_variant(
    axes: Axes, variant: VariantResult, seeds: Sequence[Series], look: Look, field: str
) -> tuple[float, float]:
    """Draw one variant and return where its line ends."""
    for run in variant.runs:
        series = _series(run, field)
        if not series:
            continue
        steps, values = zip(*series, strict=True)
        axes.plot(steps, values, color=look.colour, linewidth=0.7, alpha=0.4)
        if run.status == "diverged":
            axes.plot(steps[-1], values[-1], "x", color=look.colour, markersize=6)
    band = _band(seeds)
    if not band:
        return max(series[-1] for series in seeds)
    steps, mean, low, high = zip(*band, strict=True)
    axes.fill_between(steps, low, high, color=look.colour, alpha=0.16, linewidth=0)
    alone = look.marker if len(steps) == 1 else None  # a line through one point cannot be seen
    axes.plot(steps, mean, color=look.colour, linestyle=look.dash, linewidth=1.9, marker=alone, markersize=6)
    return steps[-1], mean[-1]


def _set_limits(axes: Axes, report: Report, field: str, shown: Sequence[Sequence[Series]]) -> bool:
    """Set both axes from the averaged seeds only; True if the beginning of a curve lies above the axis."""
    points = [point for seeds in shown for series in seeds for point in series]
    last = max(step for step, _ in points)
    axes.set_xlim(0, last or 1)
    if field == "accuracy":
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        return False
    early = last / 4 if report.kind == "text" else 0
    values = [value for step, value in points if step >= early]
    low = 0.0 if report.kind == "task" else min(values)
    pad = (max(values) - low) * 0.05 or 0.05
    top = max(values) + pad
    axes.set_ylim(low if report.kind == "task" else low - pad, top)
    return any(value > top for _, value in points)


def _mark_chance(axes: Axes, level: Any) -> None:
    if isinstance(level, int | float) and 0 < level < 1:
        axes.axhline(level, color=FAINT, linestyle=":", linewidth=1, zorder=1)
        axes.annotate(
            "guessing",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=SOFT,
            fontsize=SMALL,
        )


def _guessing(report: Report, field: str) -> str:
    means = report.data.get("guessing")
    return f" Dotted: {means}." if field == "accuracy" and means else ""


def _caption(variants: Sequence[VariantResult], cropped: bool) -> str:
    text = "Thick line: mean over finished seeds; band: their minimum to maximum; thin lines: every seed."
    if all(len(variant.runs) == 1 for variant in variants):
        text = "One seed per variant, so these curves say nothing about the spread between seeds."
    if any(run.status == "diverged" and run.curve for variant in variants for run in variant.runs):
        text += " A cross marks the last evaluation of a run that diverged, if it lies within the axes."
    if any(all(run.status != "finished" for run in variant.runs) for variant in variants):
        text += " Where no seed has finished, the mean is over all seeds so far."
    return text + (" The first quarter of training lies partly above the axis." if cropped else "")
