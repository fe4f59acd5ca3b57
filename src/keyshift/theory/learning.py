"""Theorem 3: the loss of one shifted layer on one induction step, in the limit of wide random embeddings.

The sequence holds each of T tokens once, then token i again; token i + 1 is to be predicted. All projections
are the identity and the embeddings are the output layer, so four numbers are left to learn: α1, α2, β1, β2.
Positions and tokens are counted from 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from keyshift.errors import UserError
from keyshift.theory.handmade import causal, frame_of, handmade


class Weights(NamedTuple):
    """α1, α2 of the keys and β1, β2 of the values."""

    alpha_1: float
    alpha_2: float
    beta_1: float
    beta_2: float


class Spread(NamedTuple):
    """Logits of all tokens in the limit: the right one's, and (how many, logit) of the others'."""

    right: float
    others: tuple[tuple[int, float], ...]


def limit_loss(weights: Weights, tokens: int, place: int, *, printed: bool = False) -> float:
    """The loss, nats, as d → ∞, for every i from 1 to T.

    Args:
        tokens: T, at least 2.
        place: i.
        printed: the middle term as the text prints it, with a2 in the place of a1.
    """
    right, others = limit_logits(weights, tokens, place, printed=printed)
    logits = torch.tensor([right, *(logit for _, logit in others)], dtype=torch.float64)
    counts = torch.tensor([1, *(count for count, _ in others)], dtype=torch.float64)
    return float((logits + counts.log()).logsumexp(0) - right)


def limit_logits(weights: Weights, tokens: int, place: int, *, printed: bool = False) -> Spread:
    """What each token gets: β1 times the attention to its positions, β2 times that to the ones after them.

    Three positions have a score: i and T + 1 (α1) and i + 1 (α2). At the ends a token has fewer neighbours:
    see the branches.

    Raises:
        UserError: a place outside 1 … T.
    """
    if not 1 <= place <= tokens or tokens < 2:
        raise UserError(f"place={place} must be between 1 and tokens={tokens}, and tokens at least 2")
    alpha_1, alpha_2, beta_1, beta_2 = torch.tensor(weights, dtype=torch.float64)
    if place == tokens:
        return _last(alpha_1, alpha_2, beta_1, beta_2, tokens)
    total = alpha_2.exp() + 2 * alpha_1.exp() + tokens - 2  # S
    a_1, a_2 = alpha_1.exp() / total, alpha_2.exp() / total
    # The successor i + 1 is read by β1; by β2 it is read from position i + 2, the repeat itself if i = T - 1.
    right = a_2 * beta_1 + beta_2 * (a_1 if place == tokens - 1 else 1 / total)
    # Before the two copies of token i stand tokens i - 1 and T, unless there is none or it is the answer.
    before = (place > 1) + (place < tokens - 1)
    others = (
        (before, beta_1 / total + beta_2 * (a_2 if printed else a_1)),
        (1, 2 * a_1 * beta_1 + a_2 * beta_2),
        (tokens - 2 - before, (beta_1 + beta_2) / total),
    )
    return Spread(float(right), tuple((count, float(logit)) for count, logit in others))


def _last(alpha_1: Tensor, alpha_2: Tensor, beta_1: Tensor, beta_2: Tensor, tokens: int) -> Spread:
    """i = T: the copies are neighbours, and what follows the first is the second, token T itself."""
    total = (alpha_1 + alpha_2).exp() + alpha_1.exp() + tokens - 1
    first, second = alpha_1.exp() / total, (alpha_1 + alpha_2).exp() / total
    right = beta_1 * (first + second) + beta_2 * second
    before = beta_1 / total + beta_2 * first
    return Spread(float(right), ((1, float(before)), (tokens - 2, float((beta_1 + beta_2) / total))))


@torch.no_grad()
def module_loss(weights: Weights, tokens: int, place: int) -> float:
    """The same loss from a real attention layer: one-hot embeddings are orthonormal, as wide ones become."""
    eye = torch.eye(tokens).double()
    sequence = torch.tensor([*range(tokens), place - 1])
    layer = handmade(eye, eye, eye, alpha=weights[:2], beta=weights[2:])
    output = layer(eye[sequence][None], frame_of(causal(tokens + 1), slope=0.0))[0][0, -1]
    return float(cross_entropy(output @ eye, sequence[place]))
