"""The induction-heads machine (KV shifting paper, Definition 1): what both constructions have to compute."""

from __future__ import annotations

import torch
from torch import Tensor

TEMPERATURE = 8**0.5
SLOPE = 0.1
"""Of the machine that both constructions are compared with."""


def induction_heads(x_LD: Tensor, temperature: float, slope: float) -> Tensor:
    """IH(x) = Σ_{s=2}^{L-1} softmax(x_L · x_{s-1} / σ - m |L - s|) x_s, a vector of width D.

    Args:
        x_LD: the sequence, at least 3 tokens.
        temperature: σ.
        slope: m.
    """
    length = len(x_LD)
    distance = length - torch.arange(2, length, dtype=x_LD.dtype)  # L - s, places counted from 1
    scores = x_LD[:-2] @ x_LD[-1] / temperature - slope * distance
    return scores.softmax(0) @ x_LD[1:-1]


def sequences(count: int = 16, width: int = 8) -> list[Tensor]:
    """Random sequences of 4 to 64 tokens, entries in [-1, 1]: the theorem's norm is over bounded ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 65, (count,), generator=generator).tolist()
    return [torch.rand(length, width, dtype=torch.float64, generator=generator) * 2 - 1 for length in lengths]
