"""Direct logit attribution: what a head's output, read through the unembedding, adds to a token's logit.

Shapes: B batch, T tokens, D hidden size, H heads, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyshift.circuits.model import CircuitModel
from keyshift.circuits.streams import Streams, head_writes


@torch.no_grad()
def head_effects(model: CircuitModel, streams: Streams, layer: int, targets_BT: Tensor) -> Tensor:
    """What each head of a layer adds to the logit of a token, [B, T, H], float64.

    Relative to the mean over the vocabulary (a constant added to all logits changes nothing), at the scale
    that the final norm had on the whole stream.

    Args:
        targets_BT: the token at each position whose logit is meant.
    """
    wrote = head_writes(model, streams, layer)
    return torch.stack(
        [piece_effect(model, streams, wrote[:, :, head], targets_BT) for head in range(wrote.shape[2])],
        dim=-1,
    )


@torch.no_grad()
def piece_effect(model: CircuitModel, streams: Streams, piece_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """What a summand of the last stream adds to the logits of ``targets_BT``, [B, T], as in `head_effects`.

    Biases of the final norm and the unembedding, which are no part of the stream, are left out, and so is a
    soft cap.
    """
    norm = model.final_norm
    read = piece_BTD if norm is None else norm.linear(piece_BTD, streams.last, streams.last_normed)
    matrix = model.head_module.weight
    reads = matrix[targets_BT.to(matrix.device)].double() - matrix.double().mean(0)
    return (read * reads).sum(-1) * model.logit_scale
