"""Theorem 3 by simulation: random embeddings of finite width d, whose loss tends to the limit as d grows.

Shapes: T tokens of the vocabulary, L = T + 1 positions, d width. float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keyshift.theory.learning import Weights, limit_loss
from keyshift.theory.results import SimulatedLoss
from keyshift.theory.uncertainty import Estimate, confidence, standard_error

TOKENS = 8
PLACES = (1, 4, 7, 8)
WIDTHS = (1_000, 10_000, 100_000, 200_000)
DRAWS = 24
SAMPLES = {
    "in the unit square": Weights(0.2, 0.8, 0.3, 0.7),
    "free": Weights(-1.0, 3.0, 0.5, 2.5),
}
"""Weights to try: as they may start, and as they may become, since nothing binds them to [0, 1]."""


def random_gram(tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """Inner products [T, T] of embeddings whose components are drawn from N(0, 1/d)."""
    embeddings = torch.randn(tokens, width, dtype=torch.float64, generator=generator)
    return embeddings @ embeddings.T / width


def finite_loss(gram_TT: Tensor, weights: Weights, place: int) -> float:
    """The loss for these embeddings, which enter by their inner products only."""
    alpha_1, alpha_2, beta_1, beta_2 = weights
    sequence = torch.tensor([*range(len(gram_TT)), place - 1])
    products = gram_TT[place - 1, sequence]  # of the query with every position's token
    attention = (alpha_1 * products + alpha_2 * _one_later(products)).softmax(0)
    flow = beta_1 * attention + beta_2 * _one_earlier(attention)  # how much of each position's token is read
    logits = flow @ gram_TT[sequence]
    return float(logits.logsumexp(0) - logits[sequence[place]])


def _one_later(x_L: Tensor) -> Tensor:
    return torch.cat((x_L.new_zeros(1), x_L[:-1]))


def _one_earlier(x_L: Tensor) -> Tensor:
    return torch.cat((x_L[1:], x_L.new_zeros(1)))


def simulate(widths: Sequence[int] = WIDTHS, draws: int = DRAWS) -> list[SimulatedLoss]:
    """Every sample at every place and width, on the same embeddings."""
    generator = torch.Generator().manual_seed(0)
    grams = {width: [random_gram(TOKENS, width, generator) for _ in range(draws)] for width in widths}
    return [
        SimulatedLoss(
            weights=name,
            place=place,
            width=width,
            losses=[finite_loss(gram, weights, place) for gram in grams[width]],
            formula=limit_loss(weights, TOKENS, place),
            printed=limit_loss(weights, TOKENS, place, printed=True),
        )
        for name, weights in SAMPLES.items()
        for place in PLACES
        for width in widths
    ]


def gap(found: SimulatedLoss, *, printed: bool = False) -> Estimate:
    """Simulated loss minus the formula, with its standard error."""
    formula = found.printed if printed else found.formula
    return standard_error([loss - formula for loss in found.losses])


def fitted_rate(found: Sequence[SimulatedLoss]) -> Estimate:
    """d log |deviation| / d log d by regression over widths; expected -1/2.

    One regression per draw, on logs averaged over samples and places, which share their embeddings; the mean
    over draws with a 95% confidence interval.
    """
    import numpy as np
    from scipy import stats

    widths = sorted({each.width for each in found})
    deviations = [
        [np.abs(np.array(each.losses) - each.formula) for each in found if each.width == width]
        for width in widths
    ]
    logs = np.log(deviations).mean(axis=1)  # [width, draw]
    return confidence([float(stats.linregress(np.log(widths), curve).slope) for curve in logs.T])
