"""Composition: how strongly a head reads what an earlier head writes, from weights alone.

‖product‖ / (‖factor‖ ‖factor‖) in the Frobenius norm, the product in the order in which information flows; a
swapped order is another number (the correction to A Mathematical Framework for Transformer Circuits).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from keyshift.circuits.weights import LayerWeights
from keyshift.errors import UserError

Composition = Literal["K", "Q", "V"]
RANDOM_DRAWS = 20


def composition(
    kind: Composition, weights: LayerWeights, head: int, earlier: LayerWeights, earlier_head: int
) -> float:
    """The composition of ``head`` with an earlier head.

    Row vectors, W_OV = W_V W_O, W_QK = W_Q W_K^T. Q: W_OV^p W_QK^h; K: W_QK^h (W_OV^p)^T; V: W_OV^p W_OV^h.
    0 where a factor is zero.

    Raises:
        UserError: an unknown kind, a head out of range, or a head that is not earlier.
    """
    _check(kind, weights, head, earlier, earlier_head)
    return _score(kind, weights.qk(head), weights.ov(head), earlier.ov(earlier_head))


def random_composition(
    kind: Composition, weights: LayerWeights, earlier: LayerWeights, seed: int = 0
) -> float:
    """The mean score of random normal matrices of these shapes, over 20 draws."""
    draw = torch.Generator().manual_seed(seed)

    def like(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = (torch.randn(m.shape, generator=draw, dtype=torch.float64) for m in pair)
        return first, second

    scores = [
        _score(kind, like(weights.qk(0)), like(weights.ov(0)), like(earlier.ov(0)))
        for _ in range(RANDOM_DRAWS)
    ]
    return sum(scores) / len(scores)


def _check(kind: str, weights: LayerWeights, head: int, earlier: LayerWeights, earlier_head: int) -> None:
    if kind not in get_args(Composition):
        raise UserError(f"kind={kind!r} is not known; valid names: K, Q, V")
    if earlier.layer >= weights.layer:
        raise UserError(
            f"head {earlier.layer}.{earlier_head} is not earlier than {weights.layer}.{head}: only what an "
            "earlier layer wrote can be read"
        )
    for each, index in ((weights, head), (earlier, earlier_head)):
        if not 0 <= index < each.heads:
            raise UserError(f"head={index} is out of range: layer {each.layer} has 0 to {each.heads - 1}")


def _score(
    kind: Composition, qk: tuple[Tensor, Tensor], ov: tuple[Tensor, Tensor], earlier: tuple[Tensor, Tensor]
) -> float:
    query, key = qk
    into, out = earlier
    if kind == "K":
        product, own = _norm(query, key.T @ out.T, into.T), _norm(query, None, key.T)
    elif kind == "Q":
        product, own = _norm(into, out @ query, key.T), _norm(query, None, key.T)
    else:
        product, own = _norm(into, out @ ov[0], ov[1]), _norm(ov[0], None, ov[1])
    factors = own * _norm(into, None, out)
    return product / factors if factors > 0 else 0.0


def _norm(left_DA: Tensor, middle_AB: Tensor | None, right_BD: Tensor) -> float:
    """‖left · middle · right‖_F without the D × D product: by the factors' Gram matrices."""
    left, right = left_DA.T @ left_DA, right_BD @ right_BD.T
    inner = left if middle_AB is None else middle_AB.T @ left @ middle_AB
    return float((inner * right.T).sum().clamp(min=0).sqrt())
