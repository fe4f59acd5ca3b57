"""Where the learned shift weights put every head, between plain attention and induction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keyshift.report.figures.canvas import FONT_SIZE, SMALL, SOFT, WIDTH, Picture, name_in_figure, render
from keyshift.report.heads import Head, heads_of
from keyshift.results import Report, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_shift(report: Report) -> Picture | None:
    """A panel for every variant that shifts keys or values."""
    shown = [(name_in_figure(v.name), heads) for v in report.variants if (heads := _drawable_heads(v))]
    if not shown:
        return None
    layers = max(head.layer for _, heads in shown for head in heads) + 1
    figure, panels = _square_axes(len(shown))
    for axes, (name, heads) in zip(panels, shown, strict=True):
        _draw_heads(axes, name, heads, layers)
    if layers > 1:
        _layer_bar(figure, layers)
    counts = "; ".join(f"{name}: {_corner_count(heads)}" for name, heads in shown)
    return render(
        figure,
        "shift",
        "Learned shift weights",
        "One point per head and seed, placed by absolute weights. Upper right: keys look at an earlier token "
        "while values come from the token itself, as a one-layer induction head needs (with the number of "
        "heads there); upper left: plain attention. A hollow point has a negative weight. The place alone "
        "does not show that a head does induction.",
        f"Scatter plots of the shift weights of each head. Heads in the induction quadrant: {counts}.",
    )


def _drawable_heads(variant: VariantResult) -> list[Head]:
    heads = [head for run in variant.runs if run.status != "diverged" for head in heads_of(run)]
    return [h for h in heads if (h.key or h.value) and all(math.isfinite(w) for w in h.key + h.value)]


def _position(head: Head) -> tuple[float, float]:
    """(share of the key from earlier tokens, share of the value from the token itself)."""
    return _share(head.key, slice(1, None), 0.0), _share(head.value, slice(0, 1), 1.0)


def _share(weights: Sequence[float], places: slice, unshifted: float) -> float:
    """The part of the weights' absolute sum at ``places``; ``unshifted`` where there are no weights."""
    total = sum(abs(weight) for weight in weights)
    return sum(abs(weight) for weight in weights[places]) / total if total else unshifted


def _corner_count(heads: Sequence[Head]) -> str:
    inside = sum(x > 0.5 and y > 0.5 for x, y in map(_position, heads))
    return f"{inside} of {len(heads)}"


def _square_axes(count: int) -> tuple[Figure, list[Axes]]:
    """``count`` square panels in rows of up to three, with room on the right for the bar of the layers."""
    from matplotlib.figure import Figure

    columns = min(count, 3)
    rows = math.ceil(count / columns)
    side, across, above, left, below = (1.75 if columns == 3 else 2.5), 0.25, 0.62, 0.65, 0.5
    height = below + rows * (side + above)
    figure = Figure(figsize=(WIDTH, height))
    panels = []
    for index in range(count):
        row, column = divmod(index, columns)
        x, y = left + column * (side + across), height - row * (side + above) - above - side
        axes = figure.add_axes((x / WIDTH, y / height, side / WIDTH, side / height))
        axes.tick_params(labelleft=column == 0, labelbottom=index + columns >= count)
        panels.append(axes)
    middle = (left + (columns * (side + across) - across) / 2) / WIDTH
    figure.text(middle, 0.1 / height, "Key: share of the weight on earlier tokens", ha="center")
    figure.text(0.1 / WIDTH, 0.5, "Value: share of the weight on its own token", rotation=90, va="center")
    return figure, panels


def _draw_heads(axes: Axes, name: str, heads: Sequence[Head], layers: int) -> None:
    colours = _layer_colours(layers)
    axes.fill_between([0.5, 1.06], 0.5, 1.06, color="#eef1f4", linewidth=0, zorder=0)
    size = 34 if len(heads) <= 100 else 12
    for head in heads:
        x, y = _position(head)
        colour = colours(head.layer)
        fill = "none" if min(head.key + head.value) < 0 else colour
        axes.scatter(x, y, s=size, facecolor=fill, edgecolor=colour, linewidth=1.1, alpha=0.8, zorder=3)
    axes.set(xlim=(-0.06, 1.06), ylim=(-0.06, 1.06), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(name, fontsize=FONT_SIZE, loc="left", pad=18)
    corner: dict[str, Any] = {"transform": axes.transAxes, "fontsize": SMALL, "color": SOFT, "va": "bottom"}
    axes.text(0, 1.02, "plain", **corner)
    axes.text(1, 1.02, f"induction: {_corner_count(heads)}", ha="right", **corner)


def _layer_colours(layers: int) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap([colormaps["viridis"](0.9 * i / max(layers - 1, 1)) for i in range(layers)])


def _layer_bar(figure: Figure, layers: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    norm = BoundaryNorm([i - 0.5 for i in range(layers + 1)], layers)
    right = max(axes.get_position().x1 for axes in figure.axes)
    place = figure.add_axes((right + 0.15 / WIDTH, 0.25, 0.1 / WIDTH, 0.5))
    mappable = ScalarMappable(norm, _layer_colours(layers))
    bar = figure.colorbar(mappable, cax=place, ticks=range(0, layers, math.ceil(layers / 8)))
    bar.set_label("Layer")
    bar.outline.set_visible(False)
    bar.ax.minorticks_off()
