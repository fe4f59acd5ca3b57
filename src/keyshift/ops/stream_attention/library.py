"""`stream_attention` as an operator of PyTorch's: schema, fake, and the choice of a backend at the call.

`torch.compile` sees one opaque call and no graph break. No backend is imported before one is needed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from keyshift.ops.stream_attention.backends import choose
from keyshift.ops.stream_attention.quantised import channels

OPTIONS = (
    "starts_BQ",
    "lengths_B",
    "rope_queries_BHQR",
    "rope_keys_BTR",
    "key_weights_HW",
    "value_weights_HW",
    "slopes_H",
    "key_scales_BGTN",
    "value_scales_BGTN",
    "block_tables_BP",
)
"""The optional tensors, in the order of the schema."""

NAMESPACE = re.sub(r"\W", "_", __name__.partition(".ops.")[0])
"""``keyshift``; of a copy that a checkpoint carries (`keyshift.hub.carried`), one of its own."""

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define(
    "stream_attention(Tensor queries, Tensor keys_BGTS, Tensor? values_BGTV, "
    + "".join(f"Tensor? {name}, " for name in OPTIONS)
    + "float scale, str backend) -> Tensor"
)
OPERATOR = getattr(torch.ops, NAMESPACE).stream_attention.default


@torch.library.impl(_LIBRARY, "stream_attention", "CompositeExplicitAutograd")
def _run(queries: Tensor, keys_BGTS: Tensor, values_BGTV: Tensor | None, *others: Any) -> Tensor:
    *options, scale, backend = others
    named = dict(zip(OPTIONS, options, strict=True))
    return choose(backend, queries)(queries, keys_BGTS, values_BGTV, scale=scale, **named)


@torch.library.register_fake(f"{NAMESPACE}::stream_attention")
def _fake(queries: Tensor, keys_BGTS: Tensor, values_BGTV: Tensor | None, *others: object) -> Tensor:
    width = channels(keys_BGTS if values_BGTV is None else values_BGTV)
    return queries.new_empty(queries.shape[0], queries.shape[1], queries.shape[-2], width)
