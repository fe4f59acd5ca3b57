"""The figures of a model: loss by position, eigenvalues, composition, parts of the key, ablations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from keyshift.circuits.results import (
    AblationResult,
    CompositionResult,
    HeadResult,
    LiftResult,
    ModelResult,
    Part,
    RepeatsResult,
)
from keyshift.report.figures.canvas import (
    COLOURS,
    FAINT,
    INK,
    SMALL,
    SOFT,
    STYLE,
    WIDTH,
    Label,
    Picture,
    label_right,
    name_in_figure,
    render,
    text_width,
    wide_axes,
)
from keyshift.report.formats import as_loss, as_signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN, MARKED = COLOURS[0], COLOURS[1]
MOST_BARS = 12  # in one panel
MOST_FIGURES = 4  # of one kind, so that a large model's page stays small
MOST_NAMES = 16  # of points; with more, only some are named
CORNER = 0.8  # both positivities above it: the corner of the scatter plot
BAR = 0.21  # inches from bar to bar


class Point(NamedTuple):
    """A head by two positivities."""

    head: HeadResult
    copying: float
    matching: float


class Bar(NamedTuple):
    """A number with its name."""

    name: str
    value: float
    colour: str = PLAIN


class Figures(NamedTuple):
    """All figures of one model; None, or an empty list, where there is nothing to show."""

    loss: Picture | None
    eigenvalues: Picture | None
    compositions: list[Picture]
    lifts: list[Picture]
    ablations: Picture | None


def draw_model(model: ModelResult) -> Figures:
    """Every figure for which there is something to show, whatever the user's own matplotlib settings."""
    from matplotlib import style

    heads = composed_heads(model)
    lifts = filled_lifts(model)
    with style.context(["default", STYLE]):
        return Figures(
            _draw_loss(model.repeats),
            _draw_eigenvalues(model),
            [_draw_compositions(model, into) for into in heads[:MOST_FIGURES]],
            [_draw_lift(lift) for lift in lifts[:MOST_FIGURES]],
            _draw_ablations(model),
        )


def composed_heads(model: ModelResult) -> list[str]:
    """The heads whose composition with earlier ones there is to draw."""
    return list(dict.fromkeys(each.into for each in model.compositions if each.scores))


def filled_lifts(model: ModelResult) -> list[LiftResult]:
    """The lifts that there are to draw."""
    return [lift for lift in model.lifts if lift.parts]


# --- loss by position


def _draw_loss(repeats: RepeatsResult) -> Picture | None:
    losses = repeats.loss_by_position
    if not losses:
        return None
    figure, axes = wide_axes(["uniform"])
    positions = range(1, len(losses) + 1)
    axes.plot(
        positions, losses, color=PLAIN, linewidth=1.6, marker="o" if len(losses) < 60 else None, markersize=3
    )
    axes.set_xlim(0.5, len(losses) + 0.5)
    axes.set_ylim(0, max(*losses, repeats.uniform_loss) * 1.12 or 1)
    _mark_copies(axes, repeats)
    _level_line(axes, repeats.uniform_loss, "uniform")
    axes.set_xlabel("Position of the predicted token (BOS is 0)")
    axes.set_ylabel("Loss (nats)")
    listing = "; ".join(f"copy {copy.copy_index}: {as_loss(copy.loss)}" for copy in repeats.copies)
    return render(
        figure,
        "loss",
        "Loss by position",
        f"Mean loss of each token over {repeats.sequences:,} sequences of random tokens that repeat every "
        f"{repeats.period:,}. Shaded: every second copy. Dashed: the loss of an even guess over all tokens, "
        f"{as_loss(repeats.uniform_loss)} nats.",
        f"Line chart of the loss at every position. Means: {listing}.",
    )


def _mark_copies(axes: Axes, repeats: RepeatsResult) -> None:
    """Shade every second copy, and name each."""
    for copy in range(repeats.repeats):
        start = copy * repeats.period + 0.5
        if copy % 2:
            axes.axvspan(start, start + repeats.period, color="#eef1f4", linewidth=0, zorder=0)
        place = (start + repeats.period / 2, 0.985)
        name = f"copy {copy + 1}" if repeats.repeats <= 8 else f"{copy + 1}"
        axes.text(
            *place, name, transform=axes.get_xaxis_transform(), ha="center", va="top", color=SOFT, size=SMALL
        )


def _level_line(axes: Axes, level: float, name: str) -> None:
    axes.axhline(level, color=FAINT, linestyle="--", linewidth=1, zorder=1)
    axes.text(1.01, level, name, transform=axes.get_yaxis_transform(), color=SOFT, va="center")


# --- copying against same matching


