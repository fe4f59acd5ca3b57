"""L(N) = E + A N^-a fitted to losses, with intervals from the spread of seeds.

Fitted as by Hoffmann et al. (2022, section 3.3) in the logarithm of the loss, E and A by their logarithms,
from several starts; but with squares, not their Huber loss at 0.001: that takes what is more than a
thousandth off for an outlier, and most seeds of a small model are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyshift.scaling.results import Estimate, Law, Size

FEWEST = 4
"""Sizes that a law with a floor needs: one more than it has numbers."""

DRAWS = 400
"""Bootstrap samples."""

POINTS = 41
"""Of the band, evenly over the logarithm of N."""

NORMAL = 1.959964
"""The quantile that 2.5% of a normal distribution lie above."""

FLOORS = (0.0, 0.5, 0.9)
EXPONENTS = (0.05, 0.3, 1.0)
"""The starts of a fit: E as a share of the smallest loss, and a."""

Array = NDArray[np.float64]


class Numbers(NamedTuple):
    """A law: log E (-inf for none), log A, a."""

    log_floor: float
    log_scale: float
    exponent: float

    def log_loss(self, log_sizes: Array) -> Array:
        return np.logaddexp(self.log_floor, self.log_scale - self.exponent * log_sizes)


def fit(sizes: Sequence[Size], draws: int = DRAWS, seed: int = 0) -> Law:
    """The law of sizes with at least one loss each; with a floor if there are `FEWEST` of them or more.

    Intervals are of the bootstrap over seeds: losses are drawn again as their size's mean and the relative
    deviation of some seed, of any size, since a size's own are too few to draw from; each is spread by
    √(n / (n - 1)), for what the mean of n takes away. The quantiles are moved out as far as Student's t is
    wider than a normal distribution. None where no size has two seeds.

    Args:
        sizes: at least two, of different parameters.
        draws: bootstrap samples; ``seed`` is theirs.
    """
    log_sizes = [np.full(len(size.losses), np.log(size.parameters)) for size in sizes]
    log_losses = [np.log(size.losses) for size in sizes]
    floored = len(sizes) >= FEWEST
    solve = _with_floor if floored else _power_law
    numbers, error = solve(np.concatenate(log_sizes), np.concatenate(log_losses), None)
    grid = np.linspace(log_sizes[0][0], log_sizes[-1][0], POINTS)
    rows = _drawn_again(log_sizes, log_losses, solve, numbers, draws, seed)
    freedom = sum(len(losses) - 1 for losses in log_losses)

    def estimate(value: float, values: Array, least: float = -np.inf) -> Estimate:
        if not rows:
            return Estimate(value=value)
        low, high = _interval(value, values, freedom)
        return Estimate(value=value, low=max(low, least), high=high)

    drawn = np.array(rows).reshape(-1, 3)
    losses = np.exp([row.log_loss(grid) for row in rows]).reshape(-1, POINTS)
    ends = map(estimate, np.exp(numbers.log_loss(grid)), losses.T)
    return Law(
        kind="offset" if floored else "power",
        floor=estimate(np.exp(numbers.log_floor), np.exp(drawn[:, 0]), 0.0) if floored else None,
        scale=estimate(np.exp(numbers.log_scale), np.exp(drawn[:, 1]), 0.0),
        exponent=estimate(numbers.exponent, drawn[:, 2]),
        error=error,
        band=[(float(np.exp(x)), end.value, end.low, end.high) for x, end in zip(grid, ends, strict=True)],
    )


def _drawn_again(
    log_sizes: Sequence[Array],
    log_losses: Sequence[Array],
    solve: Callable[[Array, Array, Numbers | None], tuple[Numbers, float]],
    numbers: Numbers,
    draws: int,
    seed: int,
) -> list[Numbers]:
    """The laws of losses drawn again; none where no size has two seeds, and nobody knows their spread."""
    several = [losses for losses in log_losses if len(losses) > 1]
    if not several:
        return []
    spread = [(each - each.mean()) * np.sqrt(len(each) / (len(each) - 1)) for each in several]
    deviations = np.concatenate(spread)
    means = np.concatenate([np.full(len(losses), losses.mean()) for losses in log_losses])
    random, at = np.random.default_rng(seed), np.concatenate(log_sizes)
    return [solve(at, means + random.choice(deviations, len(at)), numbers)[0] for _ in range(draws)]


def _interval(value: float, values: Array, freedom: int) -> tuple[float, float]:
    from scipy.stats import t

    low, high = np.quantile(values, (0.025, 0.975))
    wider = float(t.ppf(0.975, freedom)) / NORMAL
    return value - (value - float(low)) * wider, value + (float(high) - value) * wider


def _power_law(log_sizes: Array, log_losses: Array, start: Numbers | None) -> tuple[Numbers, float]:
    """The least squares of a straight line in logarithms; ``start`` is not needed."""
    away = log_sizes - log_sizes.mean()
    slope = float(away @ log_losses / (away @ away))
    numbers = Numbers(-np.inf, float(log_losses.mean()) - slope * float(log_sizes.mean()), -slope)
    return numbers, float(np.sqrt(np.mean((numbers.log_loss(log_sizes) - log_losses) ** 2)))


def _with_floor(log_sizes: Array, log_losses: Array, start: Numbers | None) -> tuple[Numbers, float]:
    """The best of several starts; of the one that is given, if there is one."""
    from scipy.optimize import least_squares

    middle, least = float(log_sizes.mean()), float(log_losses.min())
    lower, upper = np.array([least - 20, least - 20, 0.0]), np.array([least, least + 20, 20.0])

    def residuals(at: Array) -> Array:
        return np.logaddexp(at[0], at[1] - at[2] * (log_sizes - middle)) - log_losses

    def slopes(at: Array) -> Array:
        falling = at[1] - at[2] * (log_sizes - middle)
        share = 1 / (1 + np.exp(np.clip(at[0] - falling, -700, 700)))  # of the part that falls
        return np.stack((1 - share, share, -share * (log_sizes - middle)), axis=1)

    if start is None:
        starts = [
            (least + np.log(max(floor, 1e-6)), log_losses.mean() + np.log(1 - floor), exponent)
            for floor, exponent in product(FLOORS, EXPONENTS)
        ]
    else:
        starts = [(start.log_floor, start.log_scale - start.exponent * middle, start.exponent)]
    tries = [
        least_squares(
            residuals, np.clip(each, lower + 1e-9, upper - 1e-9), slopes, bounds=(lower, upper), xtol=1e-10
        )
        for each in starts
    ]
    best = min(tries, key=lambda found: found.cost)
    log_floor, height, exponent = map(float, best.x)
    numbers = Numbers(log_floor, height + exponent * middle, exponent)
    return numbers, float(np.sqrt(np.mean(best.fun**2)))
