"""The comparisons that a recipe asks for, paired by seed: mean differences and their 95% intervals.

Two runs of a pair have the same seed, so the same order of data, and the same labels on all axes but one. A
seed is one observation: where several cells of the grid are pooled, each seed counts once, with the mean over
its cells.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from keyshift.report.outcomes import STEPS, Steps, final_value, steps_to_99
from keyshift.results import Report, RunResult, VariantResult

EQUAL = 1e-12
"""Pairs that differ by less differ by rounding."""

AT_LEAST, AT_MOST, EITHER = "at least", "at most", "bounds in both directions"


class Contrast(NamedTuple):
    """A comparison of the recipe: two labels of one axis, and what is compared."""

    of: str
    against: str
    axis: str
    metric: str


class Cell(NamedTuple):
    """The two variants of a contrast that share the labels of all other axes, ``where``."""

    where: dict[str, str]
    of: VariantResult
    against: VariantResult


class Pair(NamedTuple):
    """What one seed says: a difference, or the logarithm of a ratio.

    ``bound`` is "" if the value is known, and otherwise which way it errs.
    """

    value: float
    bound: str = ""


@dataclass(frozen=True)
class Difference:
    """A contrast in one cell of the grid, or pooled over cells.

    The numbers are ``of`` minus ``against``: nats, or shares of 1. For ``steps_to_99`` they are the steps of
    ``against`` divided by those of ``of``, as a geometric mean, with an interval computed on logarithms.

    Attributes:
        contrast: what is compared.
        where: the labels of the other axes; of a pooled line, none.
        cells: cells that the line rests on.
        cells_compared: all cells that the contrast has; above 1 for a pooled line.
        pairs: seeds that the mean is over.
        mean: None if there are no pairs, or bounds in both directions.
        low: lower end of the 95% interval; None for a single pair, for pairs that are all equal, and where
            the mean is an upper bound.
        high: upper end; None for such pairs, and where the mean is a lower bound.
        bound: "at least" if in some pair ``against`` never reached the accuracy, so that its number of steps
            stands in (if it diverged: those that were planned); "at most" if ``of`` did not; "bounds in both
            directions"; otherwise "".
        left_out: how many seeds have no pair, by reason.
    """

    contrast: Contrast
    where: dict[str, str]
    cells: int
    cells_compared: int
    pairs: int
    mean: float | None
    low: float | None
    high: float | None
    bound: str
    left_out: dict[str, int]

    @property
    def pooled(self) -> bool:
        """Whether the line is over several cells."""
        return self.cells_compared > 1

    @property
    def agree(self) -> bool:
        """Whether there are several pairs and all are equal, which gives no interval."""
        return self.pairs > 1 and self.mean is not None and self.low is None and self.high is None

    def concerns(self, variant: VariantResult) -> bool:
        """Whether ``variant`` is what is compared here, or one of several."""
        return {self.contrast.axis: self.contrast.of, **self.where}.items() <= variant.labels.items()

    def as_json(self) -> dict[str, Any]:
        """Plain values, the contrast's beside the others."""
        return {**self.contrast._asdict(), **{k: v for k, v in asdict(self).items() if k != "contrast"}}


def differences(report: Report) -> list[Difference]:
    """Every comparison of the recipe: cell by cell, and where several cells have pairs, pooled."""
    found = []
    for contrast in contrasts(report):
        cells = cells_of(report, contrast)
        tables = []
        for cell in cells:
            pairs, left_out = paired(cell, _measure_of(report, contrast, cell))
            tables.append(pairs)
            found.append(_difference(contrast, cell.where, 1, 1, pairs, left_out))
        filled = [pairs for pairs in tables if pairs]
        if len(filled) > 1:
            pairs = pool(filled)
            incomplete = len({seed for table in filled for seed in table}) - len(pairs)
            left_out = ["not in every cell"] * incomplete
            found.append(_difference(contrast, {}, len(filled), len(cells), pairs, left_out))
    return found


def contrasts(report: Report) -> list[Contrast]:
    """The comparisons of the report's recipe; a recipe of an earlier version has none."""
    asked = report.recipe.get("comparisons", [])
    return [Contrast(*(each[field] for field in Contrast._fields)) for each in asked]


def cells_of(report: Report, contrast: Contrast) -> list[Cell]:
    """Every combination of the other axes' labels at which both variants are there."""
    found = []
    for of in report.variants:
        if of.labels.get(contrast.axis) != contrast.of:
            continue
        wanted = {**of.labels, contrast.axis: contrast.against}
        where = {axis: label for axis, label in of.labels.items() if axis != contrast.axis}
        found += [Cell(where, of, other) for other in report.variants if other.labels == wanted]
    return found


