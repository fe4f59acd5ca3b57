"""What the task measured of the trained models: errors over a number, or scores as dots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keyshift.recipe import number
from keyshift.report.figures.canvas import (
    FONT_SIZE,
    WIDTH,
    Label,
    Picture,
    label_right,
    looks,
    name_in_figure,
    render,
    text_width,
    wide_axes,
)
from keyshift.report.formats import as_percent
from keyshift.report.numbers import Row, score_names, summary_rows
from keyshift.results import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBERED = re.compile(r"(?P<what>\w+)=(?P<number>\d+(?:\.\d+)?)")
"""A score whose name ends in a number, such as "k=4": the same thing asked at several sizes."""

PER_ROW = 4
"""Panels of dots side by side."""


def draw_errors(report: Report) -> Picture | None:
    """Error over the number in the scores' names, one line per variant; None unless there are two numbers."""
    family = _family(report)
    shown = [
        (look, row) for look, row in zip(looks(report), summary_rows(report), strict=True) if row["scores"]
    ]
    if len(family) < 2 or not shown:
        return None
    names = [name_in_figure(row["variant"]) for _, row in shown]
    figure, axes = wide_axes(names)
    ends, listing = [], []
    for (look, row), name in zip(shown, names, strict=True):
        spreads = {x: s for x, score in family.items() if (s := row["scores"].get(score)) is not None}
        xs, means = list(spreads), [1 - spread["mean"] for spread in spreads.values()]
        low, high = ([1 - spread[end] for spread in spreads.values()] for end in ("max", "min"))
        axes.fill_between(xs, low, high, color=look.colour, alpha=0.16, linewidth=0)
        axes.plot(xs, means, look.marker, color=look.colour, linestyle=look.dash, linewidth=1.9, markersize=5)
        ends.append(Label(name, look.colour, xs[-1], means[-1]))
        listing.append(
            f"{name}: " + ", ".join(f"{as_percent(y)} at {x:g}" for x, y in zip(xs, means, strict=True))
        )
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    what = _what(next(iter(family.values())))
    axes.set_xlabel(what)
    axes.set_xticks(list(family), [f"{x:g}" for x in family])
    label_right(axes, ends)
    return render(
        figure,
        "errors",
        f"Error by {what}",
        f"Share of answers that are wrong, by {what}: mean over finished seeds; band: minimum to maximum.",
        f"Line chart of the error against {what}. {'; '.join(listing)}.",
    )


def draw_scores(report: Report) -> Picture | None:
    """A panel of dots per score that is not part of `draw_errors`' line."""
    family = _family(report)
    in_line = set(family.values()) if len(family) > 1 else set()
    names = [name for name in score_names(report.variants) if name not in in_line]
    rows = [
        (look, row) for look, row in zip(looks(report), summary_rows(report), strict=True) if row["scores"]
    ]
    if not names or not rows:
        return None
    variants = [name_in_figure(row["variant"]) for _, row in rows]
    figure, panels = _dot_axes(names, variants)
    for axes, score in zip(panels, names, strict=True):
        for place, (look, row) in enumerate(rows):
            spread = row["scores"].get(score)
            if spread is not None:
                axes.plot([spread["min"], spread["max"]], [place, place], color=look.colour, linewidth=1.4)
                axes.plot(spread["mean"], place, look.marker, color=look.colour, markersize=7, mec="white")
    return render(
        figure,
        "scores",
        "Scores",
        "What the task measured of the trained models: mean over finished seeds; line: minimum to maximum.",
        f"Dot plot of scores. {'; '.join(_listed(row, names) for _, row in rows)}.",
    )


def _family(report: Report) -> dict[float, str]:
    """The numbered scores by their number, of the first thing that is asked at several."""
    families: dict[str, dict[float, str]] = {}
    for score in score_names(report.variants):
        if (found := NUMBERED.fullmatch(score)) and (x := number(found["number"])) is not None:
            families.setdefault(found["what"], {})[x] = score
    first: dict[float, str] = next((each for each in families.values() if len(each) > 1), {})
    return dict(sorted(first.items()))


def _what(score: str) -> str:
    return score.partition("=")[0]


def _dot_axes(scores: Sequence[str], variants: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A panel per score, with the variants' names on the left of each row of panels."""
    from matplotlib.figure import Figure

    columns = min(len(scores), PER_ROW)
    rows = -(-len(scores) // columns)
    left, right, across, above, below = 0.3 + max(map(text_width, variants)), 0.3, 0.4, 0.32, 0.3
    wide, high = (WIDTH - left - right - (columns - 1) * across) / columns, 0.28 * len(variants) + 0.1
    height = rows * (above + high + below)
    figure = Figure(figsize=(WIDTH, height))
    panels = []
    for index, score in enumerate(scores):
        row, column = divmod(index, columns)
        x, y = left + column * (wide + across), height - (row + 1) * (above + high + below) + below
        axes = figure.add_axes((x / WIDTH, y / height, wide / WIDTH, high / height), label=str(index))
        axes.set(xlim=(-0.03, 1.03), ylim=(len(variants) - 0.5, -0.5), xticks=(0, 0.5, 1))
        axes.set_yticks(range(len(variants)), variants)
        axes.tick_params(labelleft=column == 0, left=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(name_in_figure(score), fontsize=FONT_SIZE, loc="left", pad=4)
        panels.append(axes)
    return figure, panels


def _listed(row: Row, scores: Sequence[str]) -> str:
    known = ((score, row["scores"].get(score)) for score in scores)
    return f"{row['variant']}: " + ", ".join(
        f"{n} {as_percent(s['mean'])}" for n, s in known if s is not None
    )
