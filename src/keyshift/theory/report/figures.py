"""The figures of the theory: copying error, limit of wide embeddings, gradient flow, scale, start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keyshift.report.figures.canvas import (
    COLOURS,
    INK,
    SMALL,
    SOFT,
    WIDTH,
    Label,
    Picture,
    label_right,
    render,
    wide_axes,
)
from keyshift.theory import flow
from keyshift.theory.results import CopyError, Landscape, LogitScale, SimulatedLoss, SliceScales, TheoryReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BLUE, ORANGE, GREEN = COLOURS[:3]
DRAWN_CELLS = 120
CONSTRUCTIONS = {
    "causal": ("own token seen too", ORANGE, "s"),
    "earlier": ("earlier tokens only", BLUE, "o"),
    "undone": ("seen and subtracted", GREEN, "D"),
}
STARTS = {"standard": "Standard", "matched": "Matched", "measured": "Matched, measured"}
SLICES = {
    "content": ("content", BLUE, "o"),
    "rotary": ("rotary", ORANGE, "s"),
    "pooled": ("whole head", GREEN, "D"),
}


def draw_theory(report: TheoryReport) -> list[Picture]:
    """Every figure, whatever the user's own matplotlib settings."""
    from matplotlib import style

    from keyshift.report.figures.canvas import STYLE

    with style.context(["default", STYLE]):
        return [
            _draw_copy(report.two_layers),
            _draw_limit(report.simulations),
            _draw_flow(report.landscapes),
            _draw_scale(report.logit_scales),
            _draw_start(report.starts),
        ]


def _draw_copy(found: Sequence[CopyError]) -> Picture:
    """Error of the two-layer construction against layer 1's slope, one line per construction."""
    figure, axes = wide_axes([name for name, _, _ in CONSTRUCTIONS.values()])
    labels = []
    for construction, (name, colour, marker) in CONSTRUCTIONS.items():
        curve = [(each.slope, max(each.errors)) for each in found if each.construction == construction]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.3}
        if construction == "undone":  # on top of "earlier": rings around its points
            look |= {"markersize": 8, "markerfacecolor": "none", "linewidth": 0}
        axes.plot(*zip(*curve, strict=True), **look)
        labels.append(Label(name, colour, *curve[-1]))
    axes.set(yscale="log", xlabel="p, ALiBi slope of layer 1")
    axes.text(0.02, 0.05, "‖IH − TF‖∞", transform=axes.transAxes)
    _plain_ticks(axes.yaxis)
    figure.canvas.draw()
    label_right(axes, labels)
    return render(
        figure,
        "copy",
        "Two layers approximate the induction-heads machine",
        "Largest error over random sequences of 4 to 64 tokens, by what layer 1 sees. Where it sees earlier "
        "tokens only, or layer 2 subtracts what it should not have seen, the error falls as exp(-p).",
        "Error against slope p on a logarithmic scale: two lines fall as exp(-p), one stays level.",
    )


def _draw_limit(found: Sequence[SimulatedLoss]) -> Picture:
    """Distance of simulated losses from both formulas against the width."""
    kept = [each for each in found if (each.weights, each.place) == ("free", 4)]
    lines = {
        "from a2, as printed": (ORANGE, "s", [(each.width, _rms(each, each.printed)) for each in kept]),
        "from a1": (BLUE, "o", [(each.width, _rms(each, each.formula)) for each in kept]),
    }
    figure, axes = wide_axes(list(lines))
    for colour, marker, curve in lines.values():
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.3)
    axes.set(xscale="log", yscale="log", xlabel="d, width of the embeddings", ylabel="RMS deviation, nats")
    _plain_ticks(axes.xaxis, axes.yaxis)
    figure.canvas.draw()
    label_right(axes, [Label(name, colour, *curve[-1]) for name, (colour, _, curve) in lines.items()])
    return render(
        figure,
        "limit",
        "Simulated losses approach the formula with a1",
        "T = 8, i = 4, α = (-1, 3), β = (0.5, 2.5), 24 draws of embeddings per width. The deviation falls "
        "as d^(-1/2); from the formula as printed it does not fall.",
        "Deviation against width on logarithmic scales: one line falls, one stays level.",
    )


