"""A measured number and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over independent draws, and its uncertainty."""

    value: float
    error: float
    draws: int


def standard_error(values: Sequence[float]) -> Estimate:
    """The mean with its standard error."""
    import numpy as np

    data = np.asarray(values, dtype=float)
    return Estimate(float(data.mean()), float(data.std(ddof=1) / len(data) ** 0.5), len(data))


def confidence(values: Sequence[float]) -> Estimate:
    """The mean with half the width of its 95% confidence interval (Student's t)."""
    from scipy import stats

    mean, error, draws = standard_error(values)
    return Estimate(mean, float(stats.t.ppf(0.975, draws - 1)) * error, draws)
