"""The report in words: what was measured for each variant, and which runs did not finish."""

from __future__ import annotations

from collections.abc import Sequence

from keyshift.report.formats import as_loss, as_percent, as_range
from keyshift.report.numbers import Row, reference_variant, tally
from keyshift.results import Report

LOST = ("diverged", "failed")
"""How a run ends that gives no final values."""


def sentences(report: Report, rows: Sequence[Row]) -> list[str]:
    """What was measured for each variant, to follow its name; they claim nothing else."""
    reference = reference_variant(report)
    compared = None if reference is None else rows[report.variants.index(reference)]
    return [_sentence(row, report.kind, compared) for row in rows]


def unfinished(report: Report) -> str:
    """How many runs have not ended: "1 interrupted, 2 pending"."""
    return tally(
        (run for variant in report.variants for run in variant.runs), ("failed", "interrupted", "pending")
    )


def lost(report: Report) -> list[str]:
    """A line for every run that diverged or failed."""
    return [
        f"{variant.name}, seed {run.seed}: {run.status} after {run.steps:,} steps"
        + (f" ({run.message})" if run.message else "")
        for variant in report.variants
        for run in variant.runs
        if run.status in LOST
    ]


def lost_in_all(report: Report) -> str:
    """How many runs diverged and failed: "2 diverged, 1 failed"."""
    return tally((run for variant in report.variants for run in variant.runs), LOST)


def _sentence(row: Row, kind: str, reference: Row | None) -> str:
    outcome = _task_outcome(row) if kind == "task" else _text_outcome(row, reference)
    if outcome is None:
        return f"has no finished run yet ({row['status']})."
    others = "" if row["seeds_finished"] == row["seeds_total"] else f" ({row['status']})"
    return outcome + others + ("" if row is reference else _cache_clause(row)) + "."


def _task_outcome(row: Row) -> str | None:
    for threshold, key in (("99%", "steps_to_99"), ("90%", "steps_to_90")):
        steps = row[key]
        if steps is not None and steps["reached"]:
            above = "" if key == "steps_to_99" else ", and 99% in none"
            seeds = _seeds(steps["reached"], steps["of"])
            return f"reached {threshold} held-out accuracy in {seeds}, {_when(steps)}{above}"
    final = row["final_accuracy"]
    if final is None:
        return None
    total = row["steps_to_90"]["of"]
    ended = f"ended at {as_percent(final['mean'])}{_after(row)}"
    return f"stayed below 90% held-out accuracy in {_seeds(total, total)}, and {ended}"


def _seeds(count: int, total: int) -> str:
    return f"{count} of {total} {'seed' if total == 1 else 'seeds'}"


def _when(steps: Row) -> str:
    span = as_range(steps)
    if steps["reached"] == 1 or steps["reached"] < steps["of"]:
        return f"at steps {span}" if span else f"at step {steps['min']:,}"
    return f"median step {steps['median']:,g}" + (f" ({span})" if span else "")


def _after(row: Row) -> str:
    return f" after {row['steps']:,} steps" if row["steps"] else ""


def _text_outcome(row: Row, reference: Row | None) -> str | None:
    loss, bits, accuracy = row["final_loss"], row["bits_per_byte"], row["final_accuracy"]
    if loss is None:
        return None
    error = "" if loss["std"] is None else f" ± {as_loss(loss['std'])}"
    per_byte = "" if bits is None else f" ({as_loss(bits['mean'])} bits per byte)"
    on_task = "" if accuracy is None else f" and an accuracy of {as_percent(accuracy['mean'])} on the task"
    over = f"mean of {loss['seeds']} seeds" if loss["seeds"] > 1 else "one seed"
    value = f"{as_loss(loss['mean'])}{error} nats per token{per_byte}{on_task}"
    text = f"ended at a held-out loss of {value}{_after(row)}, {over}"
    if reference is None or row is reference or reference["final_loss"] is None:
        return text
    return f"{text}, {_difference(loss, reference['final_loss'], reference['variant'])}"


def _difference(loss: Row, other: Row, name: str) -> str:
    gap = loss["mean"] - other["mean"]
    overlap = loss["min"] <= other["max"] and other["min"] <= loss["max"]
    remark = " (the ranges over seeds overlap)" if overlap else ""
    return f"{as_loss(abs(gap))} nats {'above' if gap > 0 else 'below'} {name}{remark}"


def _cache_clause(row: Row) -> str:
    ratio = row["cache_ratio"]
    if ratio is None:
        return ""
    kind = "measured" if row["cache_ratio_measured"] else "predicted"
    if abs(ratio - 1) < 0.005:
        return f", with the same {kind} cache as {row['cache_ratio_to']}"
    much = f"{ratio:.2f} of" if ratio < 1 else f"{ratio:.2f} times"
    return f", with {much} the {kind} cache of {row['cache_ratio_to']}"
