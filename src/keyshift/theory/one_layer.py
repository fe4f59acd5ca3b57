"""Theorem 2: one layer with shifted keys is the induction-heads machine, exactly, on the same support.

α = (0, 1), β = (1, 0), identity projections, ALiBi slope m, the temperature in the scores. Shapes: L tokens,
D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyshift.theory.handmade import causal, frame_of, handmade, matched
from keyshift.theory.machine import SLOPE, TEMPERATURE, induction_heads, sequences
from keyshift.theory.results import ShiftedError

SEQUENCES = 100


def shifted_keys(x_LD: Tensor, visible_LL: Tensor, beta_1: float = 1.0) -> Tensor:
    """KVSA(x), width D: the last token's output of the layer."""
    eye = torch.eye(x_LD.shape[1]).double()
    layer = handmade(eye / TEMPERATURE, eye, eye, alpha=(0.0, 1.0), beta=(beta_1, 0.0))
    return layer(x_LD[None], frame_of(visible_LL, SLOPE))[0][0, -1]


@torch.no_grad()
def shifted_errors(count: int = SEQUENCES) -> list[ShiftedError]:
    """How far the layer is from Definition 1 on random sequences, in the largest coordinate."""
    found = []
    for x in sequences(count):
        wanted = induction_heads(x, TEMPERATURE, SLOPE)
        same = shifted_keys(x, matched(len(x)))
        ordinary = shifted_keys(x, causal(len(x)))
        scaled = shifted_keys(x, matched(len(x)), beta_1=1 / TEMPERATURE)
        found.append(
            ShiftedError(
                length=len(x),
                matched=float((same - wanted).abs().max()),
                causal=float((ordinary - wanted).abs().max()),
                scaled=float((scaled - wanted).abs().max()),
                rescaled=float((scaled * TEMPERATURE - wanted).abs().max()),
            )
        )
    return found
