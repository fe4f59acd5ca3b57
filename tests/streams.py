"""Calls of `stream_attention`, random or as in decoding, for its definition and for every backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from keyshift.ops.stream_attention.quantised import quantise

Call = dict[str, Any]


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    dtype: torch.dtype = torch.float64,
    most_slots: int = 8,
    most_queries: int = 4,
    most_width: int = 4,
    quantised: bool = False,
) -> Call:
    """Arguments with every option on or off; the cached streams are views of longer, token-major buffers.

    What no query may read (slots at and after a sequence's length, or before all its starts) is NaN.
    """
    batch, groups, per_group, new, width, window, rotary = (
        draw(st.integers(low, high))
        for low, high in ((1, 2), (1, 3), (1, 4), (1, most_queries), (1, most_width), (1, 4), (0, most_width))
    )
    heads, total = groups * per_group, new + draw(st.integers(0, most_slots))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def stream(width: int) -> Tensor:
        return noise(batch, total + 3, groups, width)[:, :total].transpose(1, 2)

    turned = draw(st.booleans())
    call: Call = {
        "queries": noise(batch, heads, window, new, width) if turned else noise(batch, heads, new, width),
        "keys_BGTS": stream(width),
        "values_BGTV": stream(draw(st.integers(1, most_width))) if draw(st.booleans()) else None,
        "scale": draw(st.sampled_from((0.3, 1.0))),
    }
    lengths = [total] * batch
    if draw(st.booleans()):
        lengths = [draw(st.integers(new, total)) for _ in range(batch)]
        call["lengths_B"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = [[draw(st.integers(0, length - new + i)) for i in range(new)] for length in lengths]
        call["starts_BQ"] = torch.tensor(starts)
    if rotary:
        call["rope_queries_BHQR"] = noise(batch, heads, new, rotary)
        call["rope_keys_BTR"] = noise(batch, total, rotary)
    if not turned and draw(st.booleans()):
        call["key_weights_HW"] = noise(heads, window)
    if draw(st.booleans()):
        call["value_weights_HW"] = noise(heads, draw(st.integers(1, 4)))
    if draw(st.booleans()):
        call["slopes_H"] = noise(heads).abs()
    if quantised:
        _quantise(call, draw)
    poison(call)
    return call


def _quantise(call: Call, draw: st.DrawFn) -> None:
    for streams, scales in (("keys_BGTS", "key_scales_BGTN"), ("values_BGTV", "value_scales_BGTN")):
        if call[streams] is not None:
            width = call[streams].shape[-1]
            blocks = draw(st.sampled_from([n for n in range(1, width + 1) if width % n == 0]))
            kind = draw(st.sampled_from((torch.int8, torch.uint8) if width % 2 == 0 else (torch.int8,)))
            call[streams], call[scales] = quantise(call[streams], kind, blocks, torch.float16)


def poison(call: Call) -> None:
    """NaN into every slot that may not be read."""
    total, new = call["keys_BGTS"].shape[2], call["queries"].shape[-2]
    for b in range(call["queries"].shape[0]):
        length = int(call["lengths_B"][b]) if "lengths_B" in call else total
        start = int(call["starts_BQ"][b].min()) if "starts_BQ" in call else 0
        assert new <= length <= total
        for name in ("keys_BGTS", "values_BGTV", "rope_keys_BTR", "key_scales_BGTN", "value_scales_BGTN"):
            stream = call.get(name)
            if stream is not None and stream.is_floating_point():
                slots = stream.dim() - 2
                stream[b].narrow(slots - 1, 0, start).fill_(torch.nan)
                stream[b].narrow(slots - 1, length, total - length).fill_(torch.nan)


def in_float64(call: Call) -> Call:
    """The same call in double precision; quantised streams and integers as they are."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call.items()
    }


def decoding(
    *,
    heads: int = 32,
    groups: int = 8,
    width: int = 128,
    rotary: int = 32,
    total: int,
    window: int,
    batch: int = 2,
    new: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """Single-stream decoding over a token-major cache: shifted GVA, or MLA with one stream head."""
    generator = torch.Generator().manual_seed(total)

    def noise(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    call: Call = {
        "queries": noise(batch, heads, new, width),
        "keys_BGTS": noise(batch, total, groups, width).transpose(1, 2),
        "values_BGTV": None,
        "scale": (width + rotary) ** -0.5,
    }
    if rotary:
        call["rope_queries_BHQR"] = noise(batch, heads, new, rotary)
        call["rope_keys_BTR"] = noise(batch, total, rotary)
    if window > 1:
        for name in ("key_weights_HW", "value_weights_HW"):
            call[name] = noise(heads, window, dtype=torch.float32)
    return call


@contextmanager
def fresh_memory_of_nan() -> Iterator[None]:
    """So that what is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.zeros(1).new_empty(9).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
