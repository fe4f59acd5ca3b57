"""The tables below the results, differences and scores, as texts that page, terminal and Markdown share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from keyshift.recipe import described
from keyshift.report.cells import EMPTY, Cell, spread_cell
from keyshift.report.formats import as_percent, as_ratio, as_signed
from keyshift.report.numbers import Row, score_names
from keyshift.report.outcomes import DIVERGED, STEPS, ceiling_remark
from keyshift.report.paired import Contrast, Difference
from keyshift.results import Report

MOST_CELLS = 6
"""Of a contrast with more cells a short table shows the pooled line alone."""


DIVERGENCE = (
    "the loss or a weight became NaN or infinite, or the last held-out loss is above that of uniform guessing"
)
"""When a run counts as diverged."""


class DifferenceLine(NamedTuple):
    """A difference as a table shows it; ``compared`` and ``measure`` are "" where the line above has them."""

    compared: str
    measure: str
    where: str
    mean: str
    interval: str
    pairs: str
    left_out: str


class ScoreTable(NamedTuple):
    """Scores of the trained models: a column per score, a line per variant."""

    names: list[str]
    lines: list[tuple[str, list[Cell]]]


def difference_lines(found: Sequence[Difference], short: bool = False) -> list[DifferenceLine]:
    """The lines of the table; ``short`` leaves out the cells of contrasts that have many."""
    lines = []
    for contrast, group in groupby(found, lambda difference: difference.contrast):
        members = list(group)
        if short and len(members) > MOST_CELLS and members[-1].pooled:
            members = members[-1:]
        for index, difference in enumerate(members):
            names = ("", "") if index else (compared(contrast), measure(contrast.metric))
            lines.append(DifferenceLine(*names, *_figures(difference)))
    return lines


def compared(contrast: Contrast) -> str:
    """The two sides of a contrast in words."""
    return f"{described({contrast.axis: contrast.of})} vs {contrast.against}"


def measure(metric: str) -> str:
    """What is compared, in words."""
    names = {"loss": "loss", "accuracy": "accuracy", STEPS: "steps to 99%", DIVERGED: "runs that diverged"}
    return names.get(metric, f"score {metric}")


def where(difference: Difference) -> str:
    """The cell of a difference, or how many are pooled in it."""
    if not difference.pooled:
        return described(difference.where)
    some = difference.cells < difference.cells_compared
    return f"pooled over {difference.cells}{f' of {difference.cells_compared}' if some else ''}"


def mean_and_interval(difference: Difference) -> tuple[str, str]:
    """The mean with its unit, and its interval without: "+42.1 points" and "+30.2 … +54.0"."""
    metric = difference.contrast.metric
    if difference.mean is None:
        return EMPTY, difference.bound
    mean = " ".join(filter(None, (difference.bound, difference_text(difference.mean, metric))))
    low, high = difference.low, difference.high
    if low is None and high is None:
        return mean, ""
    first = "0" if low is None else difference_text(low, metric, unit=False)  # only ratios have one end
    last = "∞" if high is None else difference_text(high, metric, unit=False)
    return mean, f"{first} … {last}"


def difference_text(value: float, metric: str, unit: bool = True) -> str:
    """A difference, with its unit or without."""
    if metric == STEPS:
        text, name = as_ratio(value), "×"
    elif metric == "loss":
        text, name = as_signed(value, decimals=3), " nats"
    else:
        text, name = as_signed(100 * value, decimals=1), " points"
    return text + name if unit else text


def score_table(report: Report, rows: Sequence[Row]) -> ScoreTable | None:
    """The mean of every score over finished seeds, ± its standard deviation; None if there are no scores."""
    names = score_names(report.variants)
    if not names:
        return None
    lines = [
        (row["variant"], [spread_cell(row["scores"].get(name), as_percent) for name in names]) for row in rows
    ]
    return ScoreTable(names, lines)


def results_remark(report: Report, rows: Sequence[Row]) -> str:
    """How the numbers of the results table count runs, as far as it has them."""
    remarks = [ceiling_remark(report)] if any(row["final_accuracy"] for row in rows) else []
    if any(row["diverged"] for row in rows):
        remarks.append(f"Diverged: {DIVERGENCE}; with Wilson's 95% interval of the share.")
    return " ".join(filter(None, remarks))


def how_compared(report: Report, found: Sequence[Difference]) -> str:
    """How the differences of a table were computed, as far as it has them."""
    return " ".join(filter(None, _explanations(report, found)))


def _explanations(report: Report, found: Sequence[Difference]) -> Iterator[str]:
    metrics = {difference.contrast.metric for difference in found}
    yield (
        "Each line compares runs of equal seeds: the mean over seeds with its 95% t interval, one line at a "
        "time, with no correction for the number of lines."
    )
    if metrics - {STEPS, DIVERGED}:
        yield "Loss, accuracy and scores: the first minus the second, at the end of training."
    if "accuracy" in metrics:
        yield ceiling_remark(report)
    if STEPS in metrics:
        yield (
            "Steps to 99%: how many times fewer steps the first takes (steps of the second divided by those "
            "of the first; geometric mean, interval on logarithms)."
        )
    if any(difference.bound for difference in found):
        yield (
            "Where one side never reached 99%, the number of steps that it was trained (if it diverged: that "
            "were planned) stands in, so that the ratio is a bound and one end of its interval is open; "
            "pairs where neither did are left out."
        )
    if DIVERGED in metrics:
        yield f"Runs that diverged: their share in the first minus that in the second; {DIVERGENCE}."
    if any(difference.pairs > 1 and difference.agree for difference in found):
        yield "Where all pairs are equal there is no interval."
    if any(difference.pooled for difference in found):
        yield "Pooled: per seed the mean over cells, then over seeds; a seed is one observation."


def _figures(difference: Difference) -> tuple[str, str, str, str, str]:
    reasons = (f"{count} left out: {reason}" for reason, count in difference.left_out.items())
    return (
        where(difference),
        *mean_and_interval(difference),
        str(difference.pairs),
        "; ".join(reasons),
    )
