"""The outcome of training over an axis whose labels are numbers: a width, a learning rate, a depth."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from keyshift.recipe import VARIANT, described, number
from keyshift.report.figures.canvas import (
    MOST_LABELS,
    Label,
    Picture,
    label_right,
    look_of,
    mark_chance,
    name_in_figure,
    render,
    wide_axes,
)
from keyshift.report.formats import as_loss, as_percent
from keyshift.report.paired import STEPS, contrasts, final_value
from keyshift.report.sentences import LOST
from keyshift.results import Report, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPAN = 8
"""Numbers whose largest is so many times the smallest go on a logarithmic axis."""


class Spot(NamedTuple):
    """One variant at one number.

    Attributes:
        values: what its finished runs came to.
        late: how long those were trained that never reached 99%, of which steps to 99% are asked.
        middle: the mean; of steps the median, in which late runs count as long as they were trained.
        lost: how many runs diverged or failed.
    """

    x: float
    values: list[float]
    late: list[float]
    middle: float | None
    lost: int


def draw_grid(report: Report) -> Picture | None:
    """One line per variant over the only axis of numbers, if the recipe has just one."""
    axis, metric = _axis(report), _metric(report)
    lines = _lines(report, axis, metric) if axis else {}
    if axis is None or not 0 < len(lines) <= MOST_LABELS:
        return None
    names = [name_in_figure(name) for name in lines]
    figure, axes = wide_axes(names)
    ends, listing = [], []
    for index, (name, spots) in enumerate(zip(names, lines.values(), strict=True)):
        drawn = _draw_line(axes, spots, index)
        ends.append(Label(name, look_of(index).colour, *drawn[-1]))
        listing.append(f"{name}: " + ", ".join(f"{_written(y, metric)} at {x:g}" for x, y in drawn))
    everything = [spot for spots in lines.values() for spot in spots]
    _set_axes(axes, axis, everything, metric)
    if metric == "accuracy":
        mark_chance([axes], report.data.get("chance_level"))
    label_right(axes, ends)
    noun = {
        "loss": "Final held-out loss",
        "accuracy": "Final held-out accuracy",
        STEPS: "Steps to 99% accuracy",
    }
    title = f"{noun.get(metric, f'Score {metric}')} by {axis}"
    caption, alt = _caption(metric, everything), f"Line chart. {title}. {'; '.join(listing)}."
    return render(figure, "grid", title, caption, alt)


def _axis(report: Report) -> str | None:
    """The only axis, beside the variants' own, that has two labels or more and all of them numbers."""
    found: dict[str, set[str]] = {}
    for variant in report.variants:
        for axis, label in variant.labels.items():
            found.setdefault(axis, set()).add(label)
    numeric = [
        axis
        for axis, labels in found.items()
        if axis != VARIANT and len(labels) > 1 and all(number(label) is not None for label in labels)
    ]
    return numeric[0] if len(numeric) == 1 else None


def _lines(report: Report, axis: str, metric: str) -> dict[str, list[Spot]]:
    """The variants that differ in ``axis`` alone, by what they share; without those that have no results."""
    found: dict[str, list[Spot]] = {}
    for variant in report.variants:
        shared = described({name: label for name, label in variant.labels.items() if name != axis})
        found.setdefault(shared, []).append(_spot(variant, axis, metric))
    lines = {name: sorted(spots, key=lambda spot: spot.x) for name, spots in found.items()}
    return {n: spots for n, spots in lines.items() if any(spot.middle is not None for spot in spots)}


def _spot(variant: VariantResult, axis: str, metric: str) -> Spot:
    x = number(variant.labels[axis])
    assert x is not None
    lost = sum(run.status in LOST for run in variant.runs)
    finished = [run for run in variant.runs if run.status == "finished"]
    if metric == STEPS:
        taken = [(run.steps_to(0.99), run.steps) for run in finished]
        reached = [float(steps) for steps, _ in taken if steps is not None]
        late = [float(total) for steps, total in taken if steps is None]
        return Spot(x, reached, late, median([*reached, *late]) if taken else None, lost)
    values = [value for run in finished if (value := final_value(run, metric)) is not None]
    return Spot(x, values, [], fmean(values) if values else None, lost)


def _metric(report: Report) -> str:
    """What the recipe's comparisons look at, if it is one thing; else accuracy, or on text the loss."""
    asked = {contrast.metric for contrast in contrasts(report)}
    if len(asked) == 1:
        return asked.pop()
    return "accuracy" if report.kind == "task" else "loss"


def _draw_line(axes: Axes, spots: Sequence[Spot], index: int) -> list[tuple[float, float]]:
    """Draw one variant: a dot per run, crosses for lost ones, and a line through the middles, which is
    returned."""
    look = look_of(index)
    for x, values, late, _, lost in spots:
        axes.plot([x] * len(values), values, look.marker, color=look.colour, alpha=0.5, markersize=5, mew=0)
        axes.plot([x] * len(late), late, "^", color=look.colour, markersize=6, markerfacecolor="none")
        if lost:
            height, frame = 0.96 - 0.06 * index, axes.get_xaxis_transform()
            axes.plot(x, height, "x", color=look.colour, transform=frame, markersize=6, mew=1.6)
    line = [(spot.x, spot.middle) for spot in spots if spot.middle is not None]
    axes.plot(*zip(*line, strict=True), color=look.colour, linestyle=look.dash, linewidth=1.9)
    return line


def _set_axes(axes: Axes, axis: str, spots: Sequence[Spot], metric: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    xs = sorted({spot.x for spot in spots})
    if xs[0] > 0 and xs[-1] >= SPAN * xs[0]:
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(xs, [f"{x:,.10g}" for x in xs])
    axes.set_xlabel(axis[0].upper() + axis[1:])
    ys = [y for spot in spots for y in (*spot.values, *spot.late)]
    if metric not in ("loss", STEPS):
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        return
    if min(ys) > 0 and max(ys) >= SPAN * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: _written(value, metric))


def _written(value: float, metric: str) -> str:
    if metric == STEPS:
        return f"{value:,g}"
    return as_loss(value) if metric == "loss" else as_percent(value)


def _caption(metric: str, spots: Sequence[Spot]) -> str:
    text = f"One dot per seed; the line goes through their {'medians' if metric == STEPS else 'means'}."
    if any(spot.late for spot in spots):
        text += " Hollow triangle: a run that had not reached 99% when it ended, after so many steps."
    if any(spot.lost for spot in spots):
        text += " Cross at the top: here runs diverged or failed, and are left out."
    return text
