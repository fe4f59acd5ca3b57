"""How flat attention is at a given scale of queries and keys (GVA paper, appendix A, figures 4 and 5).

Var(q · k / sqrt(d)) ≈ σ_Q² σ_K² for centred, independent entries. Shapes: N keys, d width. float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from keyshift.theory.results import LogitScale
from keyshift.theory.uncertainty import Estimate, standard_error

WIDTH = 64
KEYS = 256
QUERIES = 200
SCALES = tuple(2.0**power for power in range(-4, 4))
"""σ_Q and σ_K, each and together: from flat to one position only."""


def entropy_share(weights_QN: Tensor) -> Tensor:
    """Entropy of each row over ln N: 1 for even attention, 0 for one position, [Q]."""
    return torch.special.entr(weights_QN).sum(-1) / math.log(weights_QN.shape[-1])


def logit_scale(query_scale: float, key_scale: float, seed: int = 0) -> LogitScale:
    """Random queries of σ_Q, each with its own keys of σ_K: the variance of its logits, and its softmax."""
    generator = torch.Generator().manual_seed(seed)
    queries = query_scale * torch.randn(QUERIES, WIDTH, dtype=torch.float64, generator=generator)
    keys = key_scale * torch.randn(QUERIES, KEYS, WIDTH, dtype=torch.float64, generator=generator)
    logits = torch.einsum("qd,qnd->qn", queries, keys) / WIDTH**0.5
    weights = logits.softmax(-1)
    variance = standard_error(logits.square().mean(-1).tolist())
    entropy = standard_error(entropy_share(weights).tolist())
    top = standard_error(weights.max(-1).values.tolist())
    return LogitScale(
        query_scale=query_scale,
        key_scale=key_scale,
        variance=variance.value,
        variance_error=variance.error,
        entropy=entropy.value,
        entropy_error=entropy.error,
        top=top.value,
        top_error=top.error,
    )


def sweep() -> list[LogitScale]:
    """Keys alone at σ_Q = 1 (figure 4), then both together (figure 5)."""
    alone, together = ((1.0, scale) for scale in SCALES), ((scale, scale) for scale in SCALES)
    return [logit_scale(*pair, seed) for seed, pair in enumerate((*alone, *together))]


def variance_ratio(found: Sequence[LogitScale]) -> Estimate:
    """Measured variance over σ_Q² σ_K², over the draws of all scales; expected 1."""
    return standard_error([each.variance / (each.query_scale * each.key_scale) ** 2 for each in found])
