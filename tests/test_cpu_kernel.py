"""The fused CPU kernel, with every instruction set of this machine, against the definition in float64."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import (
    Call,
    begin_alike,
    calls,
    decoding,
    fresh_memory_of_nan,
    in_float64,
    paged,
    poison,
    with_lengths,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from keyshift.ops.stream_attention import cpu, stream_attention
from keyshift.ops.stream_attention.quantised import dequantise, quantise

if (reason := cpu.missing()) is not None:
    if os.environ.get("CI") == "true":
        raise RuntimeError(reason)
    pytest.skip(reason, allow_module_level=True)

KERNELS = tuple(cpu.kernels())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

ROUNDINGS = 8
"""Of float32 beside those of scores: e^x, and the sums over slots, whose errors do not all point one way."""


def run(call: Call, kernel: str) -> Tensor:
    options = dict.fromkeys(inspect.signature(cpu.run).parameters)
    return cpu.run(**{**options, **call, "kernel": kernel})


def compare(call: Call) -> None:
    """With the definition, to what rounding explains.

    That is half a unit of the output's dtype; the weights' errors, as a share of Σ |b| p |v|; and underflow.
    A weight is e^score, so that a score's absolute error, a unit of float32 of its terms, is relative to it.
    It is rounded to bfloat16 where the processor multiplies as such.
    """
    exact = stream_attention(**in_float64(call), backend="reference")
    magnitude = stream_attention(**of_magnitudes(in_float64(call)), backend="reference")
    single, kind = torch.finfo(torch.float32), torch.finfo(call["queries"].dtype)
    for kernel in KERNELS:
        leave_nan_behind(kernel)
        with fresh_memory_of_nan():
            out = run(call, kernel)
        assert (out.dtype, out.shape) == (call["queries"].dtype, exact.shape)
        weights = single.eps * (ROUNDINGS + terms_of_a_score(call))
        if kernel == "avx512_bf16" and out.dtype == torch.bfloat16:
            weights += kind.eps / 2
        underflow = max(kind.smallest_normal * kind.eps, single.smallest_normal)
        error = (out.double() - exact).abs()
        bound = kind.eps / 2 * exact.abs() + weights * magnitude + underflow
        same = (out == exact) | (out.isnan() & exact.isnan())
        fits = torch.where(exact.isfinite(), error <= bound, same)
        assert fits.all(), (
            f"{kernel}: at {(~fits).nonzero()[0].tolist()}, {(error / bound).max()} times the bound"
        )


def floats(call: Call, streams: str, scales: str) -> Tensor:
    """A stream of floats, of numbers that are there."""
    stream = call[streams]
    if call.get(scales) is not None:
        stream = dequantise(stream, call[scales], torch.float64)
    return stream


def terms_of_a_score(call: Call) -> float:
    """At most, added up in magnitude."""

    def longest(x: Tensor) -> float:
        return float(x.double().nan_to_num(0, 0, 0).norm(dim=-1).max())

    keys = floats(call, "keys_BGTS", "key_scales_BGTN")
    steps = call["queries"].shape[2] if call["queries"].dim() == 5 else 1
    mixed = call["key_weights_HW"].abs().sum(-1).max() if call.get("key_weights_HW") is not None else steps
    terms = longest(call["queries"]) * longest(keys) * float(mixed)
    if "rope_keys_BTR" in call:
        terms += longest(call["rope_queries_BHQR"]) * longest(call["rope_keys_BTR"])
    slope = float(call["slopes_H"].max()) if "slopes_H" in call else 0
    return call["scale"] * terms + slope * keys.shape[2]


def of_magnitudes(call: Call) -> Call:
    """The call whose output is Σ |b| p |v|."""
    names = ("values_BGTV", "value_scales_BGTN")
    if call["values_BGTV"] is None:
        names = ("keys_BGTS", "key_scales_BGTN")
    changed = {"values_BGTV": floats(call, *names).abs(), "value_scales_BGTN": None}
    if "value_weights_HW" in call:
        changed["value_weights_HW"] = call["value_weights_HW"].abs()
    return {**call, **changed}


def leave_nan_behind(kernel: str) -> None:
    """In the memory that the kernel keeps from call to call, by one of nothing else and unlike others."""
    call = decoding(heads=9, groups=1, width=73, rotary=41, total=150, window=7, batch=1, dtype=torch.float16)
    soiled = {
        name: torch.full_like(value, torch.nan) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
    assert run(soiled, kernel).isnan().all()


# ---- against the definition --------------------------------------------------------------------------------


@every_dtype
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_calls(dtype: torch.dtype, data: st.DataObject) -> None:
    """Tasks so small that they border on each other often."""
    sizes = {"most_slots": 300, "most_queries": 20, "most_width": 70}
    call = data.draw(calls(dtype=dtype, quantised=data.draw(st.booleans()), **sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "SPLIT_TOKENS", data.draw(st.sampled_from((16, 100, 256))))
        patch.setattr(cpu, "QUERY_NUMBERS", data.draw(st.sampled_from((1, 1000, 1 << 16))))
        compare(call)


PAGES = (1, 3, 16, 24, 32, 128)


@every_dtype
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pages_are_read_like_whole_sequences(dtype: torch.dtype, data: st.DataObject) -> None:
    """To the bit, since wherever the tokens lie, the same is computed in the same order."""
    sizes = {"most_slots": 300, "most_queries": 20, "most_width": 70}
    call = data.draw(calls(dtype=dtype, quantised=data.draw(st.booleans()), **sizes))
    begin_alike(call, data.draw(st.integers(0, 300)))
    cut = paged(call, data.draw(st.sampled_from(PAGES)), seed=data.draw(st.integers(0, 9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "SPLIT_TOKENS", data.draw(st.sampled_from((16, 100, 256))))
        patch.setattr(cpu, "QUERY_NUMBERS", data.draw(st.sampled_from((1, 1000, 1 << 16))))
        for kernel in KERNELS:
            with fresh_memory_of_nan():
                assert torch.equal(run(cut, kernel), run(with_lengths(call), kernel))


@every_dtype
@pytest.mark.parametrize("page", PAGES)
def test_pages_in_place(page: int, dtype: torch.dtype) -> None:
    """Rows of whole vectors are not copied; windows, blocks and new tokens reach over borders of pages."""
    sizes = {"heads": 4, "groups": 2, "width": 64, "rotary": 32, "total": 400, "batch": 3, "new": 5}
    call = decoding(window=4, dtype=dtype, **sizes)
    call |= {"values_BGTV": call["keys_BGTS"] + 1, "lengths_B": torch.tensor([400, 129, 350])}
    begin_alike(call, 100)
    poison(call)
    turned = {**call, "queries": torch.randn(3, 4, 4, 5, 64).to(dtype), "key_weights_HW": None}
    for kernel, each in itertools.product(KERNELS, (call, turned)):
        assert torch.equal(run(paged(each, page), kernel), run(each, kernel))


@pytest.mark.parametrize(
    ("lengths", "blocks", "parts"),
    [
        ([65536], 1, [32]),
        ([1000], 1, [3]),
        ([100], 1, [1]),
        ([4096] * 8, 1, [4] * 8),
        ([4096] * 64, 1, [1] * 64),
        ([32768, *[16] * 63], 1, [31, *[1] * 63]),
        ([1000] * 2, 16, [1] * 2),
    ],
)
def test_tasks_are_about_as_long_as_each_other(lengths: list[int], blocks: int, parts: list[int]) -> None:
    assert cpu.splits_of(lengths, blocks) == [0, *itertools.accumulate(parts)]


@every_dtype
@pytest.mark.parametrize("total", [1, 255, 256, 257, 1000, 5000])
def test_shifted_gva(total: int, dtype: torch.dtype) -> None:
    compare(decoding(total=total, window=2, batch=1, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("total", [1, 255, 256, 257, 1000])
def test_mla(total: int, dtype: torch.dtype) -> None:
    compare(decoding(heads=16, groups=1, width=512, rotary=64, total=total, window=1, batch=1, dtype=dtype))


@pytest.mark.parametrize("new", [2, 15, 16, 17, 33, 70])
def test_blocks_of_queries(new: int) -> None:
    assert cpu.QUERY_NUMBERS // (32 * 128) == 16
    compare(decoding(total=300, window=2, batch=1, new=new))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (6, 3), (10, 2), (16, 1), (33, 1), (66, 2)])
def test_heads_of_a_group(heads: int, groups: int) -> None:
    for dtype, new in itertools.product(DTYPES, (1, 3)):
        sizes = {"width": 20, "rotary": 3, "total": 45, "new": new, "dtype": dtype}
        compare(decoding(heads=heads, groups=groups, window=3, **sizes))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 20])
def test_windows(window: int, turned: bool) -> None:
    """A block is 16 slots of this width, so that the widest reaches past a whole one."""
    for dtype, total in itertools.product(DTYPES, (1, 3, 100)):
        call = decoding(heads=4, groups=2, width=512, rotary=0, total=total, window=window, dtype=dtype)
        if turned:
            call.pop("key_weights_HW", None)
            call["queries"] = torch.randn(2, 4, window, 1, 512).to(dtype)
        compare(call)


def packed(dtype: torch.dtype = torch.float32, new: int = 5) -> Call:
    """Unequal lengths; one sequence is padded on the left, of one three documents are still read."""
    call = decoding(heads=4, groups=2, width=32, rotary=8, total=700, window=3, batch=3, new=new, dtype=dtype)
    call["lengths_B"] = torch.tensor([700, 300, 650], dtype=torch.int32)
    starts = torch.tensor([[0] * new, [123] * new, [10, 10, 300, *[647] * (new - 3)]], dtype=torch.int32)
    call["starts_BQ"] = starts
    poison(call)
    return call


@every_dtype
def test_unequal_lengths_padding_and_documents(dtype: torch.dtype) -> None:
    call = packed(dtype)
    compare(call)
    turned = torch.randn(3, 4, 3, 5, 32).to(dtype)
    compare({**call, "queries": turned, "key_weights_HW": None, "values_BGTV": call["keys_BGTS"][..., :7]})


@every_dtype
@pytest.mark.parametrize("values", [(None, 0), (torch.int8, 1), (torch.int8, 4), (torch.uint8, 1)])
@pytest.mark.parametrize("keys", [(None, 0), (torch.int8, 1), (torch.uint8, 4)])
def test_each_stream_has_a_kind_of_its_own(
    keys: tuple[torch.dtype | None, int], values: tuple[torch.dtype | None, int], dtype: torch.dtype
) -> None:
    call = packed(dtype)
    call["values_BGTV"] = call["keys_BGTS"] + 1
    for streams, scales, (kind, blocks) in (
        ("keys_BGTS", "key_scales_BGTN", keys),
        ("values_BGTV", "value_scales_BGTN", values),
    ):
        if kind is not None:
            clean = call[streams].nan_to_num(0)
            call[streams], call[scales] = quantise(clean, kind, blocks, torch.bfloat16)
    poison(call)
    compare(call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scales_of_any_float_dtype(dtype: torch.dtype) -> None:
    call = decoding(heads=2, groups=1, width=8, rotary=0, total=20, window=2)
    call["keys_BGTS"], call["key_scales_BGTN"] = quantise(call["keys_BGTS"], torch.int8, 2, dtype)
    compare(call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rotary_keys_of_any_float_dtype(dtype: torch.dtype) -> None:
    call = decoding(heads=2, groups=1, width=8, rotary=4, total=20, window=2)
    compare({**call, "rope_keys_BTR": call["rope_keys_BTR"].to(dtype)})


# ---- numbers out of the ordinary ---------------------------------------------------------------------------


def plain(dtype: torch.dtype, total: int = 600, width: int = 32) -> Call:
    """Keys and queries of ones, so that a test decides the scores; values at random; two splits."""
    generator = torch.Generator().manual_seed(0)
    return {
        "queries": torch.ones(1, 3, 1, width, dtype=dtype),
        "keys_BGTS": torch.ones(1, 1, total, width, dtype=dtype),
        "values_BGTV": torch.randn(1, 1, total, 5, generator=generator).to(dtype),
        "scale": 1.0,
    }


@every_kernel
@every_dtype
def test_equal_scores_give_the_mean(dtype: torch.dtype, kernel: str) -> None:
    call = plain(dtype)
    call["values_BGTV"] = torch.arange(600).remainder(4)[:, None].expand(1, 1, 600, 5).to(dtype)
    assert (run(call, kernel) == 1.5).all()


@every_kernel
@every_dtype
@pytest.mark.parametrize("slot", [0, 130, 311, 599])
def test_a_score_far_above_leaves_the_others_no_weight(slot: int, dtype: torch.dtype, kernel: str) -> None:
    call = plain(dtype)
    call["keys_BGTS"][:, :, slot] = 1e4 / 32 + 1
    value = call["values_BGTV"][0, 0, slot].clone()
    call["values_BGTV"].fill_(torch.finfo(dtype).max / 1024)[:, :, slot] = value
    assert (run(call, kernel) == value).all()


@every_dtype
@pytest.mark.parametrize("infinity", [-torch.inf, torch.inf])
@pytest.mark.parametrize(
    "slots", [slice(0, 600), slice(0, 350), slice(300, 600), slice(17, 18), slice(599, 600)], ids=str
)
def test_infinite_keys(slots: slice, infinity: float, dtype: torch.dtype) -> None:
    """Also as the values, and before a shift, in which weights may change the sign or be 0."""
    call = plain(dtype)
    call["keys_BGTS"][:, :, slots] = infinity
    compare(call)
    compare({**call, "values_BGTV": None})
    compare({**call, "key_weights_HW": torch.tensor([[0.5, 0.5], [0.5, -0.5], [1.0, 0.0]])})
    compare({**call, "value_weights_HW": torch.tensor([[0.5, 0.5], [0.5, -0.5], [1.0, 0.0]])})


@every_dtype
@pytest.mark.parametrize("infinity", [-torch.inf, torch.inf])
def test_infinite_queries(infinity: float, dtype: torch.dtype) -> None:
    call = plain(dtype)
    call["queries"][:, 1] = infinity
    compare(call)


@every_dtype
@pytest.mark.parametrize("infinity", [-torch.inf, torch.inf])
def test_infinite_values(infinity: float, dtype: torch.dtype) -> None:
    call = plain(dtype)
    call["values_BGTV"][:, :, 311, 2] = infinity
    compare(call)


def visible(call: Call, slot: int) -> Tensor:
    """Which queries may see a slot, [B, Q]."""
    new, total = call["queries"].shape[2], call["keys_BGTS"].shape[2]
    return (call["starts_BQ"] <= slot) & (slot <= torch.arange(total - new, total))


def nan_call(dtype: torch.dtype) -> Call:
    call = decoding(heads=4, groups=2, width=32, rotary=8, total=600, window=2, new=5, dtype=dtype)
    starts = torch.tensor([[0, 0, 101, 100, 598], [0] * 5])
    return {**call, "starts_BQ": starts, "values_BGTV": call["keys_BGTS"].clone()}


@every_kernel
@every_dtype
@pytest.mark.parametrize("slot", [100, 597])
def test_nan_in_a_key_reaches_the_queries_that_see_it(slot: int, dtype: torch.dtype, kernel: str) -> None:
    call = nan_call(dtype)
    call["keys_BGTS"][0, 1, slot, 3] = torch.nan
    expected = torch.zeros(2, 4, 5, dtype=torch.bool)
    expected[0, 2:] = visible(call, slot)[0]
    out = run(call, kernel)
    assert torch.equal(out.isnan(), expected[..., None].expand_as(out))


@every_kernel
@every_dtype
@pytest.mark.parametrize("slot", [100, 597])
def test_nan_in_a_rotary_key_reaches_the_queries_that_see_it(
    slot: int, dtype: torch.dtype, kernel: str
) -> None:
    call = nan_call(dtype)
    call["rope_keys_BTR"][0, slot, 3] = torch.nan
    expected = torch.zeros(2, 4, 5, dtype=torch.bool)
    expected[0] = visible(call, slot)[0]
    out = run(call, kernel)
    assert torch.equal(out.isnan(), expected[..., None].expand_as(out))


@every_kernel
@every_dtype
def test_nan_in_a_query_stays_there(dtype: torch.dtype, kernel: str) -> None:
    call = nan_call(dtype)
    call["queries"][0, 1, 2, 3] = torch.nan
    out = run(call, kernel)
    assert out[0, 1, 2].isnan().all()
    assert out.isnan().sum() == out.shape[-1]


@every_kernel
@every_dtype
@pytest.mark.parametrize("slot", [100, 599])
def test_nan_in_a_value_reaches_its_channel(slot: int, dtype: torch.dtype, kernel: str) -> None:
    call = decoding(heads=4, groups=2, width=32, rotary=8, total=600, window=2, dtype=dtype)
    call["values_BGTV"] = call["keys_BGTS"].clone()
    call["values_BGTV"][0, 1, slot, 3] = torch.nan
    out = run(call, kernel)
    assert out[0, 2:, 0, 3].isnan().all()
    assert out.isnan().sum() == 2


@every_kernel
@every_dtype
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1], ids=hex)
@pytest.mark.parametrize("blocks", [1, 2])
def test_nan_of_any_bits_stays_nan(blocks: int, bits: int, dtype: torch.dtype, kernel: str) -> None:
    """Rounding up in integers would carry it round to zero."""
    call = plain(dtype)
    values, scales = quantise(torch.ones(1, 1, 600, 6), torch.int8, blocks, torch.float32)
    scales[0, 0, 311] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert run({**call, "values_BGTV": values, "value_scales_BGTN": scales}, kernel).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "tiny"), [(torch.float32, 1e-39), (torch.float16, 1e-6)], ids=["float32", "float16"]
)
def test_subnormal_numbers_count(dtype: torch.dtype, tiny: float) -> None:
    call = plain(dtype)
    call["queries"].fill_(1e4)
    call["keys_BGTS"].copy_(torch.arange(600)[:, None] * (tiny / 600))
    compare({**call, "scale": 1e-4 / tiny})


@every_kernel
def test_subnormal_bfloat16_counts_as_itself_or_as_zero(kernel: str) -> None:
    """The processor's products of bfloat16 take it for zero."""
    call = plain(torch.bfloat16)
    zero = run({**call, "queries": torch.zeros_like(call["queries"])}, kernel)
    call["keys_BGTS"].copy_(torch.arange(600)[:, None] * 1e-39)
    assert torch.equal(run(call, kernel), zero)


