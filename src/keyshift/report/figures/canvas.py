"""What all figures share: the style, how a variant looks, names in the margin, the finished picture."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from keyshift.report.labels import own_name, own_names
from keyshift.results import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2328"
SOFT = "#5b636b"
FAINT = "#8b929a"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MARKERS = ("o", "s", "D")
WIDTH = 7.2  # inches; the page shows a figure at 1.3 times its natural size
FONT = "DejaVu Sans"
FONT_SIZE = 9.0  # points
SMALL = 7.5  # points
LABEL_GAP = 13.0  # points between two labels
LONGEST_NAME = 34  # characters of a name inside a figure
MOST_PANELS = 12  # of a figure that can be read
MOST_LABELS = 12  # in a margin, likewise
TITLE_WIDTHS = (0, 80, 40, 26)  # characters of a panel's title, by columns of panels

STYLE: dict[str, Any] = {
    "font.family": FONT,
    "font.size": FONT_SIZE,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "keyshift",
    "svg.fonttype": "path",
}


class Picture(NamedTuple):
    """A drawn figure: its file name, its words, and its two renderings."""

    name: str
    title: str
    caption: str
    alt: str
    svg: bytes
    png: bytes

    @property
    def source(self) -> str:
        """The vector drawing as a data URI."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode()


class Label(NamedTuple):
    """A name in the right margin and the data point that it belongs to."""

    text: str
    colour: str
    x: float
    y: float


class Look(NamedTuple):
    """How a variant is drawn, the same in every figure."""

    colour: str
    dash: Any
    marker: str


def look_of(index: int) -> Look:
    """The look of the variant at ``index`` of the report."""
    turn = index // len(COLOURS)
    return Look(COLOURS[index % len(COLOURS)], DASHES[turn % len(DASHES)], MARKERS[turn % len(MARKERS)])


def looks(report: Report) -> list[Look]:
    """How the report's variants are drawn; in a grid, those of the same name look the same."""
    names = own_names(report)
    return [look_of(names.index(own_name(variant))) for variant in report.variants]


def render(figure: Figure, name: str, title: str, caption: str, alt: str) -> Picture:
    """The figure as a picture; the same figure gives the same bytes."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return Picture(name, title, caption, alt, svg.getvalue(), png.getvalue())


def name_in_figure(name: str, longest: int = LONGEST_NAME) -> str:
    """``name`` with characters that the figures' font lacks replaced, and its middle cut when long."""
    shown = "".join(character if _drawable(character) else "?" for character in name)
    half = longest // 2
    return shown if len(shown) <= longest else f"{shown[:half]}…{shown[-half + 1 :]}"


