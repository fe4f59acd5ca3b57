"""Learning curves: held-out accuracy, loss or induction scores against training steps, every seed and the
mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from keyshift.recipe import described
from keyshift.report.figures.canvas import (
    LONGEST_NAME,
    MOST_PANELS,
    Label,
    Look,
    Picture,
    label_right,
    look_of,
    looks,
    mark_chance,
    name_in_figure,
    panel_axes,
    render,
    wide_axes,
)
from keyshift.report.figures.series import Track, aligned, track_of
from keyshift.report.formats import as_loss, as_percent
from keyshift.report.labels import own_name, own_names, place_of, places
from keyshift.results import Report, RunResult, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "accuracy": ("Held-out accuracy", as_percent),
    "loss": ("Held-out loss (nats per token)", as_loss),
    "induction": ("Induction score of the best head", as_percent),
}
"""What can be drawn: its title, and how a value of it is written."""

MOST_BANDS = 6
"""Of more variants in one frame the bands would hide each other, so only lines are drawn."""


class Curves(NamedTuple):
    """What is drawn of a variant; ``averaged`` are the runs that enter the mean."""

    variant: VariantResult
    look: Look
    averaged: list[Track]


def draw_curves(report: Report, field: Literal["accuracy", "loss", "induction"]) -> Picture | None:
    """The curves of every variant that has some; of a grid, a panel for every place in it."""
    everything = zip(report.variants, looks(report), strict=True)
    shown = [Curves(v, look, tracks) for v, look in everything if (tracks := _averaged(v.runs, field))]
    grid = places(report)
    if not shown or len(grid) > MOST_PANELS:
        return None
    banded = len(own_names(report)) <= MOST_BANDS
    draw = _draw_one if len(grid) == 1 else _draw_panels
    figure, ends, cropped = draw(report, shown, field, banded)
    title, form = FIELDS[field]
    listing = "; ".join(f"{label.text}: {form(label.y)} at step {label.x:,g}" for label in ends)
    return render(
        figure,
        field,
        title,
        _caption(shown, banded, cropped) + _guessing(report, field),
        f"Line chart of {title[0].lower()}{title[1:]} against training steps. Last values: {listing}.",
    )


def _draw_one(
    report: Report, shown: Sequence[Curves], field: str, banded: bool
) -> tuple[Figure, list[Label], bool]:
    """All variants in one frame, with their names in the margin."""
    names = [name_in_figure(curves.variant.name) for curves in shown]
    figure, axes = wide_axes(names)
    ends = [
        _draw_variant(axes, curves, name, field, banded) for curves, name in zip(shown, names, strict=True)
    ]
    axes.set_xlabel("Training steps")
    cropped = _set_limits(axes, report, field, shown)
    if field == "accuracy":
        mark_chance([axes], report.data.get("chance_level"))
    label_right(axes, ends)
    return figure, ends, cropped


def _draw_panels(
    report: Report, shown: Sequence[Curves], field: str, banded: bool
) -> tuple[Figure, list[Label], bool]:
    """A panel for every place in the grid, and the variants' names below."""
    grid = places(report)
    legend = [(name_in_figure(name), look_of(index)) for index, name in enumerate(own_names(report))]
    titles = [name_in_figure(described(place), 2 * LONGEST_NAME) for place in grid]
    figure, panels = panel_axes(titles, "Training steps", legend)
    ends = []
    for curves in shown:
        place = grid.index(place_of(curves.variant))
        name = f"{name_in_figure(own_name(curves.variant))}, {titles[place]}"
        ends.append(_draw_variant(panels[place], curves, name, field, banded))
    cropped = _set_limits(panels[0], report, field, shown)
    if field == "accuracy":
        mark_chance(panels, report.data.get("chance_level"))
    return figure, ends, cropped


def _averaged(runs: Sequence[RunResult], field: str) -> list[Track]:
    """The seeds that enter the mean: the finished ones, or all of them as long as none has finished."""
    finished = [track for run in runs if run.status == "finished" and (track := track_of(run, field))]
    return finished or [track for run in runs if (track := track_of(run, field))]


def _draw_variant(axes: Axes, curves: Curves, name: str, field: str, banded: bool) -> Label:
    """Draw one variant; its name, where its line ends."""
    look = curves.look
    for run in curves.variant.runs:
        track = track_of(run, field)
        if track is None:
            continue
        axes.plot(*zip(*track.values.items(), strict=True), color=look.colour, linewidth=0.7, alpha=0.4)
        if run.status == "diverged":
            axes.plot(track.last, track.values[track.last], "x", color=look.colour, markersize=6)
    rows = aligned(curves.averaged)
    if not rows:
        longest = max(curves.averaged, key=lambda track: track.last)
        return Label(name, look.colour, longest.last, longest.values[longest.last])
    mean = [fmean(row) for row in rows.values()]
    low, high = [min(row) for row in rows.values()], [max(row) for row in rows.values()]
    steps = list(rows)
    if banded:
        axes.fill_between(steps, low, high, color=look.colour, alpha=0.16, linewidth=0)
    alone = look.marker if len(steps) == 1 else None  # a line through one point cannot be seen
    axes.plot(steps, mean, color=look.colour, linestyle=look.dash, linewidth=1.9, marker=alone, markersize=6)
    return Label(name, look.colour, steps[-1], mean[-1])


def _set_limits(axes: Axes, report: Report, field: str, shown: Sequence[Curves]) -> bool:
    """Set both axes from the averaged seeds only; True if the beginning of a curve lies above the axis."""
    points = [point for curves in shown for track in curves.averaged for point in track.values.items()]
    last = max(step for step, _ in points)
    axes.set_xlim(0, last or 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if field != "loss":
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


def _guessing(report: Report, field: str) -> str:
    means = report.data.get("guessing")
    return f" Dotted: {means}." if field == "accuracy" and means else ""


def _caption(shown: Sequence[Curves], banded: bool, cropped: bool) -> str:
    variants = [curves.variant for curves in shown]
    band = "; band: their minimum to maximum" if banded else ""
    text = f"Thick line: mean over finished seeds{band}; thin lines: every seed."
    if all(len(variant.runs) == 1 for variant in variants):
        text = "One seed per variant, so these curves say nothing about the spread between seeds."
    if any(len({track.last for track in curves.averaged if track.ended}) > 1 for curves in shown):
        text += " A run that was done before others of its variant enters the mean with its last value."
    if any(run.status == "diverged" and run.curve for variant in variants for run in variant.runs):
        text += " A cross marks the last evaluation of a run that diverged, if it lies within the axes."
    if any(all(run.status != "finished" for run in variant.runs) for variant in variants):
        text += " Where no seed has finished, the mean is over all seeds so far."
    return text + (" The first quarter of training lies partly above the axis." if cropped else "")