# ---- memory ------------------------------------------------------------------------------------------------


def innermost_last(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def every_other(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1).flatten(-2)[..., ::2]


def every_third_slot(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, max(x.dim() - 2, 0)).unfold(max(x.dim() - 2, 0), 1, 3).squeeze(-1)


def one_element_on(x: Tensor) -> Tensor:
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def one_byte_on(x: Tensor) -> Tensor:
    memory = bytearray(b"x" + bytes(x.contiguous().view(-1).view(torch.uint8).numpy()))
    return torch.frombuffer(memory, dtype=x.dtype, offset=1).view(x.shape)


@every_kernel
@every_dtype
@pytest.mark.parametrize("kind", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize(
    "laid_out", [innermost_last, every_other, every_third_slot, one_element_on, one_byte_on]
)
def test_any_layout(
    laid_out: Callable[[Tensor], Tensor], kind: torch.dtype | None, dtype: torch.dtype, kernel: str
) -> None:
    call = packed(dtype)
    call["values_BGTV"] = call["keys_BGTS"][..., :6] + 1
    if kind is not None:
        clean = call["keys_BGTS"].nan_to_num(0)
        call["keys_BGTS"], call["key_scales_BGTN"] = quantise(clean, kind, 4, torch.float16)
    moved = {name: laid_out(value) if isinstance(value, Tensor) else value for name, value in call.items()}
    keys = moved["keys_BGTS"]
    assert keys.stride() != call["keys_BGTS"].stride() or keys.data_ptr() % 64
    assert torch.equal(run(moved, kernel), run(call, kernel))


@every_kernel
@every_dtype
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_streams_expanded_from_one(dim: int, dtype: torch.dtype, kernel: str) -> None:
    call = decoding(heads=4, groups=2, width=32, rotary=8, total=300, window=2, dtype=dtype)
    for name, at in (("keys_BGTS", dim), ("rope_keys_BTR", max(dim - 1, 0))):
        call[name] = call[name].narrow(at, 0, 1).expand_as(call[name])
    copied = {
        name: value.contiguous() if isinstance(value, Tensor) else value for name, value in call.items()
    }
    assert torch.equal(run(call, kernel), run(copied, kernel))


def fenced(x: Tensor, at_end: bool, dim: int = 0, first: int = 0, last: int | None = None) -> Tensor:
    """x, of which nothing but first … last - 1 of a dimension may be touched: no page around has access.

    Those used border on the pages behind them, or on those before them.
    """
    x = x.movedim(dim, 0)
    used = x[first:last].contiguous()
    row = used[0].nbytes
    middle = -(-used.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fence = (x.shape[0] * row // mmap.PAGESIZE + 1) * mmap.PAGESIZE
    memory = mmap.mmap(-1, fence + middle + fence)
    begin = fence + (middle - used.nbytes if at_end else 0)
    whole = torch.frombuffer(memory, dtype=x.dtype, offset=begin - first * row, count=x.numel()).view(x.shape)
    whole[first:last] = used
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in (address, address + fence + middle):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(fence), 0) == 0
    return whole.movedim(0, dim)


class Fencing(TorchDispatchMode):
    """What is allocated is fenced too."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.at_end, self.count = at_end, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" not in func.__name__:
            return out
        self.count += 1
        return fenced(out, self.at_end)


SLOTS = {
    "keys_BGTS": 2,
    "values_BGTV": 2,
    "rope_keys_BTR": 1,
    "key_scales_BGTN": 2,
    "value_scales_BGTN": 2,
}


def as_pages(call: Call, page: int) -> Call:
    """One sequence cut into pages, in order, where it lies."""
    pages = {
        name: call[name].movedim(at, 0).unflatten(0, (-1, page)).squeeze(2).movedim(1, at)
        for name, at in SLOTS.items()
        if call.get(name) is not None
    }
    tables = torch.arange(call["keys_BGTS"].shape[2] // page, dtype=torch.int32)
    return {**call, **pages, "block_tables_BP": tables[None]}


def attend_between_fences(
    kernel: str, dtype: torch.dtype, kind: torch.dtype | None, width: int, window: int, turned: bool
) -> None:
    """One sequence of 292 slots, of which 9 or 12 … 280 are used: whole, as pages of one token (copied),
    and as pages of four (read where they lie)."""
    sizes = {"width": width, "rotary": 2 * width, "total": 292, "new": 3, "batch": 1}
    call = decoding(heads=6, groups=2, window=window, dtype=dtype, **sizes)
    call["values_BGTV"] = call["keys_BGTS"] + 1
    if turned:
        call["queries"] = torch.stack([call["queries"]] * window, 2)
        call.pop("key_weights_HW", None)
    if kind is not None:
        for streams, scales in (("keys_BGTS", "key_scales_BGTN"), ("values_BGTV", "value_scales_BGTN")):
            call[streams], call[scales] = quantise(call[streams], kind, 1 + (window > 1), torch.float16)
    for at_end, (first, page) in itertools.product((False, True), ((9, None), (9, 1), (12, 4))):
        call |= {"starts_BQ": torch.tensor([[first, 20, 13]]), "lengths_B": torch.tensor([281])}
        expected = run(call, kernel)
        around = {
            name: value
            if not isinstance(value, Tensor)
            else fenced(value, at_end, SLOTS[name], first, 281)
            if name in SLOTS
            else fenced(value, at_end)
            for name, value in call.items()
        }
        if page is not None:
            around = as_pages(around, page)
            around["block_tables_BP"] = fenced(
                around["block_tables_BP"], at_end, 1, first // page, -(-281 // page)
            )
        with Fencing(at_end) as fencing:
            out = run(around, kernel)
        assert fencing.count == 2
        assert torch.equal(out, expected)


def test_touches_nothing_beyond_what_is_used() -> None:
    """In a process of its own, since the alternative is its end."""
    cases = itertools.product(
        KERNELS, DTYPES, (None, torch.int8, torch.uint8), (30, 32), ((1, False), (4, False), (4, True))
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        for case in cases:
            try:
                process.submit(attend_between_fences, *case[:-1], *case[-1]).result()
            except BrokenProcessPool:
                pytest.fail(f"crashed: {case}")


# ---- threads -----------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many there are."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@every_kernel
@pytest.mark.parametrize("pool", ["of PyTorch", "its own"])
def test_the_number_of_threads_changes_nothing(
    pool: str, kernel: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if pool == "its own":
        monkeypatch.setattr(cpu, "_parallel", lambda: None)
    elif cpu._parallel() is None:
        pytest.skip("PyTorch has no GOMP_parallel here")
    for call in (
        decoding(total=3000, window=2),
        decoding(total=300, window=3, new=40),
        packed(),
        paged(packed(), 24),
    ):
        outputs = []
        for count in (1, 2, 5):
            threads(count)
            outputs.append(run(call, kernel))
        assert all(torch.equal(out, outputs[0]) for out in outputs[1:])


@every_kernel
def test_calls_at_the_same_time_do_not_disturb_each_other(
    kernel: str, threads: Callable[[int], None]
) -> None:
    threads(2)
    different = [decoding(total=total, window=2, new=new) for total, new in ((900, 1), (310, 20), (40, 40))]
    alone = [run(call, kernel) for call in different]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            together = pool.map(lambda call: run(call, kernel), different)
            assert all(torch.equal(out, expected) for out, expected in zip(together, alone, strict=True))


# ---- as a backend ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 41])
def test_lengths_out_of_range_are_refused(length: int) -> None:
    call = decoding(heads=2, groups=1, width=8, rotary=0, total=40, window=1, new=3)
    call["lengths_B"] = torch.tensor([40, length])
    with pytest.raises(ValueError, match=rf"lengths_B \[40, {length}\] must be from Q=3 to T=40"):
        stream_attention(**call, backend="cpu")


def test_double_precision_is_refused() -> None:
    call = in_float64(decoding(total=5, window=1))
    with pytest.raises(ValueError, match=r"backend='cpu' takes float32, .*, not torch\.float64"):
        stream_attention(**call, backend="cpu")


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs that the kernel has computed."""
    outputs, kernel = [], cpu.run

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        outputs.append(kernel(*arguments, **options))
        return outputs[-1]

    monkeypatch.setattr(cpu, "run", recorded)
    return outputs


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_auto_is_the_kernel_where_no_gradient_is_wanted(
    context: Callable[[], Any], kernel_calls: list[Tensor]
) -> None:
    call = decoding(heads=2, groups=1, width=8, rotary=4, total=20, window=2)
    with context():
        out = stream_attention(**{**call, "queries": call["queries"].requires_grad_()})
    assert torch.equal(out, kernel_calls.pop())
    assert torch.equal(stream_attention(**{**call, "queries": call["queries"].detach()}), kernel_calls.pop())


def test_auto_has_the_gradients_of_the_definition(kernel_calls: list[Tensor]) -> None:
    call = decoding(heads=2, groups=1, width=8, rotary=4, total=20, window=2)
    names = [name for name, value in call.items() if isinstance(value, Tensor)]
    for name in names:
        call[name].requires_grad_()
    gradients = [
        torch.autograd.grad(
            stream_attention(**call, backend=backend).square().sum(), [call[name] for name in names]
        )
        for backend in ("auto", "reference")
    ]
    assert all(map(torch.equal, *gradients))
    assert not kernel_calls


# ---- compiled ----------------------------------------------------------------------------------------------


def around(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    out = stream_attention(
        queries * 2, keys, None, scale=0.5, key_weights_HW=weights, value_weights_HW=weights, backend="cpu"
    )
    return out * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager_and_takes_any_length(backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(around, fullgraph=True, backend=counter)
    for total in (7, 8, 9, 20, 300):
        arguments = torch.randn(2, 4, 1, 8), torch.randn(2, 2, total, 8), torch.randn(4, 3)
        assert torch.equal(compiled(*arguments), around(*arguments))
    assert counter.frame_count == 2  # for the first length, and for every length
