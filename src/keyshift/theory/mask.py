"""A mask that multiplies scores, as eq. 6 of the KV shifting paper writes it, hides nothing.

Softmax(Q K^T · M / σ) with M of 0 and 1 turns a future token's score into 0, and exp(0) = 1. N tokens.
"""

from __future__ import annotations

import torch


def future_share(tokens: int = 64) -> float:
    """The mean share of attention on future tokens under such a mask, for scores drawn from N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, tokens, tokens, dtype=torch.float64, generator=generator)
    mask = torch.ones(tokens, tokens, dtype=torch.float64).tril()
    weights = (scores * mask).softmax(-1)
    return float((weights * (1 - mask)).sum(-1).mean())
