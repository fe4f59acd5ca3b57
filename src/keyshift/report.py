"""The report of a comparison: ``report.json``, figures, a self-contained page, a table for the terminal."""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from keyshift.results import Report, RunResult, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.text import Text

Row = dict[str, Any]

EMPTY = "–"
FIGURE_NAMES = ("accuracy", "loss", "cache", "shift")


# --- files ------------------------------------------------------------------------------------------------


def write_report(report: Report, directory: Path) -> None:
    """Write ``report.json``, ``figures/*.png`` and ``report.html`` into ``directory``, each file atomically.

    The numbers are written first, so that they are kept whatever happens to the drawing. A report may be
    partial: what was not measured is left out.
    """
    pictures = directory / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    _write(directory / "report.json", report.model_dump_json(indent=2).encode() + b"\n")
    figures = _draw(report)
    for figure in figures:
        _write(pictures / f"{figure.name}.png", figure.png)
    for name in set(FIGURE_NAMES) - {figure.name for figure in figures}:
        (pictures / f"{name}.png").unlink(missing_ok=True)
    _write(directory / "report.html", _page(report, figures).encode())


def _write(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- numbers ----------------------------------------------------------------------------------------------


def summary_rows(report: Report) -> list[Row]:
    """One dictionary per variant, aggregated over its seeds; plain JSON values, ``None`` where not measured.

    ``final_loss``, ``final_accuracy`` and ``bits_per_byte`` are taken at the last evaluation of every
    *finished* run: mean, sample standard deviation (``None`` for one seed), min, max, number of seeds.
    ``steps_to_90`` and ``steps_to_99`` look at every run whose outcome is known (finished, diverged, or
    reached already): ``median`` counts a run that never got there as later than any step, hence ``None``
    means that at least half of the runs never did; ``min`` and ``max`` are over the ``reached`` ones.
    ``cache_ratio`` compares with the first unshifted GQA variant, from measured bytes where both have them.
    """
    reference = _reference(report)
    return [_row(variant, reference) for variant in report.variants]


def _row(variant: VariantResult, reference: VariantResult | None) -> Row:
    finished = [run for run in variant.runs if run.status == "finished"]
    last = [run.curve[-1] for run in finished if run.curve]
    ratio, measured = _cache_ratio(variant, reference)
    return {
        "variant": variant.name,
        "parameters": variant.parameters,
        "shift_parameters": variant.shift_parameters,
        "seeds_finished": len(finished),
        "seeds_total": len(variant.runs),
        "steps": max((run.steps for run in finished), default=None),
        "steps_to_90": _steps_to(variant.runs, 0.90),
        "steps_to_99": _steps_to(variant.runs, 0.99),
        "final_loss": _spread(point.loss for point in last),
        "final_accuracy": _spread(point.accuracy for point in last),
        "bits_per_byte": _spread(point.bits_per_byte for point in last),
        "cache_bytes_per_token_predicted": variant.cache_bytes_per_token,
        "cache_bytes_per_token_measured": variant.cache_bytes_per_token_measured,
        "cache_ratio": ratio,
        "cache_ratio_measured": measured,
        "cache_ratio_to": reference.name if reference else None,
        "decode_ms_per_token": _median(run.decode_ms_per_token for run in variant.runs),
        "train_tokens_per_second": _median(run.train_tokens_per_second for run in variant.runs),
        "status": _status(variant.runs),
    }


def _reference(report: Report) -> VariantResult | None:
    """The first plain GQA variant: what the caches of the others are compared with."""
    plain = (
        variant
        for variant in report.variants
        if variant.config.get("attention", "gqa") == "gqa" and variant.config.get("shift", "none") == "none"
    )
    return next(plain, None)


def _cache_ratio(variant: VariantResult, reference: VariantResult | None) -> tuple[float | None, bool]:
    """Cache bytes relative to the reference, and whether both of them were measured."""
    if reference is None:
        return None, False
    mine, theirs = variant.cache_bytes_per_token_measured, reference.cache_bytes_per_token_measured
    if mine is not None and theirs:
        return mine / theirs, True
    if not reference.cache_bytes_per_token:
        return None, False
    return variant.cache_bytes_per_token / reference.cache_bytes_per_token, False


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _median(values: Iterable[float | None]) -> float | None:
    finite = _finite(values)
    return median(finite) if finite else None


def _spread(values: Iterable[float | None]) -> Row | None:
    finite = _finite(values)
    if not finite:
        return None
    return {
        "mean": fmean(finite),
        "std": stdev(finite) if len(finite) > 1 else None,
        "min": min(finite),
        "max": max(finite),
        "seeds": len(finite),
    }


def _steps_to(runs: Sequence[RunResult], accuracy: float) -> Row | None:
    if not any(point.accuracy is not None for run in runs for point in run.curve):
        return None
    steps = [(run.steps_to(accuracy), run.status) for run in runs]
    known = [step for step, status in steps if step is not None or status in ("finished", "diverged")]
    if not known:
        return None
    reached = [step for step in known if step is not None]
    middle = median(math.inf if step is None else step for step in known)
    return {
        "median": middle if math.isfinite(middle) else None,
        "min": min(reached, default=None),
        "max": max(reached, default=None),
        "reached": len(reached),
        "of": len(known),
    }


def _status(runs: Sequence[RunResult]) -> str:
    counts: Counter[str] = Counter(run.status for run in runs)
    if len(counts) <= 1:
        return next(iter(counts), "pending")
    order = ("finished", "diverged", "interrupted", "pending")
    return ", ".join(f"{counts[status]} {status}" for status in order if counts[status])


# --- numbers as text --------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What a table shows: a value, and below it a smaller remark (a range, a count)."""

    text: str = EMPTY
    note: str = ""


class Column(NamedTuple):
    """A column of the page (``title``), of the terminal's table (``short``), or of both; "" leaves it out."""

    group: str
    title: str
    short: str
    cell: Callable[[Row], Cell]


def _columns(kind: Literal["task", "text"]) -> list[Column]:
    final = "Final, held out"
    steps = "Steps to accuracy"
    cached = "Cache, bytes/token"
    task = [
        Column(steps, "90%", "→90%", lambda row: _steps_cell(row["steps_to_90"])),
        Column(steps, "99%", "→99%", lambda row: _steps_cell(row["steps_to_99"])),
        Column(final, "Accuracy", "Acc.", lambda row: _spread_cell(row["final_accuracy"], _percent)),
        Column(final, "Loss, nats", "", lambda row: _spread_cell(row["final_loss"], _loss)),
    ]
    text = [
        Column(final, "Loss, nats", "Loss", lambda row: _spread_cell(row["final_loss"], _loss)),
        Column(final, "Bits/byte", "Bits/B", lambda row: _spread_cell(row["bits_per_byte"], _loss)),
    ]
    return [
        Column("", "Parameters", "", _parameters_cell),
        Column("", "", "Params", lambda row: Cell(_compact(row["parameters"]))),
        Column("", "Seeds", "", _seeds_cell),
        Column("", "", "Seeds", lambda row: Cell(_seeds_cell(row).text)),
        *(task if kind == "task" else text),
        Column(cached, "Predicted", "", lambda row: Cell(f"{row['cache_bytes_per_token_predicted']:,}")),
        Column(cached, "Measured", "", _measured_cell),
        Column("", "", "Cache B", _cache_cell),
        Column(cached, "Ratio", "Ratio", lambda row: _number_cell(row["cache_ratio"], "{:.2f}")),
        Column("Decoding", "ms/token", "ms/tok", _decode_cell),
        Column("Training", "tokens/s", "", lambda row: _number_cell(_speed(row), "{:,.0f}")),
        Column("", "", "tok/s", lambda row: Cell(EMPTY if _speed(row) is None else _compact(_speed(row)))),
    ]


def _speed(row: Row) -> Any:
    return row["train_tokens_per_second"]


def _steps_cell(steps: Row | None) -> Cell:
    if steps is None:
        return Cell()
    text = "never" if steps["median"] is None else f"{steps['median']:,g}"
    if steps["reached"] < steps["of"]:
        return Cell(text, f"{steps['reached']} of {steps['of']}")
    return Cell(text, _range(steps))


def _range(steps: Row) -> str:
    return "" if steps["min"] == steps["max"] else f"{steps['min']:,}–{steps['max']:,}"


def _spread_cell(spread: Row | None, form: Callable[[float], str]) -> Cell:
    if spread is None:
        return Cell()
    return Cell(form(spread["mean"]), "" if spread["std"] is None else f"± {form(spread['std'])}")


def _number_cell(value: float | None, form: str) -> Cell:
    return Cell() if value is None else Cell(form.format(value))


def _seeds_cell(row: Row) -> Cell:
    done = row["status"] == "finished"
    others = [part for part in row["status"].split(", ") if not part.endswith("finished")]
    return Cell(f"{row['seeds_finished']}/{row['seeds_total']}", "" if done else "\n".join(others))


def _parameters_cell(row: Row) -> Cell:
    shift = row["shift_parameters"]
    return Cell(f"{row['parameters']:,}", f"{shift:,} shift" if shift else "")


def _measured_cell(row: Row) -> Cell:
    value = row["cache_bytes_per_token_measured"]
    return _number_cell(value, "{:,.0f}" if value is not None and value == round(value) else "{:,.1f}")


def _cache_cell(row: Row) -> Cell:
    if row["cache_bytes_per_token_measured"] is None:
        return Cell(_compact(row["cache_bytes_per_token_predicted"]), "predicted")
    return Cell(_compact(row["cache_bytes_per_token_measured"]))


def _decode_cell(row: Row) -> Cell:
    return _number_cell(row["decode_ms_per_token"], "{:.3g}")


def _percent(value: float) -> str:
    """Two digits near the top, so that 98.96% does not read as having reached 99%."""
    return f"{value:.2%}" if 0.98 < value < 1 else f"{value:.1%}"


def _loss(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def _compact(value: float) -> str:
    """At most about five characters: 512, 66.3k, 2.41M."""
    if value < 10_000:
        return f"{value:.0f}"
    for size, suffix in ((1e3, "k"), (1e6, "M")):
        if value / size < 999.5:
            return f"{value / size:.3g}{suffix}"
    return f"{value / 1e9:.3g}G"


# --- numbers as sentences ---------------------------------------------------------------------------------


def _sentence(row: Row, kind: Literal["task", "text"], reference: Row | None) -> str:
    """What was measured for one variant, to follow its name; it claims nothing else."""
    outcome = _task_outcome(row) if kind == "task" else _text_outcome(row, reference)
    if outcome is None:
        return f"has no finished run yet ({row['status']})."
    unfinished = "" if row["seeds_finished"] == row["seeds_total"] else f" ({row['status']})"
    same = reference is None or row is reference
    return outcome + unfinished + ("" if same else _cache_clause(row)) + "."


def _task_outcome(row: Row) -> str | None:
    for threshold, key in (("99%", "steps_to_99"), ("90%", "steps_to_90")):
        steps = row[key]
        if steps is not None and steps["reached"]:
            above = "" if key == "steps_to_99" else ", and 99% in none"
            return f"reached {threshold} held-out accuracy in {_seeds(steps)}, {_when(steps)}{above}"
    final = row["final_accuracy"]
    if final is None:
        return None
    seeds = _seeds(row["steps_to_90"], none=True)
    ended = f"ended at {_percent(final['mean'])}{_after(row)}"
    return f"stayed below 90% held-out accuracy in {seeds}, and {ended}"


def _seeds(steps: Row, none: bool = False) -> str:
    plural = "seed" if steps["of"] == 1 else "seeds"
    return f"{steps['of'] if none else steps['reached']} of {steps['of']} {plural}"


def _when(steps: Row) -> str:
    if steps["reached"] == 1:
        return f"at step {steps['min']:,}"
    if steps["reached"] < steps["of"]:
        return f"at steps {_range(steps)}" if _range(steps) else f"at step {steps['min']:,}"
    return f"median step {steps['median']:,g}" + (f" ({_range(steps)})" if _range(steps) else "")


def _after(row: Row) -> str:
    return f" after {row['steps']:,} steps" if row["steps"] else ""


def _text_outcome(row: Row, reference: Row | None) -> str | None:
    loss, bits = row["final_loss"], row["bits_per_byte"]
    if loss is None:
        return None
    error = "" if loss["std"] is None else f" ± {_loss(loss['std'])}"
    per_byte = "" if bits is None else f" ({_loss(bits['mean'])} bits per byte)"
    over = f"mean of {loss['seeds']} seeds" if loss["seeds"] > 1 else "one seed"
    value = f"{_loss(loss['mean'])}{error} nats per token{per_byte}"
    text = f"ended at a held-out loss of {value}{_after(row)}, {over}"
    if reference is None or row is reference or reference["final_loss"] is None:
        return text
    return f"{text}, {_difference(loss, reference['final_loss'], reference['variant'])}"


def _difference(loss: Row, other: Row, name: str) -> str:
    gap = loss["mean"] - other["mean"]
    overlap = loss["min"] <= other["max"] and other["min"] <= loss["max"]
    remark = " (the ranges over seeds overlap)" if overlap else ""
    return f"{_loss(abs(gap))} nats {'above' if gap > 0 else 'below'} {name}{remark}"


def _cache_clause(row: Row) -> str:
    ratio = row["cache_ratio"]
    if ratio is None:
        return ""
    kind = "measured" if row["cache_ratio_measured"] else "predicted"
    if abs(ratio - 1) < 0.005:
        return f", with the same {kind} cache as {row['cache_ratio_to']}"
    much = f"{ratio:.2f} of" if ratio < 1 else f"{ratio:.2f} times"
    return f", with {much} the {kind} cache of {row['cache_ratio_to']}"


# --- figures ----------------------------------------------------------------------------------------------

INK = "#1f2328"
FAINT = "#8b929a"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MARKERS = ("o", "s", "D")
WIDTH = 7.2  # inches; the page shows a figure at 1.3 times its natural size
FONT_SIZE = 9.0  # points
LABEL_GAP = 13.0  # points between two labels
LONGEST_NAME = 34  # characters of a name inside a figure

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
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


@dataclass(frozen=True)
class Picture:
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


def _look(index: int) -> Look:
    turn = index // len(COLOURS)
    return Look(COLOURS[index % len(COLOURS)], DASHES[turn % len(DASHES)], MARKERS[turn % len(MARKERS)])


def _draw(report: Report) -> list[Picture]:
    """Every figure for which there is something to show."""
    with _matplotlib_style():
        drawn = [
            _curves(report, "accuracy") if report.kind == "task" else None,
            _curves(report, "loss"),
            _cache_against_quality(report),
            _shift_weights(report),
        ]
    return [picture for picture in drawn if picture is not None]


@contextmanager
def _matplotlib_style() -> Iterator[None]:
    """This module's style on top of matplotlib's defaults, whatever the user's own; restored afterwards."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def _picture(figure: Figure, name: str, title: str, caption: str, alt: str) -> Picture:
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return Picture(name, title, caption, alt, svg.getvalue(), png.getvalue())


@cache
def _drawable(character: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return character.isprintable() and get_font(findfont("DejaVu Sans")).get_char_index(ord(character)) != 0


def _in_figure(name: str) -> str:
    """``name`` with characters that the figures' font lacks replaced, and its middle cut when long."""
    shown = "".join(character if _drawable(character) else "?" for character in name)
    half = LONGEST_NAME // 2
    return shown if len(shown) <= LONGEST_NAME else f"{shown[:half]}…{shown[-half + 1 :]}"


def _text_width(text: str) -> float:
    """Inches that ``text`` takes at the figures' font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=FONT_SIZE)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def _wide_axes(names: Sequence[str]) -> tuple[Figure, Axes]:
    """Axes that leave room for ``names`` on their right, one below the other."""
    from matplotlib.figure import Figure

    height = max(3.5, 0.9 + len(names) * LABEL_GAP / 72)
    figure = Figure(figsize=(WIDTH, height))
    right = WIDTH - 0.4 - max(_text_width(name) for name in names)
    figure.subplots_adjust(left=0.62 / WIDTH, right=right / WIDTH, bottom=0.5 / height, top=1 - 0.16 / height)
    return figure, figure.add_subplot()


def _label_right(axes: Axes, labels: Sequence[Label]) -> None:
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


# Learning curves

Series = list[tuple[int, float]]


def _series(run: RunResult, field: str) -> Series:
    points = ((point.step, getattr(point, field)) for point in run.curve)
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def _averaged(runs: Sequence[RunResult], field: str) -> list[Series]:
    """The seeds that enter the mean: the finished ones, or all of them as long as none has finished."""
    finished = [series for run in runs if run.status == "finished" and (series := _series(run, field))]
    return finished or [series for run in runs if (series := _series(run, field))]


def _band(seeds: Sequence[Series]) -> list[tuple[int, float, float, float]]:
    """(step, mean, min, max) at the steps that all ``seeds`` share."""
    tables = [dict(series) for series in seeds]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    columns = [(step, [table[step] for table in tables]) for step in shared]
    return [(step, fmean(values), min(values), max(values)) for step, values in columns]


def _curves(report: Report, field: Literal["accuracy", "loss"]) -> Picture | None:
    shown = [(i, v, s) for i, v in enumerate(report.variants) if (s := _averaged(v.runs, field))]
    if not shown:
        return None
    names = [_in_figure(variant.name) for _, variant, _ in shown]
    figure, axes = _wide_axes(names)
    ends = []
    for (index, variant, seeds), name in zip(shown, names, strict=True):
        end = _draw_variant(axes, variant, seeds, _look(index), field)
        ends.append(Label(name, _look(index).colour, *end))
    axes.set_xlabel("Training steps")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    cropped = _set_limits(axes, report, field, [seeds for _, _, seeds in shown])
    if field == "accuracy":
        _mark_chance(axes, report.data.get("chance_level"))
    _label_right(axes, ends)
    noun = "accuracy" if field == "accuracy" else "loss (nats per token)"
    listing = "; ".join(f"{label.text}: {_quality(label.y, field)} at step {label.x:,g}" for label in ends)
    return _picture(
        figure,
        field,
        f"Held-out {noun}",
        _curve_caption([variant for _, variant, _ in shown], cropped),
        f"Line chart of held-out {noun} against training steps. Last values: {listing}.",
    )


def _quality(value: float, field: str) -> str:
    return _percent(value) if field == "accuracy" else _loss(value)


def _draw_variant(
    axes: Axes, variant: VariantResult, seeds: Sequence[Series], look: Look, field: str
) -> tuple[float, float]:
    """Draw one variant and return where its line ends."""
    for run in variant.runs:
        series = _series(run, field)
        if not series:
            continue
        steps, values = zip(*series, strict=True)
        axes.plot(steps, values, color=look.colour, linewidth=0.7, alpha=0.4)
        if run.status == "diverged":
            axes.plot(steps[-1], values[-1], "x", color=look.colour, markersize=6)
    band = _band(seeds)
    if not band:
        return max(series[-1] for series in seeds)
    steps, mean, low, high = zip(*band, strict=True)
    axes.fill_between(steps, low, high, color=look.colour, alpha=0.16, linewidth=0)
    axes.plot(steps, mean, color=look.colour, linestyle=look.dash, linewidth=1.9)
    return steps[-1], mean[-1]


def _set_limits(axes: Axes, report: Report, field: str, shown: Sequence[Sequence[Series]]) -> bool:
    """Set both axes from the averaged seeds only; True if the beginning of a curve lies above the axis."""
    points = [point for seeds in shown for series in seeds for point in series]
    last = max(step for step, _ in points)
    axes.set_xlim(0, last or 1)
    if field == "accuracy":
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


def _mark_chance(axes: Axes, level: Any) -> None:
    if isinstance(level, int | float) and 0 < level < 1:
        axes.axhline(level, color=FAINT, linestyle=":", linewidth=1, zorder=1)
        axes.annotate(
            "chance",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color="#5b636b",
            fontsize=7.5,
        )


def _curve_caption(variants: Sequence[VariantResult], cropped: bool) -> str:
    runs = [run for variant in variants for run in variant.runs]
    text = "Thick line: mean over finished seeds; band: their minimum to maximum; thin lines: every seed."
    if all(len(variant.runs) == 1 for variant in variants):
        text = "One seed per variant, so these curves say nothing about the spread between seeds."
    if any(run.status == "diverged" and run.curve for run in runs):
        text += " A cross marks the last evaluation of a run that diverged, if it lies within the axes."
    if any(all(run.status != "finished" for run in variant.runs) for variant in variants):
        text += " Where no seed has finished, the mean is over all seeds so far."
    return text + (" The first quarter of training lies partly above the axis." if cropped else "")


# Cache against quality


def _cache_against_quality(report: Report) -> Picture | None:
    field = "final_accuracy" if report.kind == "task" else "final_loss"
    rows = enumerate(summary_rows(report))
    shown = [(i, r) for i, r in rows if r["cache_bytes_per_token_measured"] is not None and r[field]]
    if not shown:
        return None
    figure, axes = _wide_axes([_in_figure(row["variant"]) for _, row in shown])
    labels = []
    for index, row in shown:
        look, spread, cached = _look(index), row[field], row["cache_bytes_per_token_measured"]
        error = [[spread["mean"] - spread["min"]], [spread["max"] - spread["mean"]]]
        axes.errorbar(cached, spread["mean"], error, fmt="none", ecolor=look.colour, elinewidth=1, capsize=3)
        axes.plot(
            cached, spread["mean"], look.marker, color=look.colour, markersize=7, markeredgecolor="white"
        )
        labels.append(Label(_in_figure(row["variant"]), look.colour, cached, spread["mean"]))
    _set_cache_axes(axes, report.kind, labels)
    _label_right(axes, labels)
    noun = "accuracy" if report.kind == "task" else "loss"
    better = "upper left" if report.kind == "task" else "lower left"
    form = _percent if report.kind == "task" else _loss
    listing = "; ".join(f"{label.text}: {label.x:,g} bytes, {form(label.y)}" for label in labels)
    return _picture(
        figure,
        "cache",
        f"Cache against final {noun}",
        f"Final held-out {noun} (mean over finished seeds; whiskers: minimum to maximum) against allocated "
        f"cache bytes per token, all layers, one sequence. Better is to the {better}.",
        f"Scatter plot of cache bytes per token against final held-out {noun}. {listing}.",
    )


def _set_cache_axes(axes: Axes, kind: Literal["task", "text"], labels: Sequence[Label]) -> None:
    from matplotlib.ticker import LogLocator

    largest, smallest = max(label.x for label in labels), min(label.x for label in labels)
    if smallest > 0 and largest / smallest > 20:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
        axes.xaxis.set_major_formatter(lambda value, _: _compact(value))
        axes.set_xlim(smallest / 1.5, largest * 1.5)
    else:
        axes.set_xlim(0, largest * 1.08 or 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel("Cache, measured bytes per token")
    if kind == "task":
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        axes.margins(y=0.12)
        axes.autoscale_view(scalex=False)


# Shift weights


class Head(NamedTuple):
    """The shift weights of one head of one run; an empty tuple where that side is not shifted."""

    layer: int
    head: int
    key: tuple[float, ...] = ()
    value: tuple[float, ...] = ()
    query: tuple[float, ...] = ()


def _heads(run: RunResult) -> list[Head]:
    """One record per head. Where a layer has fewer value than key heads (or the like), a group shares one."""
    heads = []
    for layer in sorted({weights.layer for weights in run.shift_weights}):
        sides = {w.of: w.weights for w in run.shift_weights if w.layer == layer and w.weights}
        count = max((len(weights) for weights in sides.values()), default=0)
        for head in range(count):
            own = {of: tuple(weights[head * len(weights) // count]) for of, weights in sides.items()}
            heads.append(Head(layer, head, **own))
    return heads


def _share(weights: Sequence[float], places: slice, unshifted: float) -> float:
    """The part of the weights' absolute sum at ``places``; ``unshifted`` where there are no weights."""
    total = sum(abs(weight) for weight in weights)
    return sum(abs(weight) for weight in weights[places]) / total if total else unshifted


def _position(head: Head) -> tuple[float, float]:
    """(share of the key from earlier tokens, share of the value from the token itself)."""
    return _share(head.key, slice(1, None), 0.0), _share(head.value, slice(0, 1), 1.0)


def _drawable_heads(variant: VariantResult) -> list[Head]:
    heads = [head for run in variant.runs if run.status != "diverged" for head in _heads(run)]
    return [h for h in heads if (h.key or h.value) and all(math.isfinite(w) for w in h.key + h.value)]


def _shift_weights(report: Report) -> Picture | None:
    shown = [(variant, heads) for variant in report.variants if (heads := _drawable_heads(variant))]
    if not shown:
        return None
    layers = max(head.layer for _, heads in shown for head in heads) + 1
    figure, panels = _square_axes(len(shown))
    for axes, (variant, heads) in zip(panels, shown, strict=True):
        _draw_heads(axes, variant.name, heads, layers)
    if layers > 1:
        _layer_bar(figure, layers)
    counts = "; ".join(f"{_in_figure(variant.name)}: {_corner_count(heads)}" for variant, heads in shown)
    return _picture(
        figure,
        "shift",
        "Learned shift weights",
        "One point per head and seed, placed by absolute weights. Upper right: keys look at an earlier token "
        "while values come from the token itself, as a one-layer induction head needs (with the number of "
        "heads there); upper left: plain attention. A hollow point has a negative weight. The place alone "
        "does not show that a head does induction.",
        f"Scatter plots of the shift weights of each head. Heads in the induction quadrant: {counts}.",
    )


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


def _corner_count(heads: Sequence[Head]) -> str:
    inside = sum(x > 0.5 and y > 0.5 for x, y in map(_position, heads))
    return f"{inside} of {len(heads)}"


def _layer_colours(layers: int) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap([colormaps["viridis"](0.9 * i / max(layers - 1, 1)) for i in range(layers)])


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
    axes.set_title(_in_figure(name), fontsize=FONT_SIZE, loc="left", pad=18)
    corner: dict[str, Any] = {
        "transform": axes.transAxes,
        "fontsize": 7.5,
        "color": "#5b636b",
        "va": "bottom",
    }
    axes.text(0, 1.02, "plain", **corner)
    axes.text(1, 1.02, f"induction: {_corner_count(heads)}", ha="right", **corner)


def _layer_bar(figure: Figure, layers: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    norm = BoundaryNorm([i - 0.5 for i in range(layers + 1)], layers)
    mappable = ScalarMappable(norm, _layer_colours(layers))
    right = max(axes.get_position().x1 for axes in figure.axes)
    place = figure.add_axes((right + 0.15 / WIDTH, 0.25, 0.1 / WIDTH, 0.5))
    bar = figure.colorbar(mappable, cax=place, ticks=range(0, layers, math.ceil(layers / 8)))
    bar.set_label("Layer")
    bar.outline.set_visible(False)
    bar.ax.minorticks_off()


# --- the page ---------------------------------------------------------------------------------------------


def _page(report: Report, pictures: Sequence[Picture]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    rows = summary_rows(report)
    reference = _reference(report)
    compared = None if reference is None else rows[report.variants.index(reference)]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    columns = [c for c in _filled(_columns(report.kind), rows) if c.title]
    return environment.get_template("report.html.j2").render(
        report=report,
        sentences=[(row["variant"], _sentence(row, report.kind, compared)) for row in rows],
        unfinished=_unfinished(report),
        diverged=_diverged(report),
        groups=_groups(columns),
        columns=columns,
        rows=[(row["variant"], [column.cell(row) for column in columns]) for row in rows],
        looks=[_look(index).colour for index in range(len(rows))],
        reference=None if reference is None else reference.name,
        pictures=pictures,
        shift_tables=[table for variant in report.variants if (table := _shift_table(variant))],
        created=_moment(report.created),
        data={key.replace("_", " "): _fact(value) for key, value in report.data.items()},
        recipe=json.dumps(report.recipe, indent=2, ensure_ascii=False, default=str),
    )


def _filled(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns in which at least one variant has something to show."""
    return [column for column in columns if any(column.cell(row).text != EMPTY for row in rows)]


def _groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """(heading, columns below it) for the upper line of the table's head."""
    groups: list[tuple[str, int]] = []
    for column in columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    return groups


def _unfinished(report: Report) -> str:
    counts = Counter(run.status for variant in report.variants for run in variant.runs)
    parts = [f"{counts[status]} {status}" for status in ("interrupted", "pending") if counts[status]]
    return ", ".join(parts)


def _diverged(report: Report) -> list[str]:
    return [
        f"{variant.name}, seed {run.seed}: diverged after {run.steps:,} steps"
        + (f" ({run.message})" if run.message else "")
        for variant in report.variants
        for run in variant.runs
        if run.status == "diverged"
    ]


class ShiftTable(NamedTuple):
    """The shift weights of one variant, a line per seed, layer and head."""

    variant: str
    columns: list[str]
    rows: list[list[str]]


def _shift_table(variant: VariantResult) -> ShiftTable | None:
    heads = [(run.seed, head) for run in variant.runs for head in _heads(run)]
    if not heads:
        return None
    window = {of: max(len(getattr(head, of)) for _, head in heads) for of in ("key", "value", "query")}
    symbols = {"key": "α", "value": "β", "query": "γ"}
    columns = [(of, place) for of, length in window.items() for place in range(length)]
    lines = []
    for seed, head in heads:
        sides = [(getattr(head, of), place) for of, place in columns]
        weights = [f"{side[place]:.3f}" if place < len(side) else EMPTY for side, place in sides]
        lines.append([str(seed), str(head.layer), str(head.head), *weights])
    titles = [f"{symbols[of]}{place + 1}" for of, place in columns]
    return ShiftTable(variant.name, ["Seed", "Layer", "Head", *titles], lines)


def _moment(text: str) -> str:
    """An ISO 8601 time for readers; anything else as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if moment.tzinfo else text


def _fact(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


# --- the terminal -----------------------------------------------------------------------------------------


def print_summary(report: Report, console: Console) -> None:
    """Print the comparison as a table that fits 80 columns, and below it what did not finish."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = summary_rows(report)
    columns = [column for column in _filled(_columns(report.kind), rows) if column.short]
    gap = 1 if console.width >= 100 else 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, gap), show_edge=False, title=Text(report.title))
    table.add_column("Variant", overflow="fold", min_width=10)
    for column in columns:
        table.add_column(column.short, justify="right", no_wrap=True)
    for row in rows:
        cells = (column.cell(row) for column in columns)
        table.add_row(Text(row["variant"]), *(_terminal_text(cell) for cell in cells))
    console.print(table)
    console.print()
    for remark in _remarks(report):
        console.print(Text(remark, style="yellow"))


def _terminal_text(cell: Cell) -> Text:
    from rich.text import Text

    return Text.assemble(cell.text, ("\n" + cell.note if cell.note else "", "dim"))


def _remarks(report: Report) -> list[str]:
    remarks = list(_diverged(report))
    if not report.complete:
        remarks.append(f"incomplete: {_unfinished(report) or 'not every run has ended'}")
    reference = _reference(report)
    if reference is not None:
        remarks.append(f"Ratio: cache relative to {reference.name}")
    return remarks
