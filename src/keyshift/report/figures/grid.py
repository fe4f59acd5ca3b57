"""The outcome of training over an axis whose labels are numbers: a width, a learning rate, a depth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from keyshift.recipe import VARIANT, described, number
from keyshift.report.figures.canvas import (
    MOST_LABELS,
    SMALL,
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
from keyshift.report.outcomes import DIVERGED, STEPS, ceiling_remark, final_value, steps_to_99
from keyshift.report.paired import contrasts
from keyshift.report.sentences import LOST
from keyshift.report.tables import DIVERGENCE
from keyshift.results import Report, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPAN = 8
"""Numbers whose largest is so many times the smallest go on a logarithmic axis."""

LOST_ROW = 11.0
"""Points above the frame that a variant takes whose lost runs are marked there."""

ASIDE = 8.0
"""Points between the hollow triangles of two variants at the same number."""


class Spot(NamedTuple):
    """One variant at one number.

    Attributes:
        values: what its runs came to.
        late: how long finished runs were trained that never reached 99%, of which steps to 99% are asked.
        middle: the mean; of steps the median, in which runs that never got there are later than any, so that
            it may be infinite. None if no run has an outcome.
        known: how many runs the middle is over.
        lost: how many runs diverged or failed, as far as ``values`` do not say so.
    """

    x: float
    values: list[float]
    late: list[int]
    middle: float | None
    known: int
    lost: int

    @property
    def shown(self) -> bool:
        """Whether there is something to draw."""
        return bool(self.values or self.late or self.lost)


def draw_grid(report: Report) -> Picture | None:
    """One line per variant over the only axis of numbers, if the recipe has just one."""
    axis, metric = _axis(report), _metric(report)
    lines = _lines(report, axis, metric) if axis else {}
    everything = [spot for spots in lines.values() for spot in spots]
    if axis is None or len(lines) > MOST_LABELS or not any(spot.values or spot.late for spot in everything):
        return None
    names = [name_in_figure(name) for name in lines]
    figure, axes = wide_axes(names)
    drawn = list(lines.values())
    for index, (spots, asides) in enumerate(zip(drawn, _asides(drawn), strict=True)):
        _draw_line(axes, spots, index, asides)
    _set_axes(axes, axis, everything, metric)
    _mark_lost(figure, axes, drawn)
    if metric == "accuracy":
        mark_chance([axes], report.data.get("chance_level"))
    top = axes.get_ylim()[1]
    named = enumerate(zip(names, drawn, strict=True))
    label_right(axes, [_label(name, spots, index, top) for index, (name, spots) in named])
    noun = {
        "loss": "Final held-out loss",
        "accuracy": "Final held-out accuracy",
        STEPS: "Steps to 99% accuracy",
        DIVERGED: "Runs that diverged",
    }
    title = f"{noun.get(metric, f'Score {metric}')} by {axis}"
    caption = f"{_caption(metric, everything)} {ceiling_remark(report, metric)}".rstrip()
    return render(figure, "grid", title, caption, f"Line chart. {title}. {_listing(lines, metric)}.")


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
        found.setdefault(shared, []).append(_spot(report, variant, axis, metric))
    lines = {name: sorted(spots, key=lambda spot: spot.x) for name, spots in found.items()}
    return {name: spots for name, spots in lines.items() if any(spot.shown for spot in spots)}


def _spot(report: Report, variant: VariantResult, axis: str, metric: str) -> Spot:
    x = number(variant.labels[axis])
    assert x is not None
    lost = sum(run.status in LOST for run in variant.runs)
    if metric == STEPS:
        known = [
            (run, steps) for run in variant.runs if (steps := steps_to_99(report, variant, run)) is not None
        ]
        reached = [float(steps.number) for _, steps in known if steps.reached]
        late = [steps.number for run, steps in known if not steps.reached and run.status == "finished"]
        never = [math.inf] * (len(known) - len(reached))
        return Spot(x, reached, late, median([*reached, *never]) if known else None, len(known), lost)
    finals = (final_value(report, variant, run, metric) for run in variant.runs)
    values = [value for value in finals if value is not None]
    middle = fmean(values) if values else None
    if metric == DIVERGED:
        failed = sum(run.status == "failed" for run in variant.runs)
        return Spot(x, [] if middle is None else [middle], [], middle, len(values), failed)
    return Spot(x, values, [], middle, len(values), lost)


def _metric(report: Report) -> str:
    """What the recipe's comparisons look at, if it is one thing; else accuracy, or on text the loss."""
    asked = {contrast.metric for contrast in contrasts(report)}
    if len(asked) == 1:
        return asked.pop()
    return "accuracy" if report.kind == "task" else "loss"


