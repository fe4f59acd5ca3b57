"""Streams of 8-bit and 4-bit numbers with scales: how they are made and read.

A number is an integer times the scale of its token, stream head and block of channels. Eight bits are an
int8 from -127 to 127. Four bits are two numbers of -7 to 7, each plus 8, in a uint8: of a head with S
channels, byte k has channel k in its low half and channel k + S/2 in its high half.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127, torch.uint8: 7}


def channels(stream: Tensor) -> int:
    """How many numbers per token and head a stream holds."""
    return stream.shape[-1] * (2 if stream.dtype == torch.uint8 else 1)


def quantise(
    stream: Tensor, dtype: torch.dtype, blocks: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Round a stream to integers, symmetrically, each block of channels by its own largest magnitude.

    A block with NaN, infinity or numbers too large for a scale of this dtype reads as NaN.

    Args:
        stream: [..., S], floats.
        dtype: torch.int8, or torch.uint8 for four bits.
        blocks: N, how many scales a token and head has; it divides S.
        scale_dtype: of the scales.

    Returns:
        The integers [..., S], or [..., S/2] of four bits, and the scales [..., N].

    Raises:
        ValueError: S is not a multiple of N, or is odd with four bits.
    """
    width = stream.shape[-1]
    if width % blocks or (dtype == torch.uint8 and width % 2):
        raise ValueError(f"a stream of {width} channels does not divide into {blocks} blocks of {dtype}")
    parts = stream.unflatten(-1, (blocks, -1)).to(torch.promote_types(stream.dtype, torch.float32))
    scales = (parts.abs().amax(-1) / LARGEST[dtype]).to(scale_dtype)
    # What is divided by is what will be multiplied by: the scale as it is stored.
    divisor = scales.to(parts).unsqueeze(-1)
    steps = (
        torch.where((divisor > 0) & divisor.isfinite(), parts / divisor, 0)
        .round()
        .clamp(-LARGEST[dtype], LARGEST[dtype])
        .flatten(-2)
    )
    if dtype == torch.int8:
        return steps.to(torch.int8), scales
    low, high = (steps + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4), scales


def dequantise(stream: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., S] of integers and scales, in the given dtype."""
    if stream.dtype == torch.uint8:
        stream = torch.cat((stream & 15, stream >> 4), dim=-1).to(torch.int8) - 8
    return (stream.unflatten(-1, (scales.shape[-1], -1)).to(dtype) * scales.to(dtype).unsqueeze(-1)).flatten(
        -2
    )