def _draw_eigenvalues(model: ModelResult) -> Picture | None:
    points = _points(model.heads)
    if not points:
        return None
    figure, axes = _square()
    axes.axhline(0, color=FAINT, linewidth=0.7, zorder=1)
    axes.axvline(0, color=FAINT, linewidth=0.7, zorder=1)
    axes.plot(1, 1, "s", markersize=15, markerfacecolor="none", markeredgecolor=SOFT, markeredgewidth=0.8)
    for point in points:
        colour = MARKED if point.head.name in model.induction_heads else PLAIN
        place = (point.copying, point.matching)
        axes.scatter(*place, s=26, color=colour, alpha=0.85, linewidth=0, zorder=3, clip_on=False)
    _name_points(axes, points, model.induction_heads)
    inside = ", ".join(point.head.name for point in points if _in_corner(point)) or "none"
    some = " Of so many heads, only these and those near the square are named."
    return render(
        figure,
        "eigenvalues",
        "Copying against same matching",
        f"One point per head, from weights alone; matching is {_through(points)}. Square: (1, 1), where a "
        "head raises the token that it reads and matches equal tokens. Orange: the heads taken for induction "
        "heads." + (some if len(points) > MOST_NAMES else ""),
        f"Scatter plot of {len(points)} heads. Both positivities above {CORNER}: {inside}.",
    )


def _points(heads: Sequence[HeadResult]) -> list[Point]:
    """The heads that have both positivities, each of a matrix that is not zero."""
    return [
        Point(head, head.ov.value, head.matching.value)
        for head in heads
        if head.ov and head.matching and not (head.ov.zero or head.matching.zero)
    ]


def _in_corner(point: Point) -> bool:
    return min(point.copying, point.matching) > CORNER


def _through(points: Sequence[Point]) -> str:
    partners = sorted({point.head.matching_with or "" for point in points})
    if partners == ["shift"]:
        return "through the shift of the keys"
    if len(partners) == 1:
        return f"through head {partners[0]}"
    return "through an earlier head or the shift, as the heat map says of each"


def _square() -> tuple[Figure, Axes]:
    """Square axes from -1 to 1 with room for names on their right."""
    from matplotlib.figure import Figure

    side, left, below, above = 3.9, 1.5, 0.55, 0.2
    height = below + side + above
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((left / WIDTH, below / height, side / WIDTH, side / height))
    ticks = (-1, -0.5, 0, 0.5, 1)
    axes.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), xticks=ticks, yticks=ticks)
    axes.set_xlabel("Copying: positivity of the OV circuit")
    axes.set_ylabel("Same matching: positivity of the QK circuit")
    return figure, axes