def _draw_line(axes: Axes, spots: Sequence[Spot], index: int, asides: Mapping[float, float]) -> None:
    """Draw one variant: a dot per run, hollow triangles for late ones, and a line through the middles.

    ``asides`` says by how many points triangles are moved aside, by number.
    """
    from matplotlib.markers import MarkerStyle
    from matplotlib.transforms import Affine2D

    look, size = look_of(index), 6.0
    for spot in spots:
        xs = [spot.x] * len(spot.values)
        axes.plot(xs, spot.values, look.marker, color=look.colour, alpha=0.5, markersize=5, mew=0)
        for steps, count in Counter(spot.late).items():
            aside = asides[spot.x]
            moved = MarkerStyle("^").transformed(Affine2D().translate(aside / size, 0))
            axes.plot(
                spot.x, steps, marker=moved, color=look.colour, mfc="none", markersize=size, clip_on=False
            )
            axes.annotate(
                f"{count}",
                (spot.x, steps),
                (aside, 5),
                textcoords="offset points",
                ha="center",
                color=look.colour,
                fontsize=SMALL,
            )
    middles = [math.nan if s.middle is None or math.isinf(s.middle) else s.middle for s in spots]
    axes.plot([s.x for s in spots], middles, color=look.colour, linestyle=look.dash, linewidth=1.9)


def _asides(lines: Sequence[Sequence[Spot]]) -> list[dict[float, float]]:
    """For every line, by number, how far its triangles are moved so that those of others stay visible."""
    asides: list[dict[float, float]] = [{} for _ in lines]
    for x in {spot.x for spots in lines for spot in spots}:
        late = [index for index, spots in enumerate(lines) if any(s.late for s in spots if s.x == x)]
        for place, index in enumerate(late):
            asides[index][x] = (place - (len(late) - 1) / 2) * ASIDE
    return asides


def _mark_lost(figure: Figure, axes: Axes, lines: Sequence[Sequence[Spot]]) -> None:
    """Say above the frame where runs were lost and how many, in a row for each variant that lost some."""
    rows = [index for index, spots in enumerate(lines) if any(spot.lost for spot in spots)]
    top = axes.get_position().y1 - len(rows) * LOST_ROW / 72 / figure.get_figheight()
    figure.subplots_adjust(top=top)
    for row, index in enumerate(reversed(rows)):
        for spot in lines[index]:
            if spot.lost:
                axes.annotate(
                    f"×{spot.lost}",
                    (spot.x, 1),
                    (0, 5 + row * LOST_ROW),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    ha="center",
                    color=look_of(index).colour,
                    annotation_clip=False,
                )


def _label(name: str, spots: Sequence[Spot], index: int, top: float) -> Label:
    """The name of a variant at its last number that shows something; above the frame if only losses do."""
    spot = next(spot for spot in reversed(spots) if spot.shown)
    finite = spot.middle is not None and math.isfinite(spot.middle)
    height = spot.middle if finite else max([*spot.late, *spot.values], default=top)
    assert height is not None
    return Label(name, look_of(index).colour, spot.x, height)


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
        axes.set_ylim(-0.03 if metric == DIVERGED else 0, 1.03)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        return
    if min(ys) > 0 and max(ys) >= SPAN * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: _written(value, metric))
    if any(spot.late for spot in spots):
        axes.margins(y=0.1)  # the numbers above the triangles stay in the frame


def _written(value: float, metric: str) -> str:
    if metric == STEPS:
        return f"{value:,g}" if math.isfinite(value) else "never"
    return as_loss(value) if metric == "loss" else as_percent(value)


def _listing(lines: Mapping[str, Sequence[Spot]], metric: str) -> str:
    """The lines in words: "2 layers: never at 8 (1 of 3), 300 at 16"."""
    told = []
    for name, spots in lines.items():
        values = []
        for spot in spots:
            missed = metric == STEPS and len(spot.values) < spot.known
            remarks = [f"{len(spot.values)} of {spot.known}"] if missed else []
            remarks += [f"{spot.lost} lost"] if spot.lost else []
            text = "nothing" if spot.middle is None else _written(spot.middle, metric)
            if spot.shown:
                values.append(f"{text} at {spot.x:g}" + (f" ({', '.join(remarks)})" if remarks else ""))
        told.append(f"{name_in_figure(name)}: {', '.join(values)}")
    return "; ".join(told)


def _caption(metric: str, spots: Sequence[Spot]) -> str:
    if metric == DIVERGED:
        text = f"Share of the runs that diverged: {DIVERGENCE}."
    else:
        text = f"One dot per seed; the line goes through their {'medians' if metric == STEPS else 'means'}."
    if late := {steps for spot in spots for steps in spot.late}:
        within = f" in {next(iter(late)):,} steps" if len(late) == 1 else ""
        text += f" A hollow triangle and a number n: n runs never reached 99%{within}."
    if any(spot.middle is not None and math.isinf(spot.middle) for spot in spots):
        text += " The line has a gap where half of the runs or more never did."
    if any(spot.lost for spot in spots):
        text += " ×n above the frame: there n runs "
        if metric == STEPS:
            text += "diverged, which counts as never, or failed and are left out."
        else:
            text += f"{'failed' if metric == DIVERGED else 'diverged or failed'} and are left out."
    return text
