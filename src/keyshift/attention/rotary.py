"""Position: rotary embedding (whole heads or a decoupled slice) and ALiBi.

Shapes: B batch, T tokens, H heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyshift.attention.rope_scaling import scaled


class Rotation(NamedTuple):
    """The angles of RoPE at some positions: ``cos`` and ``sin`` [B, T, width / 2], float32 or float64."""

    cos: Tensor
    sin: Tensor


def rotation(
    positions_BT: Tensor,
    width: int,
    theta: float,
    dtype: torch.dtype = torch.float32,
    scaling: Mapping[str, Any] | None = None,
    pairs: Sequence[int] | None = None,
) -> Rotation:
    """RoPE's angles: position / theta^(2i / width) for the pair i, or slower (``scaling``).

    They are multiplied out in float64 (where the device has it): in float32 the angle at position 4000 is off
    by 1e-4, and a query turned one place back would not meet a key as the key turned one place on does.

    Args:
        positions_BT: positions in tokens, integer; negative ones rotate backwards.
        width: how many channels are rotated, even.
        theta: the base (``rope_theta``).
        dtype: of what is rotated; the angles' sines and cosines are float32 at least.
        scaling: see `rope_scaling`; may make cosines and sines larger, too.
        pairs: only these, in this order.
    """
    exact = torch.float32 if positions_BT.device.type == "mps" else torch.float64
    channels = torch.arange(0, width, 2, dtype=exact, device=positions_BT.device)
    speeds, size = theta ** (-channels / width), 1.0
    if scaling is not None:
        speeds, size = scaled(speeds, theta, scaling)
    if pairs is not None:
        speeds = speeds[list(pairs)]
    angles = positions_BT[..., None].to(exact) * speeds
    kept = torch.promote_types(dtype, torch.float32)
    return Rotation((angles.cos() * size).to(kept), (angles.sin() * size).to(kept))


def rotate(x_BTHD: Tensor, by: Rotation) -> Tensor:
    """Rotate every head: channel i pairs with channel i + D/2, as in Llama. Same shape and dtype as the
    input.

    The products are taken in float32 at least, so that a query turned m places back and a key turned m
    places forward agree to rounding in lower precision too.
    """
    half = x_BTHD.shape[-1] // 2
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    first, second = x_BTHD[..., :half], x_BTHD[..., half:]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BTHD.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi's slopes [H], float32 (Press et al. 2022): geometric, 2^(-8/H) … 2^-8 for H a power of two.

    For other H, the slopes of the next lower power of two and every other one of the next higher, as there.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    between = [2 ** (-8 * (i + 1) / (2 * lower)) for i in range(0, 2 * lower, 2)]
    return torch.tensor(slopes + between[: num_heads - lower], dtype=torch.float32)
