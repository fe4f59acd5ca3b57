"""RoPE and the shift do not commute: rotating first gives another mechanism.

Shift, then rotate: R_j (α1 k_j + α2 k_{j-1}). Rotate, then shift: α1 R_j k_j + α2 R_{j-1} k_{j-1}.
The difference is α2 (R_j - R_{j-1}) k_{j-1}, as large as one step of rotation. Shapes: B batch, T tokens, H
heads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyshift.attention.rotary import rotate, rotation
from keyshift.attention.shift import shift_sequence


def both_orders(keys_BTHD: Tensor, weights_HW: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Keys shifted and then rotated, and keys rotated and then shifted."""
    batch, tokens, _, width = keys_BTHD.shape
    turn = rotation(torch.arange(tokens).expand(batch, -1), width, theta, keys_BTHD.dtype)
    shifted = shift_sequence(keys_BTHD, weights_HW, None)
    return rotate(shifted, turn), shift_sequence(rotate(keys_BTHD, turn), weights_HW, None)


def relative_difference(alpha_2: float, width: int = 64, theta: float = 10_000.0, seed: int = 0) -> float:
    """‖difference‖ / ‖keys‖ over random keys, α = (1 - α2, α2)."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(4, 256, 2, width, dtype=torch.float64, generator=generator)
    weights = torch.tensor([[1 - alpha_2, alpha_2]] * 2, dtype=torch.float64)
    shift_first, rotate_first = both_orders(keys, weights, theta)
    return float((shift_first - rotate_first).norm() / shift_first.norm())


def one_step(width: int = 64, theta: float = 10_000.0) -> float:
    """Expected for α = (0, 1): ‖(R_1 - I) k‖ / ‖k‖ = sqrt(mean over pairs of 2 - 2 cos θ_i)."""
    turn = rotation(torch.ones(1, 1, dtype=torch.long), width, theta, torch.float64)
    return float((2 - 2 * turn.cos).mean().sqrt())