def paired(
    cell: Cell, measure: Callable[[RunResult, RunResult], Pair | str]
) -> tuple[dict[int, Pair], list[str]]:
    """Pairs by seed, and for every seed without one the reason, as ``measure`` gives it."""
    others = {run.seed: run for run in cell.against.runs}
    measured = {run.seed: measure(run, others[run.seed]) for run in cell.of.runs if run.seed in others}
    pairs = {seed: found for seed, found in measured.items() if isinstance(found, Pair)}
    return pairs, [found for found in measured.values() if isinstance(found, str)]


def pool(tables: Sequence[dict[int, Pair]]) -> dict[int, Pair]:
    """Per seed the mean over cells; a seed without a pair in every one of them is left out."""
    shared = sorted(set.intersection(*map(set, tables)))
    rows = {seed: [table[seed] for table in tables] for seed in shared}
    return {seed: Pair(fmean(p.value for p in row), _joint_bound(row)) for seed, row in rows.items()}


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean and the ends of its 95% t interval, which a single value has not."""
    from scipy.special import stdtrit  # the quantile function of Student's t

    mean, count = fmean(values), len(values)
    if count == 1:
        return mean, None, None
    reach = float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count)
    return mean, mean - reach, mean + reach


def _measure_of(
    report: Report, contrast: Contrast, cell: Cell
) -> Callable[[RunResult, RunResult], Pair | str]:
    """How two runs of a cell are compared: a pair, or why there is none."""

    def gap(of: RunResult, against: RunResult) -> Pair | str:
        mine = final_value(report, cell.of, of, contrast.metric)
        theirs = final_value(report, cell.against, against, contrast.metric)
        if mine is not None and theirs is not None:
            return Pair(mine - theirs)
        without = (run.status for run, value in ((of, mine), (against, theirs)) if value is None)
        return next((status for status in without if status != "finished"), "not measured")

    def ratio(of: RunResult, against: RunResult) -> Pair | str:
        mine, theirs = steps_to_99(report, cell.of, of), steps_to_99(report, cell.against, against)
        return _step_ratio(mine or of.status, theirs or against.status)

    return ratio if contrast.metric == STEPS else gap


def _step_ratio(mine: Steps | str, theirs: Steps | str) -> Pair | str:
    """The logarithm of how many times fewer steps the first took to 99%, or the bound that is known of it.

    A run of which nothing is known is its status.
    """
    known = [steps for steps in (mine, theirs) if isinstance(steps, Steps)]
    if not any(steps.reached for steps in known):
        return "neither reached 99%"
    if isinstance(mine, str):
        return mine
    if isinstance(theirs, str):
        return theirs
    if not mine.number or not theirs.number:
        return "no steps taken"
    bound = AT_MOST if not mine.reached else "" if theirs.reached else AT_LEAST
    return Pair(math.log(theirs.number / mine.number), bound)


def _joint_bound(pairs: Iterable[Pair]) -> str:
    """Which way a mean errs."""
    bounds = {pair.bound for pair in pairs} - {""}
    return EITHER if len(bounds) > 1 else next(iter(bounds), "")


def _difference(
    contrast: Contrast,
    where: dict[str, str],
    cells: int,
    cells_compared: int,
    pairs: dict[int, Pair],
    left_out: Sequence[str],
) -> Difference:
    """The mean of ``pairs`` and its interval.

    A mean of lower bounds is below the mean of what they bound, so the lower end of its interval holds for
    that too and the upper end does not; upper bounds the other way round. Bounds are skewed, so that end may
    miss in up to 5 of 100 cases where it would miss in 2.5 otherwise (by simulation with 3 to 10 seeds).
    Pairs that are all equal, as where no run diverged or all of them ended at the same accuracy, would have
    an interval without width; that a few seeds agree does not tell so much, so they have none.
    """
    bound = _joint_bound(pairs.values())
    mean, low, high = None, None, None
    if pairs and bound != EITHER:
        values = [pair.value for pair in pairs.values()]
        mean, low, high = interval(values)
        equal = max(values) - min(values) < EQUAL
        low, high = None if equal or bound == AT_MOST else low, None if equal or bound == AT_LEAST else high
    if contrast.metric == STEPS:
        mean, low, high = (None if value is None else math.exp(value) for value in (mean, low, high))
    return Difference(
        contrast, where, cells, cells_compared, len(pairs), mean, low, high, bound, dict(Counter(left_out))
    )
