"""`stream_attention` as an operator of PyTorch's: schema, fake, and the choice of a backend at the call.

`torch.compile` sees one opaque call and no graph break. No backend is imported before one is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyshift.ops.stream_attention.backends import choose
from keyshift.ops.stream_attention.quantised import channels

_LIBRARY = torch.library.Library("keyshift", "DEF")
_LIBRARY.define(
    "stream_attention(Tensor queries, Tensor keys_BGTS, Tensor? values_BGTV, Tensor? starts_BQ, "
    "Tensor? lengths_B, Tensor? rope_queries_BHQR, Tensor? rope_keys_BTR, Tensor? key_weights_HW, "
    "Tensor? value_weights_HW, Tensor? slopes_H, Tensor? key_scales_BGTN, Tensor? value_scales_BGTN, "
    "float scale, str backend) -> Tensor"
)
OPERATOR = torch.ops.keyshift.stream_attention.default


@torch.library.impl(_LIBRARY, "stream_attention", "CompositeExplicitAutograd")
def _run(
    queries: Tensor,
    keys_BGTS: Tensor,
    values_BGTV: Tensor | None,
    starts_BQ: Tensor | None,
    lengths_B: Tensor | None,
    rope_queries_BHQR: Tensor | None,
    rope_keys_BTR: Tensor | None,
    key_weights_HW: Tensor | None,
    value_weights_HW: Tensor | None,
    slopes_H: Tensor | None,
    key_scales_BGTN: Tensor | None,
    value_scales_BGTN: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    return choose(backend, queries)(
        queries,
        keys_BGTS,
        values_BGTV,
        scale=scale,
        starts_BQ=starts_BQ,
        lengths_B=lengths_B,
        rope_queries_BHQR=rope_queries_BHQR,
        rope_keys_BTR=rope_keys_BTR,
        key_weights_HW=key_weights_HW,
        value_weights_HW=value_weights_HW,
        slopes_H=slopes_H,
        key_scales_BGTN=key_scales_BGTN,
        value_scales_BGTN=value_scales_BGTN,
    )


@torch.library.register_fake("keyshift::stream_attention")
def _fake(queries: Tensor, keys_BGTS: Tensor, values_BGTV: Tensor | None, *others: object) -> Tensor:
    width = channels(keys_BGTS if values_BGTV is None else values_BGTV)
    return queries.new_empty(queries.shape[0], queries.shape[1], queries.shape[-2], width)
