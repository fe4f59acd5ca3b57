"""Where gradient flow goes in Theorem 3 (figure 2 of the KV shifting paper).

α2 = 1 - α1 and β2 = 1 - β1, and the other tokens count as a constant, O(T), in the attention's normaliser and
in the loss. The optimum is said to be (α1, β1) = (0, 1). Tensors of any one shape, float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyshift.theory.results import Landscape

OTHERS = (0.0, 10.0, 100.0)
CELLS = 400
STARTS = 21
STEP = 0.01
_LOW, _HIGH = slice(0, CELLS // 2), slice(CELLS // 2, None)
QUADRANTS = ((_HIGH, _HIGH), (_LOW, _HIGH), (_HIGH, _LOW), (_LOW, _LOW))
"""α1 > α2 or not, β1 > β2 or not: the cells of the paper's table 4, row by row."""


def landscape(alpha_1: Tensor, beta_1: Tensor, others: float, *, printed: bool = False) -> Tensor:
    """The loss at each (α1, β1); ``printed`` has a2 for a1 in the middle term."""
    alpha_2, beta_2 = 1 - alpha_1, 1 - beta_1
    total = alpha_2.exp() + 2 * alpha_1.exp() + others
    a_1, a_2 = alpha_1.exp() / total, alpha_2.exp() / total
    right = a_2 * beta_1 + beta_2 / total
    before = beta_1 / total + beta_2 * (a_2 if printed else a_1)
    token = 2 * a_1 * beta_1 + a_2 * beta_2
    return (right.exp() + 2 * before.exp() + token.exp() + others).log() - right


def descent(
    alpha_1: Tensor, beta_1: Tensor, others: float, *, printed: bool = False
) -> tuple[Tensor, Tensor]:
    """The direction of gradient flow, (-∂L/∂α1, -∂L/∂β1)."""
    point = (alpha_1.detach().clone().requires_grad_(), beta_1.detach().clone().requires_grad_())
    with torch.enable_grad():
        loss = landscape(*point, others, printed=printed).sum()
        down_alpha, down_beta = torch.autograd.grad(loss, point)
    return -down_alpha, -down_beta


def square(cells: int) -> tuple[Tensor, Tensor]:
    """α1 and β1 at the middles of ``cells`` x ``cells`` cells of the unit square, [α1, β1]."""
    middles = (torch.arange(cells).double() + 0.5) / cells
    alpha_1, beta_1 = torch.meshgrid(middles, middles, indexing="ij")
    return alpha_1, beta_1


def away(alpha_1: Tensor, beta_1: Tensor, others: float, *, printed: bool = False) -> tuple[Tensor, Tensor]:
    """Whether α1 first grows, and whether β1 first falls: away from (0, 1), bool."""
    down_alpha, down_beta = descent(alpha_1, beta_1, others, printed=printed)
    return down_alpha > 0, down_beta < 0


def directness(alpha_1: Tensor, beta_1: Tensor, others: float) -> Tensor:
    """The cosine between the flow and the straight way to (0, 1)."""
    down_alpha, down_beta = descent(alpha_1, beta_1, others)
    along = down_alpha * -alpha_1 + down_beta * (1 - beta_1)
    return along / (down_alpha.hypot(down_beta) * alpha_1.hypot(1 - beta_1))


def right_first(alpha_1: Tensor, beta_1: Tensor) -> Tensor:
    """Whether the right token has the largest logit, bool.

    Every logit has the factor 1 / S, so that O(T) does not matter; that of the other tokens is 1 / S itself.
    """
    seen, before = (1 - alpha_1).exp(), alpha_1.exp()
    right = seen * beta_1 + (1 - beta_1)
    others = (beta_1 + before * (1 - beta_1), 2 * before * beta_1 + seen * (1 - beta_1))
    return (right > torch.maximum(*others)) & (right > 1)


def follow(alpha_1: Tensor, beta_1: Tensor, others: float, steps: int = 400) -> tuple[Tensor, Tensor]:
    """Where the flow, held inside the unit square, leads: steps of equal length down the gradient."""
    for _ in range(steps):
        down_alpha, down_beta = descent(alpha_1, beta_1, others)
        length = down_alpha.hypot(down_beta)
        alpha_1 = (alpha_1 + STEP * down_alpha / length).clamp(0, 1)
        beta_1 = (beta_1 + STEP * down_beta / length).clamp(0, 1)
    return alpha_1, beta_1


def survey(others: float) -> Landscape:
    """Figure 2's landscape for one O(T) in numbers."""
    starts = square(CELLS)
    grows, falls = away(*starts, others)
    grows_printed, falls_printed = away(*starts, others, printed=True)
    cosine = directness(*starts, others)
    end_alpha, end_beta = follow(*square(STARTS), others)
    corner = torch.tensor(0.0).double(), torch.tensor(1.0).double()
    corner_alpha, corner_beta = descent(*corner, others)
    losses = landscape(*starts, others)
    return Landscape(
        others=others,
        alpha_away=_share(grows),
        beta_away=_share(falls),
        away=_share(grows | falls),
        away_printed=_share(grows_printed | falls_printed),
        mean_cosine=float(cosine.mean()),
        least_cosine=float(cosine.min()),
        mean_gradient=float(torch.hypot(*descent(*starts, others)).mean()),
        reach_corner=_share((end_alpha < 2 * STEP) & (end_beta > 1 - 2 * STEP)),
        corner_loss=float(landscape(*corner, others)),
        largest_loss=float(losses.max()),
        even_loss=math.log(4 + others),
        corner_flow=(float(corner_alpha), float(corner_beta)),
        quadrants=[float(losses[rows, columns].mean()) for rows, columns in QUADRANTS],
        right_first=_share(right_first(*starts)),
        beyond_loss=float(landscape(torch.tensor(-9.0).double(), torch.tensor(20.0).double(), others)),
    )


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())
