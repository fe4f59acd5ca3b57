"""Loss against size: dots for runs, the fitted laws and their bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keyshift.report.figures.canvas import (
    STYLE,
    Label,
    Look,
    Picture,
    label_right,
    look_of,
    name_in_figure,
    render,
    wide_axes,
)
from keyshift.report.formats import as_compact, as_loss
from keyshift.scaling.results import Curve, Law, ScalingReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_scaling(report: ScalingReport) -> Picture:
    """One figure on logarithmic scales; variants without a law are left out."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        return _draw([(look_of(i), curve, curve.law) for i, curve in enumerate(report.curves) if curve.law])


def _draw(curves: Sequence[tuple[Look, Curve, Law]]) -> Picture:
    names = [name_in_figure(curve.variant) for _, curve, _ in curves]
    figure, axes = wide_axes(names)
    labels = []
    for (look, curve, law), name in zip(curves, names, strict=True):
        for size in curve.sizes:
            places = [size.parameters] * len(size.losses)
            axes.plot(places, size.losses, look.marker, color=look.colour, alpha=0.5, markersize=5, mew=0)
        at, losses, lows, highs = zip(*law.band, strict=True)
        axes.plot(at, losses, color=look.colour, linestyle=look.dash, linewidth=1.9)
        if None not in lows:
            axes.fill_between(at, lows, highs, color=look.colour, alpha=0.16, linewidth=0)
        labels.append(Label(name, look.colour, at[-1], losses[-1]))
    _set_axes(axes)
    label_right(axes, labels)
    told = "; ".join(
        f"{label.text}: {as_loss(label.y)} nats at {as_compact(label.x)} parameters" for label in labels
    )
    return render(
        figure,
        "scaling",
        "Loss against size",
        "Final held-out loss against parameters without embeddings, both on logarithmic scales: a dot per "
        "run, a line per fitted law, its band the 95% interval.",
        f"Scatter plot with fitted curves. {told}.",
    )


def _set_axes(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: as_compact(value))
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_minor_locator(NullLocator())
    axes.set_xlabel("Parameters without embeddings")
    axes.set_ylabel("Held-out loss, nats per token")
