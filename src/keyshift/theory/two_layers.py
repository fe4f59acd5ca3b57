"""Theorem 1: two layers of width 2d approximate the induction-heads machine, with an error of O(exp(-p)).

The stream of token s is (x_s, 0). Layer 1 looks at positions only (W_Q = W_K = 0, ALiBi slope p) and writes a
smeared copy of an earlier token into the second half; layer 2 compares x_L with these copies. Attention
modules of this package, without the norms of a decoder block. Shapes: L tokens, d embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from keyshift.theory.handmade import causal, frame_of, handmade, matched, strictly_earlier
from keyshift.theory.machine import SLOPE, TEMPERATURE, induction_heads, sequences
from keyshift.theory.results import Construction, CopyError
from keyshift.theory.uncertainty import Estimate, confidence

CONSTRUCTIONS: tuple[Construction, ...] = ("earlier", "causal", "undone")
"""What layer 1 sees, and what layer 2 makes of it: only tokens before its own (as in the paper's proof); its
own too, same weights; its own too, and W_K of layer 2 takes it out."""

SLOPES = tuple(range(1, 15))
FITTED_FROM = 8
"""Below it the next order, exp(-2p), still bends the line."""


def smear_and_match(
    x_Ld: Tensor, copy_slope: float, construction: Construction, visible_LL: Tensor
) -> Tensor:
    """TF(x), width d: what layer 2 adds to the last token.

    Args:
        x_Ld: the sequence.
        copy_slope: p, layer 1's ALiBi slope.
        visible_LL: what layer 2 sees.
    """
    length, width = x_Ld.shape
    eye, nil = torch.eye(width).double(), torch.zeros(width, width).double()
    none = torch.zeros(2 * width, 2 * width).double()
    copy = torch.cat((torch.cat((nil, eye), 1), torch.cat((nil, nil), 1)))  # first half into the second
    first = handmade(none, none, copy)
    second = handmade(
        torch.block_diag(eye / TEMPERATURE, nil),
        _key_matrix(eye, copy_slope, construction),
        torch.block_diag(eye, nil),
    )
    seen = strictly_earlier(length) if construction == "earlier" else causal(length)
    stream = torch.cat((x_Ld, torch.zeros_like(x_Ld)), dim=-1)[None]
    stream = stream + first(stream, frame_of(seen, copy_slope))[0]
    return second(stream, frame_of(visible_LL, SLOPE))[0][0, -1, :width]


def _key_matrix(eye: Tensor, copy_slope: float, construction: Construction) -> Tensor:
    """W_K of layer 2: the copy; ``undone`` subtracts the token itself and scales up what is left, e^-p."""
    own, copied = 0.0, 1.0
    if construction == "undone":
        own = -math.exp(copy_slope)
        copied = math.exp(copy_slope) / (1 - math.exp(-copy_slope))
    columns = torch.cat((own * eye, copied * eye))
    return torch.cat((columns, torch.zeros_like(columns)), dim=1)


def key_norm(copy_slope: float, construction: Construction) -> float:
    """‖W_K‖ of layer 2, the largest singular value."""
    return float(torch.linalg.matrix_norm(_key_matrix(torch.eye(1).double(), copy_slope, construction), 2))


@torch.no_grad()
def copy_errors(construction: Construction, slopes: Sequence[float] = SLOPES) -> list[CopyError]:
    """‖IH - TF‖∞ for every slope, on the same `sequences` and under the matched support."""
    samples = [(x, _wanted(x), matched(len(x))) for x in sequences()]
    return [
        CopyError(
            construction=construction,
            slope=slope,
            errors=[
                float((smear_and_match(x, slope, construction, seen) - wanted).abs().max())
                for x, wanted, seen in samples
            ],
        )
        for slope in slopes
    ]


@torch.no_grad()
def support_error(copy_slope: float) -> float:
    """The largest ‖IH - TF‖∞ of ``earlier`` where layer 2 has the ordinary causal mask instead."""
    return max(
        float((smear_and_match(x, copy_slope, "earlier", causal(len(x))) - _wanted(x)).abs().max())
        for x in sequences()
    )


def _wanted(x_Ld: Tensor) -> Tensor:
    return induction_heads(x_Ld, TEMPERATURE, SLOPE)


def fitted_slope(found: Sequence[CopyError]) -> Estimate:
    """d log error / dp by regression, one per sequence; their mean with a 95% confidence interval."""
    from scipy import stats

    kept = [each for each in found if each.slope >= FITTED_FROM]
    slopes = [each.slope for each in kept]
    curves = zip(*([math.log(error) for error in each.errors] for each in kept), strict=True)
    return confidence([float(stats.linregress(slopes, curve).slope) for curve in curves])
