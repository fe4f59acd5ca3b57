"""The numbers of a report: every variant aggregated over its seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any

from keyshift.report.outcomes import DIVERGED, ceiling, final_value
from keyshift.report.paired import Difference, contrasts, differences
from keyshift.results import Report, RunResult, VariantResult

Row = dict[str, Any]


def summary_rows(report: Report) -> list[Row]:
    """One dictionary per variant, aggregated over its seeds; plain JSON values, ``None`` where not measured.

    ``final_loss``, ``final_accuracy`` and ``bits_per_byte`` are taken at the last evaluation of every
    *finished* run: mean, sample standard deviation (``None`` for one seed), min, max, number of seeds.
    Where runs end at an accuracy (``until_accuracy``), one above it counts as it, and their losses are from
    different steps: ``None``.
    ``steps_to_90`` and ``steps_to_99`` look at every run whose outcome is known (finished, diverged, or
    reached already): ``median`` counts a run that never got there as later than any step, hence ``None``
    means that at least half of the runs never did; ``min`` and ``max`` are over the ``reached`` ones.
    ``cache_ratio`` compares with the first unshifted GQA variant, from measured bytes where both have them.
    ``scores`` are those of finished runs, by name. ``diverged`` is how many runs did, with Wilson's 95%
    interval of their share, if a comparison of the recipe is of that. ``differences`` are the recipe's
    comparisons in which the variant is what is compared (`Difference`), with pooled lines in the row of every
    variant that they cover.
    """
    reference = reference_variant(report)
    compared = differences(report)
    return [_row(report, variant, reference, compared) for variant in report.variants]


def reference_variant(report: Report) -> VariantResult | None:
    """The first plain GQA variant: what the caches of the others are compared with."""
    plain = (
        variant
        for variant in report.variants
        if variant.config.get("attention", "gqa") == "gqa" and variant.config.get("shift", "none") == "none"
    )
    return next(plain, None)


def score_names(variants: Iterable[VariantResult]) -> list[str]:
    """The scores that finished runs have, in the order in which the task gives them."""
    runs = (run for variant in variants for run in variant.runs if run.status == "finished")
    return list(dict.fromkeys(name for run in runs for name in run.scores))


def tally(
    runs: Iterable[RunResult],
    statuses: Sequence[str] = ("finished", "diverged", "failed", "interrupted", "pending"),
) -> str:
    """How many runs have each of ``statuses``: "2 finished, 1 diverged"."""
    counts: Counter[str] = Counter(run.status for run in runs)
    return ", ".join(f"{counts[status]} {status}" for status in statuses if counts[status])


def _row(
    report: Report, variant: VariantResult, reference: VariantResult | None, compared: Sequence[Difference]
) -> Row:
    finished = [run for run in variant.runs if run.status == "finished"]
    last = [run.curve[-1] for run in finished if run.curve]
    most = ceiling(report, "accuracy")
    ratio, measured = _cache_ratio(variant, reference)
    statuses = {run.status for run in variant.runs}
    return {
        "variant": variant.name,
        "parameters": variant.parameters,
        "shift_parameters": variant.shift_parameters,
        "seeds_finished": len(finished),
        "seeds_total": len(variant.runs),
        "steps": max((run.steps for run in finished), default=None),
        "steps_to_90": _steps_to(variant.runs, 0.90),
        "steps_to_99": _steps_to(variant.runs, 0.99),
        "final_loss": None if math.isfinite(most) else _spread(point.loss for point in last),
        "final_accuracy": _spread(final_value(report, variant, run, "accuracy") for run in finished),
        "bits_per_byte": _spread(point.bits_per_byte for point in last),
        "diverged": _diverged(report, variant),
        "scores": {
            name: _spread(run.scores.get(name) for run in finished) for name in score_names([variant])
        },
        "differences": [difference.as_json() for difference in compared if difference.concerns(variant)],
        "cache_bytes_per_token_predicted": variant.cache_bytes_per_token,
        "cache_bytes_per_token_measured": variant.cache_bytes_per_token_measured,
        "cache_ratio": ratio,
        "cache_ratio_measured": measured,
        "cache_ratio_to": reference.name if reference else None,
        "decode_ms_per_token": _median(run.decode_ms_per_token for run in variant.runs),
        "train_tokens_per_second": _median(run.train_tokens_per_second for run in variant.runs),
        "status": tally(variant.runs) if len(statuses) > 1 else next(iter(statuses), "pending"),
    }


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


def _diverged(report: Report, variant: VariantResult) -> Row | None:
    """How many runs diverged of those whose end is known; None if there are none, or no comparison asks."""
    if all(contrast.metric != DIVERGED for contrast in contrasts(report)):
        return None
    known = [
        value for run in variant.runs if (value := final_value(report, variant, run, DIVERGED)) is not None
    ]
    if not known:
        return None
    from scipy.stats import binomtest

    count = round(sum(known))
    low, high = binomtest(count, len(known)).proportion_ci(method="wilson")
    return {"runs": count, "of": len(known), "low": float(low), "high": float(high)}


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _median(values: Iterable[float | None]) -> float | None:
    finite = _finite(values)
    return median(finite) if finite else None


def _spread(values: Iterable[float | None]) -> Row | None:
    finite = _finite(values)
    if not finite:
        return None
    low, high = min(finite), max(finite)
    return {
        "mean": min(max(fmean(finite), low), high),  # rounding can put the mean of equal numbers outside them
        "std": stdev(finite) if len(finite) > 1 else None,
        "min": low,
        "max": high,
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
