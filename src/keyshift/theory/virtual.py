"""Property 1: through two causal attention matrices a token is reached only by way of itself or later ones.

(A₂ A₁)_{j,i+1} = Σ_{k=i+1}^{j} A₂_{j,k} A₁_{k,i+1} (KV shifting paper, section 2.1). Shapes: N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """What was found on random causal matrices.

    Attributes:
        difference: between the product and the short sum, the largest.
        outside: the largest term with k <= i or k > j.
        entries: how many (i, j) were looked at.
    """

    difference: float
    outside: float
    entries: int


def random_pattern(tokens: int, generator: torch.Generator) -> Tensor:
    """A causal attention matrix [N, N] with random scores, float64."""
    scores = 2 * torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def reach(sizes: range = range(2, 25)) -> Reach:
    """The property on one random pair of matrices per size."""
    generator = torch.Generator().manual_seed(0)
    found = [_reach(random_pattern(n, generator), random_pattern(n, generator)) for n in sizes]
    return Reach(
        max(each.difference for each in found),
        max(each.outside for each in found),
        sum(each.entries for each in found),
    )


def _reach(second_NN: Tensor, first_NN: Tensor) -> Reach:
    tokens = len(first_NN)
    product = second_NN @ first_NN
    difference, outside = 0.0, 0.0
    for i in range(tokens - 1):
        for j in range(i, tokens):
            terms = second_NN[j] * first_NN[:, i + 1]
            inside = float(terms[i + 1 : j + 1].sum())
            difference = max(difference, abs(float(product[j, i + 1]) - inside))
            outside = max(outside, float(terms[: i + 1].max()), float(terms[j + 1 :].sum()))
    return Reach(difference, outside, (tokens - 1) * (tokens + 2) // 2)