def _plain_ticks(*scales: Axis) -> None:
    """Powers of ten as 1000 or 1e-05: the figures' style has no formulas."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for scale in scales:
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scale.set_minor_formatter(NullFormatter())


def _rms(found: SimulatedLoss, formula: float) -> float:
    return (sum((loss - formula) ** 2 for loss in found.losses) / len(found.losses)) ** 0.5


def _draw_flow(landscapes: Sequence[Landscape]) -> Picture:
    """Loss, flow, and where it first leads away from (0, 1), one panel per O(T)."""
    from matplotlib.figure import Figure

    side, gap, left, below = 1.95, 0.34, 0.55, 0.72
    height = below + side + 0.3
    figure = Figure(figsize=(WIDTH, height))
    for index, each in enumerate(landscapes):
        place = ((left + index * (side + gap)) / WIDTH, below / height, side / WIDTH, side / height)
        axes = figure.add_axes(place)
        _draw_landscape(axes, each.others)
        axes.set_title(f"O(T) = {each.others:g}: {each.away:.1%}", fontsize=9)
        axes.set_xlabel("α1")
        axes.tick_params(labelleft=index == 0)
        if index == 0:
            axes.set_ylabel("β1")
    words = (
        "shaded: α1 (dark) or β1 (light) first moves away from (0, 1), its share above; arrows: gradient flow"
    )
    figure.text(0.5, 0.08 / height, words, ha="center", fontsize=SMALL, color=SOFT)
    shares = ", ".join(f"{each.away:.1%} for O(T) = {each.others:g}" for each in landscapes)
    return render(
        figure,
        "flow",
        "Gradient flow in the (α1, β1) square",
        "Contours of the loss of Theorem 3 (with a1), α2 = 1 - α1, β2 = 1 - β1. The best corner is (0, 1), "
        "upper left. The more other tokens, the flatter the loss and the straighter the way.",
        f"Three panels of contours with arrows. Share of starts that first move away: {shares}.",
    )


def _draw_landscape(axes: Axes, others: float) -> None:
    alpha_1, beta_1 = flow.square(DRAWN_CELLS)
    down_alpha, down_beta = flow.descent(alpha_1, beta_1, others)
    grid = alpha_1[:, 0].numpy(), beta_1[0].numpy()
    losses = flow.landscape(alpha_1, beta_1, others)
    for hits, colour in ((down_beta < 0, "#f3c9ab"), (down_alpha > 0, ORANGE)):
        if bool(hits.any()):
            axes.contourf(*grid, hits.double().T.numpy(), levels=[0.5, 1.5], colors=[colour])
    axes.contour(*grid, losses.T.numpy(), levels=12, colors="#9fb8cc", linewidths=0.7)
    arrows: dict[str, Any] = {"color": INK, "linewidth": 0.7, "arrowsize": 0.7, "density": 0.55}
    axes.streamplot(*grid, down_alpha.T.numpy(), down_beta.T.numpy(), **arrows)
    axes.plot([0], [1], marker="*", markersize=12, color=BLUE, clip_on=False, zorder=5)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    axes.grid(False)


def _draw_scale(found: Sequence[LogitScale]) -> Picture:
    """Variance of logits, and entropy and top weight, against the product of the scales."""
    from matplotlib.figure import Figure

    height = 3.0
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.5 / height, top=1 - 0.3 / height, wspace=0.28)
    left, right = figure.subplots(1, 2)
    alone, together = found[: len(found) // 2], found[len(found) // 2 :]
    series = ((alone, BLUE, "o", "σ_Q = 1, σ_K varies"), (together, ORANGE, "s", "both vary, σ_Q = σ_K"))
    for pairs, colour, marker, name in series:
        products = [each.query_scale * each.key_scale for each in pairs]
        points: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4}
        left.plot(products, [each.variance for each in pairs], linestyle="none", label=name, **points)
        right.plot(products, [each.entropy for each in pairs], linewidth=1.3, **points)
        right.plot(products, [each.top for each in pairs], linewidth=1.3, linestyle=(0, (5, 2)), **points)
    ends = min(e.query_scale * e.key_scale for e in found), max(e.query_scale * e.key_scale for e in found)
    left.plot(ends, [end**2 for end in ends], color=SOFT, linewidth=0.9, zorder=1, label="(σ_Q σ_K)²")
    left.legend(frameon=False, fontsize=SMALL)
    left.set(xscale="log", yscale="log", xlabel="σ_Q σ_K", title="variance of logits")
    right.set(xscale="log", xlabel="σ_Q σ_K", title="softmax over 256 keys")
    _plain_ticks(left.xaxis, left.yaxis, right.xaxis)
    right.text(0.03, 0.86, "entropy / ln 256", transform=right.transAxes, fontsize=SMALL, color=INK)
    right.text(0.03, 0.08, "largest weight (dashed)", transform=right.transAxes, fontsize=SMALL, color=INK)
    for axes in (left, right):
        axes.title.set_fontsize(9)
    return render(
        figure,
        "scale",
        "Scale of queries and keys, and how flat attention is",
        "Random queries and keys, d = 64. The variance of the logits is (σ_Q σ_K)²; equal scales alone "
        "prevent neither flat attention (left end) nor attention to one position (right end).",
        "Left: variance against the product of scales lies on a line. Right: entropy falls from 1 to 0, the "
        "largest weight rises.",
    )


def _draw_start(found: Sequence[SliceScales]) -> Picture:
    """Key RMS over query RMS per slice, by kind of start, without a query norm."""
    from matplotlib.figure import Figure

    rows = [each for each in found if not each.query_norm]
    height = 2.5
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(left=1.45 / WIDTH, right=0.98, bottom=0.5 / height, top=1 - 0.35 / height)
    axes = figure.add_subplot()
    for place, (field, (name, colour, marker)) in enumerate(SLICES.items()):
        axes.errorbar(
            [getattr(each, field) for each in rows],
            [row + 0.18 * (1 - place) for row in range(len(rows))],
            xerr=[2 * getattr(each, f"{field}_error") for each in rows],
            color=colour,
            marker=marker,
            markersize=5,
            linestyle="none",
            label=name,
        )
    axes.axvline(1, color=SOFT, linewidth=0.9, zorder=1)
    axes.set_yticks(range(len(rows)), [STARTS[each.start] for each in rows])
    axes.set(xlim=(0, 1.15), ylim=(len(rows) - 0.5, -0.5), xlabel="key RMS / query RMS")
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=SMALL)
    return render(
        figure,
        "start",
        "GVA models before training: key RMS over query RMS",
        f"Means of {rows[0].seeds} seeds with two standard errors, hidden size 512, "
        "d_h = 64, d_r = 16, no query norm. With standard initialisation the content slice is too small, and "
        "the whole head hides by how much.",
        "Dots per slice: standard content 0.16, all others near 1 but for the pooled head at 0.47.",
    )
