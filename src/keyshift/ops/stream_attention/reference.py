"""The definition of `stream_attention`, in plain PyTorch. Every backend is checked against it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

MAX_SCORES = 1 << 24
"""How many scores are held at once; more queries than that are taken in blocks, so that memory stays
bounded."""


def stream_attention_reference(
    queries: Tensor,
    keys_BGTS: Tensor,
    values_BGTV: Tensor,
    *,
    first_slot: int,
    scale: float,
    starts_BQ: Tensor | None,
    rope_queries_BHQR: Tensor | None,
    rope_keys_BTR: Tensor | None,
    key_weights_HW: Tensor | None,
    value_weights_HW: Tensor | None,
    slopes_H: Tensor | None,
) -> Tensor:
    """See `keyshift.ops.stream_attention.api.stream_attention`."""
    batch, heads, new = queries.shape[0], queries.shape[1], queries.shape[-2]
    steps = queries.shape[2] if queries.dim() == 5 else 1
    block = max(1, MAX_SCORES // (batch * heads * steps * keys_BGTS.shape[2]))
    outputs = []
    for begin in range(0, new, block):
        part = slice(begin, begin + block)
        visible = _visible(queries, keys_BGTS.shape[2], first_slot, starts_BQ, part)
        scores = _content_scores(queries[..., part, :], keys_BGTS, key_weights_HW, starts_BQ, part)
        if rope_queries_BHQR is not None and rope_keys_BTR is not None:
            scores = scores + _grouped(rope_queries_BHQR[:, :, part], rope_keys_BTR[:, None])
        scores = _promote(scores) * scale
        if slopes_H is not None:
            scores = scores - slopes_H.to(scores)[:, None, None] * _distance(scores, first_slot + begin)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        if value_weights_HW is not None:
            weights = _value_flow(weights, value_weights_HW) * visible
        outputs.append(_grouped_sum(weights.to(values_BGTV.dtype), values_BGTV))
    return torch.cat(outputs, dim=2).to(queries.dtype)


def _promote(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def _distance(scores: Tensor, first_slot: int) -> Tensor:
    """How many tokens lie between each query and each slot, [Q, T]."""
    slots = torch.arange(scores.shape[-1], device=scores.device)
    own = torch.arange(first_slot, first_slot + scores.shape[-2], device=scores.device)
    return own[:, None] - slots


def _visible(queries: Tensor, total: int, first_slot: int, starts_BQ: Tensor | None, part: slice) -> Tensor:
    """Which slots each query of the block may see, [B or 1, 1, Q, T]."""
    slots = torch.arange(total, device=queries.device)
    own = torch.arange(first_slot, first_slot + queries.shape[-2], device=queries.device)[part]
    visible = (slots <= own[:, None])[None]
    if starts_BQ is not None:
        visible = visible & (slots >= starts_BQ[:, part, None])
    return visible[:, None]


def _content_scores(
    queries: Tensor, keys_BGTS: Tensor, weights_HW: Tensor | None, starts_BQ: Tensor | None, part: slice
) -> Tensor:
    """Σ_m a_m q · k_{j-m}, [B, H, Q, T]."""
    if queries.dim() == 5:
        steps = [_grouped(queries[:, :, back], keys_BGTS) for back in range(queries.shape[2])]
        weights = None
    else:
        raw = _grouped(queries, keys_BGTS)
        steps = [raw] * (1 if weights_HW is None else weights_HW.shape[-1])
        weights = None if weights_HW is None else weights_HW.to(raw.dtype)
    total = keys_BGTS.shape[2]
    slots = torch.arange(total, device=queries.device)
    scores = torch.zeros_like(steps[0])
    for back, raw in enumerate(steps[:total]):
        moved = pad(raw[..., : total - back], (back, 0))
        if back and starts_BQ is not None:
            moved = moved * (slots - back >= starts_BQ[:, None, part, None])
        scores = scores + (moved if weights is None else moved * weights[:, back, None, None])
    return scores


def _value_flow(weights_BHQT: Tensor, mix_HW: Tensor) -> Tensor:
    """Σ_m b_m p_{j+m}: how much of every slot's raw value arrives."""
    total = weights_BHQT.shape[-1]
    mix = mix_HW.to(weights_BHQT.dtype)
    flow = torch.zeros_like(weights_BHQT)
    for back in range(min(mix.shape[-1], total)):
        flow = flow + pad(weights_BHQT[..., back:], (0, back)) * mix[:, back, None, None]
    return flow


def _grouped(queries_BHQS: Tensor, keys_BGTS: Tensor) -> Tensor:
    """Every query head with the keys of its group, [B, H, Q, T].

    Group by group, since a batched product over B and G would copy the whole cache to merge the two.
    """
    groups = keys_BGTS.shape[1]
    batch, heads, new, width = queries_BHQS.shape
    q = queries_BHQS.reshape(batch, groups, heads // groups * new, width)
    scores = torch.stack([q[:, g] @ keys_BGTS[:, g].mT for g in range(groups)], dim=1)
    return scores.view(batch, heads, new, -1)


def _grouped_sum(weights_BHQT: Tensor, values_BGTV: Tensor) -> Tensor:
    """Every head's weighted sum of the values of its group, [B, H, Q, V]."""
    groups = values_BGTV.shape[1]
    batch, heads, new, total = weights_BHQT.shape
    p = weights_BHQT.reshape(batch, groups, heads // groups * new, total)
    sums = torch.stack([p[:, g] @ values_BGTV[:, g] for g in range(groups)], dim=1)
    return sums.view(batch, heads, new, -1)
