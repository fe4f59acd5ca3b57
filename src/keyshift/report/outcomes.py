"""What one run came to, in each metric, as everything that compares or averages runs counts it."""

from __future__ import annotations

import math
from typing import NamedTuple

from keyshift.recipe import build_task
from keyshift.report.labels import settings_of
from keyshift.results import Report, RunResult, VariantResult

STEPS = "steps_to_99"
"""The metric that is compared as a ratio."""

DIVERGED = "diverged"
"""The metric that is 1 for a run that diverged, or ended worse than knowing nothing, and 0 for any other."""


class Steps(NamedTuple):
    """Steps to 99%: those that it took, or where it was not ``reached`` how many there were to do it in."""

    number: int
    reached: bool


def ceiling(report: Report, metric: str) -> float:
    """The most that counts of ``metric``; infinity where there is no such limit.

    Where runs end at an accuracy, by how much the last evaluation is above it says when it was made and
    nothing about the model, while runs that never got there are trained to the end.
    """
    if metric != "accuracy":
        return math.inf
    ends = (settings_of(report, variant, "training").get("until_accuracy") for variant in report.variants)
    return min((end for end in ends if end is not None), default=math.inf)


def ceiling_remark(report: Report, metric: str = "accuracy") -> str:
    """`ceiling` in a sentence: "Runs end at 99% and count as 99%."; "" where there is none."""
    most = ceiling(report, metric)
    return f"Runs end at {100 * most:g}% and count as {100 * most:g}%." if math.isfinite(most) else ""


def final_value(report: Report, variant: VariantResult, run: RunResult, metric: str) -> float | None:
    """Loss or accuracy at the last evaluation of a finished run, one of its scores, or whether it diverged.

    Not for steps to 99%, which may be bounds: see `steps_to_99`.
    """
    if metric == DIVERGED:
        return _diverged(report, variant, run)
    if run.status != "finished":
        return None
    if metric in ("loss", "accuracy"):
        value = getattr(run.curve[-1], metric) if run.curve else None
    else:
        value = run.scores.get(metric)
    return min(value, ceiling(report, metric)) if value is not None and math.isfinite(value) else None


def steps_to_99(report: Report, variant: VariantResult, run: RunResult) -> Steps | None:
    """How soon a run reached 99%; None if it was cut off and still might have.

    A run that diverged was to be trained for as long as the others: that it did not last is no merit.
    """
    taken = run.steps_to(0.99)
    if taken is not None:
        return Steps(taken, True)
    if run.status == "finished":
        return Steps(run.steps, False)
    return Steps(_planned(report, variant), False) if run.status == "diverged" else None


def _planned(report: Report, variant: VariantResult) -> int:
    """The steps that runs of ``variant`` are trained; what they came to, where the recipe does not say."""
    longest = max((run.steps for run in variant.runs), default=0)
    return int(settings_of(report, variant, "training").get("steps", longest))


def _diverged(report: Report, variant: VariantResult, run: RunResult) -> float | None:
    if run.status == "diverged":
        return 1.0
    if run.status != "finished" or not run.curve:
        return None
    return float(not run.curve[-1].loss <= _loss_of_guessing(report, variant))  # so that NaN counts as 1


def _loss_of_guessing(report: Report, variant: VariantResult) -> float:
    """Nats per token of calling every token of the vocabulary equally likely."""
    size = report.data.get("vocab_size")  # of text; a task that is mixed with it has the same
    if size is None:
        task = settings_of(report, variant, "task")
        size = task.get("vocab_size") or build_task(task).vocab_size
    return math.log(size)
