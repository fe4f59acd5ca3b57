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


STREAMS = ("keys_BGTS", "values_BGTV", "rope_keys_BTR", "key_scales_BGTN", "value_scales_BGTN")


def poison(call: Call) -> None:
    """NaN into every slot that may not be read."""
    total, new = call["keys_BGTS"].shape[2], call["queries"].shape[-2]
    for b in range(call["queries"].shape[0]):
        start, length = _read(call, b)
        assert new <= length <= total
        for name in STREAMS:
            stream = call.get(name)
            if stream is not None and stream.is_floating_point():
                slots = stream.dim() - 2
                stream[b].narrow(slots - 1, 0, start).fill_(torch.nan)
                stream[b].narrow(slots - 1, length, total - length).fill_(torch.nan)


def with_lengths(call: Call) -> Call:
    """The same call, which says that all slots are used if it said nothing."""
    batch, total = call["queries"].shape[0], call["keys_BGTS"].shape[2]
    return {"lengths_B": torch.full((batch,), total), **call}


def begin_alike(call: Call, slots: int) -> None:
    """Every sequence has what the first one has in these slots, like requests with the same prompt."""
    first, end = _read(call, 0)
    for b in range(1, call["queries"].shape[0]):
        start, length = _read(call, b)
        begin, stop = max(first, start), min(end, length, slots)
        for stream in (call[name] for name in STREAMS if call.get(name) is not None and begin < stop):
            stream[b, ..., begin:stop, :] = stream[0, ..., begin:stop, :].clone()


def _read(call: Call, b: int) -> tuple[int, int]:
    """The first slot that a query of a sequence may read, and the one behind the last."""
    start = int(call["starts_BQ"][b].min()) if "starts_BQ" in call else 0
    return start, int(call["lengths_B"][b]) if "lengths_B" in call else call["keys_BGTS"].shape[2]


def paged(call: Call, page: int, *, seed: int = 0) -> Call:
    """The same call over pages in any order, of which sequences share what they have in common.

    Streams of a dtype are views of one tensor whose rows have everything of a token, as in a serving engine.
    Pages that no sequence has and slots that no query reads hold NaN; entries that none follows, anything.
    """
    call, generator = with_lengths(call), torch.Generator().manual_seed(seed)
    batch, total = call["queries"].shape[0], call["keys_BGTS"].shape[2]
    rows, padding = {}, page - total % page
    for name in STREAMS:
        if call.get(name) is not None:
            row = call[name].movedim(-2, 1).flatten(2)
            rows[name] = torch.cat((row, _nothing(row, batch, padding, row.shape[2])), dim=1)
    numbered: dict[bytes, int] = {}
    pages: list[list[Tensor]] = []
    places = []
    tables = torch.randint(-9, 1 << 30, (batch, total // page + 2), generator=generator)
    for b in range(batch):
        start, length = _read(call, b)
        for index in range(start // page, -(-length // page)):
            content = [stream[b, index * page : (index + 1) * page] for stream in rows.values()]
            bits = b"".join(bytes(part.contiguous().view(torch.uint8).numpy()) for part in content)
            places.append((b, index, numbered.setdefault(bits, len(pages))))
            if len(numbered) > len(pages):
                pages.append(content)
    numbers = torch.randperm(len(pages) + 3, generator=generator)
    for b, index, number in places:
        tables[b, index] = numbers[number]
    for dtype in {stream.dtype for stream in rows.values()}:
        names = [name for name, stream in rows.items() if stream.dtype == dtype]
        widths = [rows[name].shape[-1] for name in names]
        pool = _nothing(rows[names[0]], len(numbers), page, sum(widths))
        for number, content in zip(numbers, pages, strict=False):
            pool[number] = torch.cat([content[list(rows).index(name)] for name in names], dim=-1)
        for name, part in zip(names, pool.split(widths, dim=-1), strict=True):
            groups = () if name == "rope_keys_BTR" else (call["keys_BGTS"].shape[1],)
            call[name] = part.unflatten(-1, (*groups, -1)).movedim(1, -2)
    return {**call, "block_tables_BP": tables.to(torch.int32) if seed % 2 else tables}


def _nothing(like: Tensor, *shape: int) -> Tensor:
    """What shows if it is read."""
    return like.new_full(shape, torch.nan if like.is_floating_point() else 99)


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
