"""The definition of `stream_attention`, in plain PyTorch. Every backend is checked against it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from keyshift.ops.stream_attention.pages import readable, whole
from keyshift.ops.stream_attention.quantised import dequantise

MAX_SCORES = 1 << 24
"""How many scores are held at once; more queries than that are taken in blocks, so that memory stays
bounded."""


def missing() -> str | None:
    """None: it is always there."""
    return None


def detail() -> str:
    """What it is, for people."""
    return "plain PyTorch: every device and dtype, gradients"


def refused(queries: Tensor) -> str | None:
    """None: it takes every device and dtype."""
    return None


def run(
    queries: Tensor,
    keys_BGTS: Tensor,
    values_BGTV: Tensor | None,
    *,
    scale: float,
    starts_BQ: Tensor | None,
    lengths_B: Tensor | None,
    rope_queries_BHQR: Tensor | None,
    rope_keys_BTR: Tensor | None,
    key_weights_HW: Tensor | None,
    value_weights_HW: Tensor | None,
    slopes_H: Tensor | None,
    key_scales_BGTN: Tensor | None,
    value_scales_BGTN: Tensor | None,
    block_tables_BP: Tensor | None,
) -> Tensor:
    """See `keyshift.ops.stream_attention.api.stream_attention`."""
    if block_tables_BP is not None and lengths_B is not None:
        pages, page, new = keys_BGTS.shape[0], keys_BGTS.shape[2], queries.shape[-2]
        found = readable(block_tables_BP, lengths_B, starts_BQ, pages=pages, page=page, new=new)
        keys_BGTS = whole(keys_BGTS, *found)
        values_BGTV, rope_keys_BTR, key_scales_BGTN, value_scales_BGTN = (
            None if stream is None else whole(stream, *found)
            for stream in (values_BGTV, rope_keys_BTR, key_scales_BGTN, value_scales_BGTN)
        )
    keys = _floats(keys_BGTS, key_scales_BGTN, queries.dtype)
    values = keys if values_BGTV is None else _floats(values_BGTV, value_scales_BGTN, queries.dtype)
    batch, heads, new = queries.shape[0], queries.shape[1], queries.shape[-2]
    steps = queries.shape[2] if queries.dim() == 5 else 1
    total = keys.shape[2]
    slots = torch.arange(total, device=queries.device)
    lengths = torch.full((batch,), total, device=queries.device) if lengths_B is None else lengths_B
    own_BQ = (lengths - new)[:, None] + torch.arange(new, device=queries.device)
    if starts_BQ is None:
        starts_BQ = torch.zeros_like(own_BQ)
    elif lengths_B is None:
        lengths_B = lengths
    if lengths_B is not None:
        # A weight of zero does not keep out NaN.
        unread = (slots >= lengths_B[:, None]) | (slots < starts_BQ.amin(1, keepdim=True))
        keys, values = (stream.masked_fill(unread[:, None, :, None], 0) for stream in (keys, values))
    block = max(1, MAX_SCORES // (batch * heads * steps * total))
    outputs = []
    for begin in range(0, new, block):
        part = slice(begin, begin + block)
        own, starts = own_BQ[:, part], starts_BQ[:, part]
        visible = ((slots <= own[..., None]) & (slots >= starts[..., None]))[:, None]
        scores = _content_scores(queries[..., part, :], keys, key_weights_HW, starts)
        if rope_queries_BHQR is not None and rope_keys_BTR is not None:
            rope_keys = rope_keys_BTR[:, None].to(queries.dtype)
            scores = scores + _grouped(rope_queries_BHQR[:, :, part], rope_keys)
        scores = scores * scale
        if slopes_H is not None:
            distance = (own[..., None] - slots)[:, None]
            scores = scores - slopes_H.to(scores)[:, None, None] * distance
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        if value_weights_HW is not None:
            weights = _value_flow(weights, value_weights_HW).masked_fill(~visible, 0)
        outputs.append(_grouped_sum(weights.to(values.dtype), values))
    return torch.cat(outputs, dim=2).to(queries.dtype)


def _promote(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def _floats(stream: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return stream if scales is None else dequantise(stream, scales, dtype)


def _content_scores(
    queries: Tensor, keys_BGTS: Tensor, weights_HW: Tensor | None, starts_BQ: Tensor
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
        if back:
            moved = moved.masked_fill(slots - back < starts_BQ[:, None, :, None], 0)
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
    """Every query head with the keys of its group, [B, H, Q, T], float32 at least.

    Group by group, since a batched product over B and G would copy the whole cache to merge the two.
    """
    groups = keys_BGTS.shape[1]
    batch, heads, new, width = queries_BHQS.shape
    q = _promote(queries_BHQS).reshape(batch, groups, heads // groups * new, width)
    scores = torch.stack([q[:, g] @ _promote(keys_BGTS[:, g]).mT for g in range(groups)], dim=1)
    return scores.view(batch, heads, new, -1)


def _grouped_sum(weights_BHQT: Tensor, values_BGTV: Tensor) -> Tensor:
    """Every head's weighted sum of the values of its group, [B, H, Q, V]."""
    groups = values_BGTV.shape[1]
    batch, heads, new, total = weights_BHQT.shape
    p = weights_BHQT.reshape(batch, groups, heads // groups * new, total)
    sums = torch.stack([p[:, g] @ values_BGTV[:, g] for g in range(groups)], dim=1)
    return sums.view(batch, heads, new, -1)
