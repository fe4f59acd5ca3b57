"""The numbers of an evaluation: every model's scores over its seeds, in papers' columns and one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from keyshift.evaluation.paper_tables import Column, PaperTable
from keyshift.evaluation.results import SHARES, EvalReport, Score
from keyshift.report.paired import EQUAL, interval


class Mean(NamedTuple):
    """A mean over seeds and the ends of its 95% t interval; one seed, or equal ones, have none."""

    value: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def reach(self) -> float | None:
        """Half the interval's width."""
        return None if self.high is None else self.high - self.value


def mean_of(values: Sequence[float]) -> Mean | None:
    """The mean and its interval; None without values."""
    if not values:
        return None
    mean, low, high = interval(values)
    equal = max(values) - min(values) < EQUAL
    return Mean(mean, None if equal else low, None if equal else high, len(values))


def paper_rows(report: EvalReport, table: PaperTable) -> dict[str, list[Mean | None]]:
    """A row per model: the means of a table's columns, then their average if the table has one, in percent.

    The average is taken seed by seed, over all columns, so that its interval is that of seeds.
    """
    rows = {}
    for model, checkpoints in report.models.items():
        grid = [[_cell(report, model, name, column) for column in table.columns] for name in checkpoints]
        columns = [[value for value in column if value is not None] for column in zip(*grid, strict=True)]
        row = [mean_of(column) for column in columns]
        if table.average:
            whole = [line for line in grid if None not in line]
            row.append(mean_of([fmean(value for value in line if value is not None) for line in whole]))
        rows[model] = row
    return rows


def _cell(report: EvalReport, model: str, checkpoint: str, column: Column) -> float | None:
    for score in report.scores:
        where = (score.model, score.checkpoint, score.task, score.metric)
        if where == (model, checkpoint, column.task, column.metric) and column.shots in (None, score.shots):
            return 100 * score.value
    return None


def summary(report: EvalReport) -> list[dict[str, Any]]:
    """One dictionary per model, task and metric, of plain JSON values: the mean over seeds, the ends of its
    95% t interval (None for one seed), every seed's value, and what was truncated."""
    rows = []
    for scores in _grouped(report.scores):
        first = scores[0]
        mean = mean_of([score.value for score in scores])
        assert mean is not None
        rows.append(
            {
                "model": first.model,
                "task": first.task,
                "part_of": first.part_of,
                "shots": first.shots,
                "metric": first.metric,
                "mean": mean.value,
                "low": mean.low,
                "high": mean.high,
                "seeds": mean.seeds,
                "values": {score.checkpoint: score.value for score in scores},
                "errors": {score.checkpoint: score.error for score in scores},
                "questions": first.questions,
                "requests": sum(score.requests for score in scores),
                "truncated": sum(score.truncated for score in scores),
            }
        )
    return rows


def _grouped(scores: Iterable[Score]) -> list[list[Score]]:
    """Scores of one model, task and metric together, tasks first."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Score]]] = {}
    for score in scores:
        what = (score.task, score.shots, score.metric)
        groups.setdefault(what, {}).setdefault((score.model,), []).append(score)
    return [found for group in groups.values() for found in group.values()]


def detail(report: EvalReport) -> list[dict[str, Any]]:
    """The rows of `summary` that tables show: no parts of groups, no single depths of keys."""
    return [row for row in summary(report) if row["part_of"] is None and "depth" not in row["metric"]]


def truncation(report: EvalReport) -> list[str]:
    """A line per task some of whose requests were cut."""
    whole = (score for score in report.scores if score.part_of is None)
    seen = {(score.task, score.shots, score.checkpoint): score for score in whole}
    counts: dict[tuple[str, int | None], list[int]] = {}
    for (task, shots, _), score in seen.items():
        count = counts.setdefault((task, shots), [0, 0])
        count[0] += score.truncated
        count[1] += score.requests
    return [
        f"{named(task, shots)}: {cut:,} of {asked:,} requests were cut at their beginning"
        for (task, shots), (cut, asked) in counts.items()
        if cut
    ]


def named(task: str, shots: int | None) -> str:
    """The task and how many examples its prompt has."""
    return f"{task}, {shots}-shot" if shots else task


def number(row: dict[str, Any], value: float) -> str:
    """A score as tables show it: shares in percent, everything else to four digits."""
    return f"{100 * value:.2f}%" if row["metric"].split()[0] in SHARES else f"{value:.4g}"