def _name_points(axes: Axes, points: Sequence[Point], marked: Sequence[str]) -> None:
    """Names in the margin where points crowd, as in the corner; beside the point elsewhere."""
    colours = {point.head.name: MARKED if point.head.name in marked else PLAIN for point in points}
    named = sorted(points, key=lambda point: -point.head.induction)
    if len(named) > MOST_NAMES:
        named = [point for point in named if _in_corner(point) or point.head.name in marked]
    crowded = [point for point in named if _in_corner(point) or _is_crowded(point, points)]
    labels = [Label(p.head.name, colours[p.head.name], p.copying, p.matching) for p in crowded[:MOST_NAMES]]
    label_right(axes, labels)
    for head, x, y in (point for point in named if point not in crowded):
        side = 1 if x < 0.85 else -1
        axes.annotate(
            head.name,
            (x, y),
            xytext=(5 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            color=colours[head.name],
            fontsize=SMALL,
        )


def _is_crowded(point: Point, points: Sequence[Point]) -> bool:
    """Whether a name beside ``point`` could lie on another point or on its name."""
    near = (
        other
        for other in points
        if abs(other.copying - point.copying) < 0.3 and abs(other.matching - point.matching) < 0.07
    )
    return any(other is not point for other in near)


# --- bars


def _bar_panels(
    panels: Sequence[Sequence[Bar]], form: Callable[[float], str], label: str, above: float = 0.1
) -> tuple[Figure, list[Axes]]:
    """Panels of horizontal bars side by side, the first bar on top; ``above`` them, inches for names."""
    from matplotlib.figure import Figure

    names = 0.15 + max(text_width(bar.name) for bars in panels for bar in bars)
    below, gap = 0.5, 0.25
    height = above + below + BAR * max(len(bars) for bars in panels)
    figure = Figure(figsize=(WIDTH, height))
    share = (WIDTH - gap) / max(len(panels), 1)
    drawn = []
    for index, bars in enumerate(panels):
        high = BAR * len(bars)
        left, low = index * share + names, height - above - high
        axes = figure.add_axes((left / WIDTH, low / height, (share - names - gap) / WIDTH, high / height))
        _draw_bars(axes, bars, form)
        axes.set_xlabel(label)
        drawn.append(axes)
    return figure, drawn


def _draw_bars(axes: Axes, bars: Sequence[Bar], form: Callable[[float], str]) -> None:
    places = range(len(bars))
    axes.barh(places, [bar.value for bar in bars], height=0.62, color=[bar.colour for bar in bars], zorder=2)
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=3)
    low, high = min(0.0, *(b.value for b in bars)), max(0.0, *(b.value for b in bars))
    room = 0.17 * (high - low) or 1.0
    axes.set_xlim(low - (room if low < 0 else 0), high + room)
    axes.locator_params(axis="x", nbins=5)
    for place, bar in zip(places, bars, strict=True):
        side = -1 if bar.value < 0 else 1
        axes.annotate(
            form(bar.value),
            (bar.value, place),
            xytext=(3 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            color=INK,
            fontsize=SMALL,
            bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"},
            zorder=5,
        )


def _mark_level(axes: Axes, level: float, name: str) -> None:
    """A dashed line across the bars, named above them."""
    axes.set_xlim(right=max(axes.get_xlim()[1], level * 1.1))
    axes.axvline(level, color=INK, linestyle="--", linewidth=1, zorder=4)
    axes.annotate(
        name,
        (level, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=SOFT,
        fontsize=SMALL,
    )


# --- composition


def _draw_compositions(model: ModelResult, into: str) -> Picture:
    shown = [each for each in model.compositions if each.into == into and each.scores]
    figure, panels = _bar_panels(
        [_strongest(each) for each in shown], "{:.3f}".format, "composition score", 0.45
    )
    for axes, composition in zip(panels, shown, strict=True):
        axes.set_title(f"{composition.kind}-composition", loc="left", fontsize=SMALL, color=INK, pad=16)
        _mark_level(axes, composition.baseline, f"random {composition.baseline:.3f}")
    most = max(len(each.scores) for each in shown)
    cut = f" The strongest {MOST_BARS} of {most} are shown." if most > MOST_BARS else ""
    best = "; ".join(f"{each.kind}: {max(each.scores, key=lambda name: each.scores[name])}" for each in shown)
    return render(
        figure,
        f"composition-{into}",
        f"What head {into} reads: composition with earlier heads",
        "How strongly the head's keys (K), queries (Q) and values (V) read what each earlier head writes, "
        f"from weights alone. Dashed: the mean score of random matrices of the same shapes.{cut}",
        f"Bar chart of composition scores into head {into}. Strongest: {best}.",
    )


def _strongest(composition: CompositionResult) -> list[Bar]:
    ordered = sorted(composition.scores.items(), key=lambda item: -item[1])[:MOST_BARS]
    return [Bar(name_in_figure(name), score) for name, score in ordered]


# --- parts of a key or query


def _draw_lift(lift: LiftResult) -> Picture:
    bars = _lift_bars(lift.parts)
    form = as_signed if max(abs(bar.value) for bar in bars) >= 0.1 else "{:+.1g}".format
    figure, _ = _bar_panels([bars], form, "lift (attention score)")
    listing = "; ".join(f"{bar.name}: {form(bar.value)}" for bar in bars)
    return render(
        figure,
        f"lift-{lift.head}-{lift.side}",
        f"Where the {lift.side} of head {lift.head} comes from",
        "What each part of the residual stream gives to the attention score at the induction target, minus "
        "what it gives at an average allowed source. The model's own score at the target is "
        f"{as_signed(lift.score)}; the parts add up to the model's scores within {lift.residual:.1g} "
        f"(the first {lift.sequences} of the repeated sequences).",
        f"Bar chart of lifts. {listing}.",
    )


def _lift_bars(parts: Sequence[Part]) -> list[Bar]:
    """The parts by lift; of many, the largest ones and the sum of the others."""
    kept = sorted(parts, key=lambda part: -abs(part.lift))
    kept, others = (kept, []) if len(kept) <= MOST_BARS else (kept[: MOST_BARS - 1], kept[MOST_BARS - 1 :])
    bars = [Bar(_part_name(part), part.lift) for part in sorted(kept, key=lambda part: -part.lift)]
    return bars + ([Bar(f"{len(others)} others", sum(part.lift for part in others), FAINT)] if others else [])


def _part_name(part: Part) -> str:
    return name_in_figure(part.name) + (f", {part.shift} back" if part.shift else "")


# --- ablations


def _draw_ablations(model: ModelResult) -> Picture | None:
    removed = [each for each in model.ablations if each.heads and each.loss]
    if not removed:
        return None
    bars = [
        Bar(_ablated(each), each.loss[-1], FAINT if "control" in each.role else PLAIN) for each in removed
    ]
    figure, (axes,) = _bar_panels([bars], as_loss, "loss on the last copy (nats)", 0.25)
    whole = next((each.loss[-1] for each in model.ablations if not each.heads and each.loss), None)
    if whole is not None:
        _mark_level(axes, whole, f"nothing ablated {as_loss(whole)}")
    grey = " Grey: controls." if any(bar.colour == FAINT for bar in bars) else ""
    return render(
        figure,
        "ablations",
        "Loss without some heads",
        f"Loss on the last copy with the named heads ablated ({model.ablation_method or 'method unknown'}). "
        f"Dashed: nothing ablated.{grey}",
        "Bar chart of the loss. " + "; ".join(f"{bar.name}: {as_loss(bar.value)}" for bar in bars) + ".",
    )


def _ablated(ablation: AblationResult) -> str:
    """The heads and, in short, why these; the table below the figure says it in full."""
    heads = ", ".join(ablation.heads)
    reason = ablation.role.partition(":")[0]
    if len(ablation.heads) > 2:
        return name_in_figure(reason or f"{len(ablation.heads)} heads")
    return name_in_figure(f"{heads} ({reason})" if reason else heads)
