"""Paired differences over training: how far one variant is from another at equal seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from keyshift.recipe import described
from keyshift.report.figures.canvas import (
    COLOURS,
    MOST_PANELS,
    SOFT,
    Picture,
    name_in_figure,
    panel_axes,
    render,
)
from keyshift.report.figures.series import Track, aligned, track_of
from keyshift.report.outcomes import ceiling, ceiling_remark
from keyshift.report.paired import Cell, Contrast, cells_of, contrasts, interval
from keyshift.report.tables import compared, difference_text
from keyshift.results import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 9
"""With more cells a panel each, only those pooled over cells are drawn."""


class Panel(NamedTuple):
    """One contrast in one cell, or pooled: what is compared, where, and a track of differences per seed."""

    contrast: Contrast
    where: str
    tracks: list[Track]


def draw_paired(report: Report, field: Literal["accuracy", "loss"]) -> Picture | None:
    """A panel for every comparison in ``field``; on text, for every comparison in the loss."""
    panels = _panels(report, field)
    if not panels or len(panels) > MOST_PANELS:
        return None
    titles = _titles(panels)
    figure, places = panel_axes(titles, "Training steps")
    ends = [_draw(axes, panel.tracks) for axes, panel in zip(places, panels, strict=True)]
    _set_limits(places[0], [panel.tracks for panel in panels], field)
    names = [" ".join(filter(None, (compared(panel.contrast), panel.where))) for panel in panels]
    listing = "; ".join(
        f"{name}: {difference_text(end, field)}" for name, end in zip(names, ends, strict=True)
    )
    subject = f": {compared(panels[0].contrast)}" if len({panel.contrast for panel in panels}) == 1 else ""
    return render(
        figure,
        f"difference-{field}",
        f"Difference in held-out {field} ({'points' if field == 'accuracy' else 'nats'}){subject}",
        f"The first minus the second at equal seeds: {'above' if field == 'accuracy' else 'below'} zero the "
        "first is better. Thick line: mean over seeds; thin lines: every seed; band: 95% t interval at each "
        "step by itself, where there are two seeds or more. Parts may lie outside the axes. A run that was "
        f"done early counts with its last value. {ceiling_remark(report, field)}".rstrip(),
        f"Line charts of the difference in held-out {field} against training steps. Last means: {listing}.",
    )


def _panels(report: Report, field: str) -> list[Panel]:
    """Cell by cell as long as these are few; with many, pooled."""
    drawn = [_drawn(contrast, report, field) for contrast in contrasts(report)]
    cells = {contrast: cells_of(report, contrast) for contrast in drawn if contrast is not None}
    panels = []
    few = sum(map(len, cells.values())) <= MOST_CELLS
    for contrast, own in cells.items():
        tables = [_tracks(cell, field, ceiling(report, field)) for cell in own]
        if few or len(own) == 1:
            wheres = [described(cell.where) for cell in own]
            panels += [Panel(contrast, where, [*t.values()]) for where, t in zip(wheres, tables, strict=True)]
        else:
            filled = [table for table in tables if table]
            panels.append(Panel(contrast, f"pooled over {len(filled)}", _pooled(filled)))
    return [panel for panel in panels if panel.tracks]


def _drawn(contrast: Contrast, report: Report, field: str) -> Contrast | None:
    """The contrast as it is drawn in ``field``: on text, whatever it compares also in the loss."""
    if contrast.metric == field:
        return contrast
    return contrast._replace(metric=field) if field == "loss" and report.kind == "text" else None


def _tracks(cell: Cell, field: str, most: float) -> dict[int, Track]:
    """Differences for every seed of which both runs finished; no value counts as more than ``most``."""
    mine, theirs = (
        {run.seed: track_of(run, field, most) for run in variant.runs if run.status == "finished"}
        for variant in (cell.of, cell.against)
    )
    found = {}
    for seed in mine.keys() & theirs.keys():
        of, against = mine[seed], theirs[seed]
        if of is not None and against is not None and (rows := aligned([of, against])):
            found[seed] = Track({step: first - second for step, (first, second) in rows.items()}, ended=True)
    return found


def _pooled(cells: Sequence[dict[int, Track]]) -> list[Track]:
    """Per seed the mean over cells, of the seeds that all of them have."""
    seeds = set.intersection(*map(set, cells)) if cells else set()
    rows = (aligned([cell[seed] for cell in cells]) for seed in sorted(seeds))
    return [Track({step: fmean(row) for step, row in each.items()}, ended=True) for each in rows if each]


def _titles(panels: Sequence[Panel]) -> list[str]:
    """What is different between the panels: the place, or the two sides and the place."""
    if len({panel.contrast for panel in panels}) == 1 and len(panels) > 1:
        return [name_in_figure(panel.where) for panel in panels]
    names = []
    for panel in panels:
        of, _, against = compared(panel.contrast).partition(" vs ")
        lines = (of, f"vs {against}", panel.where)
        names.append("\n".join(name_in_figure(line) for line in lines if line))
    return names


def _draw(axes: Axes, tracks: Sequence[Track]) -> float:
    """Draw the differences of all seeds and their mean; where the mean ends."""
    colour = COLOURS[0]
    axes.axhline(0, color=SOFT, linewidth=1, zorder=1)
    for track in tracks:
        axes.plot(*zip(*track.values.items(), strict=True), color=colour, linewidth=0.7, alpha=0.45)
    rows = aligned(tracks)
    means, lows, highs = zip(*map(interval, rows.values()), strict=True)
    if len(tracks) > 1:
        axes.fill_between(list(rows), lows, highs, color=colour, alpha=0.16, linewidth=0)
    axes.plot(list(rows), means, color=colour, linewidth=1.9)
    return float(means[-1])


def _set_limits(axes: Axes, shown: Sequence[Sequence[Track]], field: str) -> None:
    """Both axes: seeds and means after the first quarter of training, and a third of their range beside."""
    points = [point for tracks in shown for track in tracks for point in track.values.items()]
    last = max(step for step, _ in points)
    axes.set_xlim(0, last or 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    values = [0.0, *(value for step, value in points if step >= last / 4)]
    pad = (max(values) - min(values)) / 3 or 0.01
    axes.set_ylim(min(values) - pad, max(values) + pad)
    axes.yaxis.set_major_formatter(lambda value, _: difference_text(value, field, unit=False))
