"""A real attention layer with weights set by hand, and the frame it is called with.

Shapes: L tokens, E hidden size. Row vectors: q = x W_Q. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from keyshift.attention.frame import Frame
from keyshift.attention.module import Attention
from keyshift.attention.projected import ProjectedKeys
from keyshift.configuration import KeyshiftConfig


@torch.no_grad()
def handmade(
    query_EE: Tensor,
    key_EE: Tensor,
    value_EE: Tensor,
    *,
    alpha: Sequence[float] | None = None,
    beta: Sequence[float] | None = None,
) -> Attention:
    """One head with W_O = I whose score is q · k̂ itself: 1 / sqrt(E) is undone in the query projection.

    Args:
        query_EE, key_EE, value_EE: W_Q, W_K, W_V.
        alpha, beta: weights of the key's and the value's shift (KV shifting paper, eq. 5); both or none.
    """
    width = query_EE.shape[0]
    config = KeyshiftConfig(
        attention="mha",
        position="alibi",
        shift="none" if alpha is None else "kv",
        vocab_size=1,
        hidden_size=width,
        num_attention_heads=1,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    attention = Attention(config, layer_idx=0).double()
    attention.q_proj.weight.copy_(query_EE.T * width**0.5)
    source = cast(ProjectedKeys, attention.source)
    source.k_proj.weight.copy_(key_EE.T)
    source.v_proj.weight.copy_(value_EE.T)
    attention.o_proj.weight.copy_(torch.eye(width))
    for shift, weights in ((attention.key_shift, alpha), (attention.value_shift, beta)):
        if shift is not None:
            shift.weight.copy_(torch.tensor([weights], dtype=torch.float64))
    return attention.requires_grad_(False)


def frame_of(visible_LL: Tensor, slope: float) -> Frame:
    """One sequence under ALiBi with a slope of one's choice: ALiBi's own are fixed by the number of heads.

    Args:
        visible_LL: bool, what each row may look at; at least one source per row.
        slope: p (or m); the bias is -slope |t - s|.
    """
    places = torch.arange(len(visible_LL))
    distance = (places[:, None] - places).abs().double()
    bias = (-slope * distance).masked_fill(~visible_LL, torch.finfo(torch.float64).min)
    return Frame(0, places[None], None, mask=bias[None, None], slopes_H=torch.tensor([slope]))


def causal(length: int) -> Tensor:
    """The ordinary mask: each token sees itself and what came before it, [L, L]."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def matched(length: int) -> Tensor:
    """The support of Definition 1: the last token sees places 2 … L - 1 (from 1). Other rows are causal."""
    visible = causal(length)
    visible[-1, 0] = visible[-1, -1] = False
    return visible


def strictly_earlier(length: int) -> Tensor:
    """Each token sees only what came before it; the first, which would see nothing, sees itself."""
    visible = causal(length).tril(-1)
    visible[0, 0] = True
    return visible
