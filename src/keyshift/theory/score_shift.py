"""Decoding with a raw cache: the shift acts on scores and weights instead of on keys and values.

Σ_m α_m k_{j-m}, rotated, meets q as score_ij = Σ_m α_m (R_{i-m} q_i) · κ_{j-m}, with κ_j = R_j k_j as cached;
and o_i = Σ_j (Σ_m β_m p_{i,j+m}) v_j. Nothing crosses the start of a sequence or of a packed document.
Shapes: B batch, T tokens, H heads, D width, W window. float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyshift.attention.frame import locate
from keyshift.attention.rotary import rotate, rotation
from keyshift.attention.shift import shift_sequence
from keyshift.theory.decoded import decode_difference, drawn_layer

TOKENS = 24
THETA = 10_000.0
# Two sequences: one with left padding of 5, one of packed documents of 9, 1 and 14 tokens.
PADDING = torch.tensor([[0] * 5 + [1] * 19, [1] * 24])
DOCUMENTS = torch.tensor([[0] * 24, [0] * 9 + [1] + [2] * 14])
WINDOWS = (2, 3, 4)
CASES: dict[str, dict[str, Any]] = {
    "whole-head RoPE": {"attention": "gqa", "position": "rope"},
    "one stream of values": {"attention": "gva", "position": "decoupled_rope"},
    "one latent": {"attention": "mla", "position": "decoupled_rope", "num_key_value_heads": None},
}


def scores_by_keys(queries: Tensor, keys: Tensor, weights_HW: Tensor, starts_BT: Tensor) -> Tensor:
    """Shift the keys, rotate, multiply: the definition, [B, H, T, T]."""
    positions = torch.arange(queries.shape[1]) - starts_BT
    turn = rotation(positions, queries.shape[-1], THETA, queries.dtype)
    shifted = rotate(shift_sequence(keys, weights_HW, starts_BT), turn)
    return torch.einsum("bihd,bjhd->bhij", rotate(queries, turn), shifted)


def scores_by_queries(queries: Tensor, keys: Tensor, weights_HW: Tensor, starts_BT: Tensor) -> Tensor:
    """Rotate the raw keys once; turn the query m places back and shift its scores, [B, H, T, T]."""
    slots = torch.arange(queries.shape[1])
    positions = slots - starts_BT
    cached = rotate(keys, rotation(positions, keys.shape[-1], THETA, keys.dtype))
    total = torch.zeros_like(keys[..., 0, 0])[:, None, :, None]
    for back in range(weights_HW.shape[1]):
        turned = rotate(queries, rotation(positions - back, queries.shape[-1], THETA, queries.dtype))
        raw = torch.einsum("bihd,bjhd->bhij", turned, cached).roll(back, dims=-1)
        reached = slots - back >= starts_BT  # the token m places back is of the same document
        total = total + weights_HW[:, back, None, None] * raw * reached[:, None, None]
    return total


def score_difference(window: int) -> float:
    """Largest difference of the two where a query may look, relative to the largest score."""
    generator = torch.Generator().manual_seed(window)
    queries, keys = torch.randn(2, 2, TOKENS, 2, 16, dtype=torch.float64, generator=generator)
    weights = torch.randn(2, window, dtype=torch.float64, generator=generator)
    starts = document_starts()
    slots = torch.arange(TOKENS)
    seen = (slots <= slots[:, None]) & (slots >= starts[:, :, None]) & PADDING.bool()[:, :, None]
    by_keys, by_queries = (
        side(queries, keys, weights, starts).masked_fill(~seen[:, None], 0.0)
        for side in (scores_by_keys, scores_by_queries)
    )
    return float((by_keys - by_queries).abs().max() / by_keys.abs().max())


def document_starts() -> Tensor:
    """The slot at which each token's document or padded sequence starts, [B, T]."""
    where = locate(2, TOKENS, 0, device=PADDING.device, attention_mask=PADDING, document_ids=DOCUMENTS)
    starts = where[1]
    return PADDING * 0 if starts is None else starts


def output_difference(case: str, window: int) -> float:
    """A layer of this package: decoded from its raw cache against the shifted sequence; relative."""
    layer = drawn_layer(window, **CASES[case], shift="kv", shift_window=window)
    return decode_difference(layer, TOKENS, PADDING, DOCUMENTS)
