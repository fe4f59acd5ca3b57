"""A layer with random weights, decoded from its cache and computed densely: the two must agree.

Shapes: B batch, T tokens, E hidden size. float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyshift.attention.frame import Frame, build_frame
from keyshift.attention.module import Attention
from keyshift.cache import KeyshiftCache
from keyshift.configuration import KeyshiftConfig


@torch.no_grad()
def drawn_layer(seed: int = 0, **choices: Any) -> Attention:
    """An attention layer of small sizes, every parameter drawn at random."""
    sizes: dict[str, Any] = {
        "vocab_size": 1,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "attn_implementation": "sdpa",
    }
    layer = Attention(KeyshiftConfig(**{**sizes, **choices}), layer_idx=0).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 3)
    return layer


def frame_between(
    layer: Attention,
    x_BTE: Tensor,
    first: int,
    last: int,
    padding_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> Frame:
    """The frame of a call on tokens ``first`` … ``last`` - 1, those before them cached."""
    return build_frame(
        layer.config,
        x_BTE[:, first:last],
        first_slot=first,
        attention_mask=None if padding_BT is None else padding_BT[:, :last],
        position_ids=None,
        document_ids=None if documents_BT is None else documents_BT[:, :last],
    )


@torch.no_grad()
def decode_difference(
    layer: Attention,
    tokens: int = 24,
    padding_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> float:
    """Between decoding from the cache, in chunks of 7, 1 and the rest, and the dense layer; relative."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, tokens, layer.config.hidden_size, dtype=torch.float64, generator=generator)
    masks = padding_BT, documents_BT
    dense = layer(x, frame_between(layer, x, 0, tokens, *masks))[0]
    cache = KeyshiftCache(layer.config)
    chunks = [
        layer(x[:, first:last], frame_between(layer, x, first, last, *masks), cache)[0]
        for first, last in ((0, 7), (7, 8), (8, tokens))
    ]
    real = torch.ones(2, tokens, dtype=torch.bool) if padding_BT is None else padding_BT.bool()
    return float((dense - torch.cat(chunks, dim=1))[real].abs().max() / dense[real].abs().max())