@cache
def _drawable(character: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return character.isprintable() and get_font(findfont(FONT)).get_char_index(ord(character)) != 0


def wide_axes(names: Sequence[str]) -> tuple[Figure, Axes]:
    """Axes that leave room for ``names`` on their right, one below the other."""
    from matplotlib.figure import Figure

    height = max(3.5, 0.9 + len(names) * LABEL_GAP / 72)
    figure = Figure(figsize=(WIDTH, height))
    right = WIDTH - 0.4 - max(text_width(name) for name in names)
    figure.subplots_adjust(left=0.62 / WIDTH, right=right / WIDTH, bottom=0.5 / height, top=1 - 0.16 / height)
    return figure, figure.add_subplot()


def panel_axes(
    titles: Sequence[str], x_label: str, legend: Sequence[tuple[str, Look]] = ()
) -> tuple[Figure, list[Axes]]:
    """A panel per title, in rows of up to three, all with the same axes; below them what their lines are."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    count = len(titles)
    columns = 2 if count in (2, 4) else min(count, 3)
    rows = math.ceil(count / columns)
    titles = [_wrapped(title, TITLE_WIDTHS[columns]) for title in titles]
    above = 0.12 + 0.15 * max(title.count("\n") + 1 for title in titles)
    entries = max(1, int(WIDTH / (max((text_width(name) for name, _ in legend), default=WIDTH) + 0.6)))
    below = 0.52 + 0.2 * math.ceil(len(legend) / entries)
    left, right, across = 0.62, 0.3, 0.34
    wide = (WIDTH - left - right - (columns - 1) * across) / columns
    high = 2.9 if count == 1 else 1.9 if columns == 2 else 1.45
    height = rows * (high + above) + below
    figure = Figure(figsize=(WIDTH, height))
    panels: list[Axes] = []
    for index, title in enumerate(titles):
        row, column = divmod(index, columns)
        x, y = left + column * (wide + across), height - (row + 1) * (high + above)
        place = (x / WIDTH, y / height, wide / WIDTH, high / height)
        first = panels[0] if panels else None
        axes = figure.add_axes(place, label=str(index), sharex=first, sharey=first)
        axes.tick_params(labelleft=column == 0, labelbottom=index + columns >= count)
        axes.set_title(title, fontsize=FONT_SIZE, loc="left", pad=4)
        panels.append(axes)
    panels[0].xaxis.set_major_locator(MaxNLocator(8 if columns == 1 else 4))
    figure.text((left + WIDTH - right) / 2 / WIDTH, (below - 0.42) / height, x_label, ha="center")
    _add_legend(figure, legend, entries)
    return figure, panels


def _wrapped(title: str, width: int) -> str:
    return "\n".join(textwrap.fill(line, width) for line in title.split("\n"))


def _add_legend(figure: Figure, legend: Sequence[tuple[str, Look]], columns: int) -> None:
    from matplotlib.lines import Line2D

    if legend:
        lines = [Line2D([], [], color=look.colour, linestyle=look.dash, linewidth=1.9) for _, look in legend]
        figure.legend(
            lines,
            [name for name, _ in legend],
            loc="lower center",
            ncols=min(columns, len(legend)),
            frameon=False,
            borderaxespad=0.2,
        )


def mark_chance(panels: Sequence[Axes], level: Any) -> None:
    """Draw the accuracy of guessing as a dotted line, and say so on the first panel."""
    if not isinstance(level, int | float) or not 0 < level < 1:
        return
    for axes in panels:
        axes.axhline(level, color=FAINT, linestyle=":", linewidth=1, zorder=1)
    panels[0].annotate(
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


def text_width(text: str) -> float:
    """Inches that ``text`` takes at the figures' font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=FONT, size=FONT_SIZE)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def label_right(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each label in the right margin, as near to its point's height as the others allow."""
    points_high = axes.get_window_extent().height / axes.figure.dpi * 72
    to_axes = axes.transData + axes.transAxes.inverted()
    order = sorted(labels, key=lambda label: label.y)
    wanted = [min(max(float(to_axes.transform((label.x, label.y))[1]), 0.0), 1.0) for label in order]
    for label, place in zip(order, _spread_out(wanted, LABEL_GAP / points_high), strict=True):
        axes.annotate(
            label.text,
            xy=(label.x, label.y),
            xytext=(1.035, place),
            textcoords="axes fraction",
            color=label.colour,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.6,
                "alpha": 0.55,
                "shrinkB": 1,
                "relpos": (0, 0.5),
            },
        )


def _spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Places at least ``gap`` apart, close to the ascending ``wanted`` ones, inside [0, 1] if that fits."""
    groups: list[tuple[float, int]] = []  # (mean of the wanted places, members)
    for place in wanted:
        middle, size = place, 1
        while groups and middle - groups[-1][0] < gap * (size + groups[-1][1]) / 2:
            other, count = groups.pop()
            middle, size = (middle * size + other * count) / (size + count), size + count
        half = gap * (size - 1) / 2
        groups.append((max(min(middle, 1 - half), half), size))
    return [middle + gap * (i - (size - 1) / 2) for middle, size in groups for i in range(size)]
