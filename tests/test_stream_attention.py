"""`stream_attention` against a definition from scratch: shift keys and values, then ordinary attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Call, begin_alike, calls, paged
from torch import Tensor

from keyshift.ops.stream_attention import cpu, reference, stream_attention
from keyshift.ops.stream_attention.library import OPERATOR
from keyshift.ops.stream_attention.quantised import quantise


def by_loops(
    queries: Tensor,
    keys_BGTS: Tensor,
    values_BGTV: Tensor | None,
    *,
    scale: float,
    starts_BQ: Tensor | None = None,
    lengths_B: Tensor | None = None,
    rope_queries_BHQR: Tensor | None = None,
    rope_keys_BTR: Tensor | None = None,
    key_weights_HW: Tensor | None = None,
    value_weights_HW: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """One query at a time: its document's keys and values are shifted, and nothing else is looked at."""
    keys, values = keys_BGTS, keys_BGTS if values_BGTV is None else values_BGTV
    batch, heads, new = queries.shape[0], queries.shape[1], queries.shape[-2]
    out = queries.new_zeros(batch, heads, new, values.shape[-1])
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // keys.shape[1])
            for i in range(new):
                length = keys.shape[2] if lengths_B is None else int(lengths_B[b])
                own = length - new + i
                start = 0 if starts_BQ is None else int(starts_BQ[b, i])
                slots = range(start, own + 1)
                scores = []
                for j in slots:
                    score = 0.0
                    if queries.dim() == 5:
                        for back in range(queries.shape[2]):
                            if j - back >= start:
                                score += float(queries[b, h, back, i] @ keys[b, group, j - back])
                    else:
                        key = shifted(keys[b, group], j, start, weights_of(key_weights_HW, h))
                        score = float(queries[b, h, i] @ key)
                    if rope_queries_BHQR is not None and rope_keys_BTR is not None:
                        score += float(rope_queries_BHQR[b, h, i] @ rope_keys_BTR[b, j])
                    score *= scale
                    scores.append(score - (float(slopes_H[h]) * (own - j) if slopes_H is not None else 0))
                largest = max(scores)
                weights = [math.exp(score - largest) for score in scores]
                for j, weight in zip(slots, weights, strict=True):
                    value = shifted(values[b, group], j, start, weights_of(value_weights_HW, h))
                    out[b, h, i] += weight / sum(weights) * value
    return out


def weights_of(weights_HW: Tensor | None, head: int) -> list[float]:
    return [1.0] if weights_HW is None else weights_HW[head].tolist()


def shifted(x_TS: Tensor, slot: int, start: int, weights: list[float]) -> Tensor:
    return sum(
        (weight * x_TS[slot - back] for back, weight in enumerate(weights) if slot - back >= start),
        torch.zeros_like(x_TS[0]),
    )


@given(calls())
@settings(max_examples=200, deadline=None)
def test_equals_its_definition(call: Call) -> None:
    torch.testing.assert_close(stream_attention(**call), by_loops(**call), rtol=1e-12, atol=1e-12)


@given(call=calls(), most=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_taking_queries_in_blocks_changes_nothing(call: Call, most: int) -> None:
    whole = stream_attention(**call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_SCORES", most)
        torch.testing.assert_close(stream_attention(**call), whole, rtol=1e-12, atol=1e-12)


PAGES = (1, 2, 3, 16, 24, 128)


@given(call=calls(), page=st.sampled_from(PAGES), alike=st.integers(0, 12), seed=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_pages_are_read_like_whole_sequences(call: Call, page: int, alike: int, seed: int) -> None:
    begin_alike(call, alike)
    out = stream_attention(**paged(call, page, seed=seed))
    torch.testing.assert_close(out, by_loops(**call), rtol=1e-12, atol=1e-12)


@given(call=calls(quantised=True), page=st.sampled_from(PAGES), alike=st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_quantised_pages_are_read_like_whole_sequences(call: Call, page: int, alike: int) -> None:
    begin_alike(call, alike)
    torch.testing.assert_close(stream_attention(**paged(call, page)), stream_attention(**call))


def ordinary(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "queries": torch.randn(2, 4, 3, 8, generator=generator),
        "keys_BGTS": torch.randn(2, 2, 9, 8, generator=generator),
        "values_BGTV": torch.randn(2, 2, 9, 5, generator=generator),
        "scale": 0.5,
    }
    return {**arguments, **changes}


def test_slots_after_the_queries_are_not_read() -> None:
    """The tail of a buffer that was never written may hold anything."""
    lengths = torch.tensor([8, 6])
    call = ordinary(key_weights_HW=torch.rand(4, 3), value_weights_HW=torch.rand(4, 3), lengths_B=lengths)
    expected = stream_attention(**call)
    stale = {name: call[name].clone() for name in ("keys_BGTS", "values_BGTV")}
    for stream in stale.values():
        for row, length in zip(stream, lengths, strict=True):
            row[:, length:] = torch.nan
    torch.testing.assert_close(stream_attention(**{**call, **stale}), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_keeps_its_dtype_and_scores_in_float32(dtype: torch.dtype) -> None:
    call = ordinary()
    low = {
        name: call[name].to(dtype) if isinstance(call[name], Tensor) else call[name]
        for name in ("queries", "keys_BGTS", "values_BGTV", "scale")
    }
    exact = stream_attention(**{k: v.double() if isinstance(v, Tensor) else v for k, v in low.items()})
    out = stream_attention(**low)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps


def test_gradients() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 2, 3), (1, 1, 4, 3), (1, 2, 2, 2), (1, 4, 2), (2, 2), (2, 3))
    ]
    starts = torch.tensor([[0, 1]])

    def attend(queries, stream, rope_queries, rope_keys, key_weights, value_weights):
        return stream_attention(
            queries,
            stream,
            None,
            scale=0.5,
            starts_BQ=starts,
            rope_queries_BHQR=rope_queries,
            rope_keys_BTR=rope_keys,
            key_weights_HW=key_weights,
            value_weights_HW=value_weights,
        )

    assert torch.autograd.gradcheck(attend, tensors)


def test_gradients_of_pages() -> None:
    """A page that two sequences share has the sum of theirs, also through a compiled graph."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 2, 1, 3), (4, 1, 2, 3), (4, 2, 2), (2, 2, 1, 2))
    ]
    tables = torch.tensor([[3, 0, -7], [3, 2, 1]])
    lengths = torch.tensor([3, 5])

    def attend(queries, pages, rope_pages, rope_queries):
        return stream_attention(
            queries,
            pages,
            None,
            scale=0.5,
            lengths_B=lengths,
            rope_queries_BHQR=rope_queries,
            rope_keys_BTR=rope_pages,
            block_tables_BP=tables,
        )

    assert torch.autograd.gradcheck(attend, tensors)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(each(*tensors).square().sum(), tensors) for each in (compiled, attend)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def cut(**changes: Any) -> dict[str, Any]:
    """The ordinary call with its nine slots as pages of three, and these changes."""
    tables = {"block_tables_BP": torch.tensor([[0, 1, 2], [3, 4, 5]]), "lengths_B": torch.tensor([9, 7])}
    pages = {
        name: ordinary()[name].unflatten(2, (3, 3)).movedim(2, 1).flatten(0, 1)
        for name in ("keys_BGTS", "values_BGTV")
    }
    return ordinary(**{**pages, **tables, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lengths_B": None}, "lengths_B must be given with block_tables_BP"),
        (
            {"block_tables_BP": torch.zeros(2, 3)},
            "block_tables_BP is torch.float32; it must be torch.int64 or",
        ),
        (
            {"block_tables_BP": torch.zeros(6, dtype=torch.int32)},
            r"block_tables_BP \(6,\) must be \(2, any\)",
        ),
        ({"block_tables_BP": torch.zeros(3, 3, dtype=torch.int32)}, r"block_tables_BP .* must be \(2, any\)"),
        ({"block_tables_BP": torch.zeros(2, 0, dtype=torch.int32)}, r"block_tables_BP .* must be \(2, any\)"),
        ({"queries": torch.zeros(2, 4, 10, 8)}, "Q=10 is more than the T=9 .* P=3 pages of block_tables_BP"),
        ({"keys_BGTS": torch.zeros(0, 2, 3, 8), "values_BGTV": None}, "keys_BGTS .* no pages"),
        ({"values_BGTV": torch.zeros(5, 2, 3, 5)}, "values_BGTV"),
        (
            {"rope_queries_BHQR": torch.zeros(2, 4, 3, 2), "rope_keys_BTR": torch.zeros(2, 3, 2)},
            r"rope_keys_BTR \(2, 3, 2\) must be \(6, 3, 2\)",
        ),
    ],
)
def test_errors_of_pages_name_the_argument(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        stream_attention(**cut(**changes))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"lengths_B": torch.tensor([9, 10])},
            r"lengths_B \[9, 10\] must be from Q=3 to 9, the slots of block_tables_BP's P=3 pages",
        ),
        ({"lengths_B": torch.tensor([2, 9])}, r"lengths_B \[2, 9\] must be from Q=3"),
        (
            {"block_tables_BP": torch.tensor([[0, 1, 2], [3, 6, 5]])},
            "block_tables_BP: sequence 1 has a page that is not from 0 to 5",
        ),
        (
            {"block_tables_BP": torch.tensor([[0, -1, 2], [3, 4, 5]])},
            "block_tables_BP: sequence 0 has a page",
        ),
    ],
)
def test_pages_that_are_not_there_are_refused(changes: dict[str, Any], named: str, backend: str) -> None:
    if backend == "cpu" and (reason := cpu.missing()) is not None:
        pytest.skip(reason)
    with pytest.raises(ValueError, match=named):
        stream_attention(**cut(**changes), backend=backend)


def test_entries_that_are_not_followed_may_be_anything() -> None:
    """Behind a sequence's length, and before its documents."""
    changes = {"lengths_B": torch.tensor([9, 6]), "starts_BQ": torch.tensor([[3, 4, 8], [0, 0, 0]])}
    stray = torch.tensor([[-1, 1, 2], [3, 4, 99]])
    for backend in ("auto", "reference"):
        expected = stream_attention(**cut(**changes), backend=backend)
        assert torch.equal(
            stream_attention(**cut(**changes, block_tables_BP=stray), backend=backend), expected
        )


def quantised(kind: torch.dtype, blocks: int = 1) -> dict[str, Any]:
    keys, scales = quantise(ordinary()["keys_BGTS"], kind, blocks, torch.float32)
    return ordinary(keys_BGTS=keys, key_scales_BGTN=scales)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"queries": torch.zeros(4, 3, 8)}, "queries"),
        ({"keys_BGTS": torch.zeros(2, 9, 8)}, "keys"),
        ({"keys_BGTS": torch.zeros(1, 2, 9, 8)}, "keys_BGTS"),
        ({"keys_BGTS": torch.zeros(2, 2, 9, 7)}, "keys_BGTS"),
        ({"keys_BGTS": torch.zeros(2, 3, 9, 8)}, "keys_BGTS"),
        ({"values_BGTV": torch.zeros(2, 2, 8, 5)}, "values_BGTV"),
        ({"queries": torch.zeros(2, 4, 10, 8)}, "queries"),
        ({"lengths_B": torch.zeros(3, dtype=torch.long)}, "lengths_B"),
        ({"lengths_B": torch.zeros(2)}, "lengths_B"),
        ({"starts_BQ": torch.zeros(2, 4, dtype=torch.long)}, "starts_BQ"),
        ({"rope_queries_BHQR": torch.zeros(2, 4, 3, 2)}, "rope_keys_BTR"),
        ({"rope_keys_BTR": torch.zeros(2, 9, 2)}, "rope_queries_BHQR"),
        (
            {"rope_queries_BHQR": torch.zeros(2, 4, 3, 2), "rope_keys_BTR": torch.zeros(2, 9, 3)},
            "rope_keys_BTR",
        ),
        (
            {"rope_queries_BHQR": torch.zeros(2, 2, 3, 2), "rope_keys_BTR": torch.zeros(2, 9, 2)},
            "rope_queries_BHQR",
        ),
        (
            {"rope_queries_BHQR": torch.zeros(2, 4, 3, 2), "rope_keys_BTR": torch.zeros(2, 8, 2)},
            "rope_keys_BTR",
        ),
        ({"queries": torch.zeros(2, 4, 2, 3, 8), "key_weights_HW": torch.zeros(4, 2)}, "key_weights_HW"),
        ({"key_weights_HW": torch.zeros(2, 2)}, "key_weights_HW"),
        ({"value_weights_HW": torch.zeros(3, 2)}, "value_weights_HW"),
        ({"slopes_H": torch.zeros(3)}, "slopes_H"),
        ({"queries": torch.zeros(2, 4, 3, 8, dtype=torch.int32)}, "queries are torch.int32"),
        ({"queries": torch.zeros(2, 4, 0, 8)}, "queries .* empty"),
        ({"queries": torch.zeros(2, 4, 0, 3, 8)}, "queries .* empty"),
        ({"keys_BGTS": torch.zeros(2, 0, 9, 8)}, "keys_BGTS"),
        ({"keys_BGTS": torch.zeros(2, 2, 9, 8, dtype=torch.float64)}, "keys_BGTS is torch.float64"),
        ({"values_BGTV": torch.zeros(2, 2, 9, 5, dtype=torch.float16)}, "values_BGTV is torch.float16"),
        ({"values_BGTV": torch.zeros(2, 2, 9, 0)}, "values_BGTV"),
        ({"starts_BQ": torch.zeros(2, 3, dtype=torch.int16)}, "starts_BQ is torch.int16"),
        ({"slopes_H": torch.zeros(4, dtype=torch.int32)}, "slopes_H is torch.int32"),
        ({"key_weights_HW": torch.zeros(4, 0)}, "key_weights_HW"),
        ({"value_weights_HW": torch.zeros(4, 0)}, "value_weights_HW"),
        ({"key_scales_BGTN": torch.zeros(2, 2, 9, 1)}, "key_scales_BGTN must be None"),
        ({"value_scales_BGTN": torch.zeros(2, 2, 9, 1)}, "value_scales_BGTN must be None"),
        (
            {"values_BGTV": None, "value_scales_BGTN": torch.zeros(2, 2, 9, 1)},
            "value_scales_BGTN must be None",
        ),
        ({"backend": "gpu"}, "backend='gpu' is not one of auto, cpu, triton, reference"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        stream_attention(**ordinary(**changes))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"key_scales_BGTN": None}, "key_scales_BGTN must be given"),
        ({"key_scales_BGTN": torch.ones(2, 2, 8, 1)}, "key_scales_BGTN"),
        ({"key_scales_BGTN": torch.ones(2, 2, 9, 0)}, "key_scales_BGTN"),
        ({"key_scales_BGTN": torch.ones(2, 2, 9, 3)}, "key_scales_BGTN .* divide the 8 channels"),
        ({"key_scales_BGTN": torch.ones(2, 2, 9, 1, dtype=torch.int32)}, "key_scales_BGTN is torch.int32"),
        ({"queries": torch.zeros(2, 4, 3, 6)}, "keys_BGTS"),
    ],
)
def test_errors_of_quantised_streams_name_the_argument(
    kind: torch.dtype, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        stream_attention(**{**quantised(kind), **changes})


def with_every_argument() -> Call:
    call = quantised(torch.int8)
    values, scales = quantise(call["values_BGTV"], torch.int8, 5, torch.float32)
    return {
        **call,
        "values_BGTV": values,
        "value_scales_BGTN": scales,
        "starts_BQ": torch.zeros(2, 3, dtype=torch.long),
        "lengths_B": torch.tensor([9, 7]),
        "rope_queries_BHQR": torch.ones(2, 4, 3, 2),
        "rope_keys_BTR": torch.ones(2, 9, 2),
        "key_weights_HW": torch.ones(4, 2),
        "value_weights_HW": torch.ones(4, 2),
        "slopes_H": torch.ones(4),
        "block_tables_BP": torch.tensor([[1], [0]]),
    }


@pytest.mark.parametrize("name", sorted(set(with_every_argument()) - {"queries", "scale"}))
def test_tensors_are_on_one_device(name: str) -> None:
    call = with_every_argument()
    with pytest.raises(ValueError, match=f"{name} is on meta and queries are on cpu"):
        stream_attention(**{**call, name: call[name].to("meta")})


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("name", ["queries", "values_BGTV", "slopes_H"])
def test_gradients_are_refused_by_a_backend_without_them(backend: str, name: str) -> None:
    call = ordinary(slopes_H=torch.ones(4))
    call[name].requires_grad_()
    with pytest.raises(ValueError, match=f"backend='{backend}' has no gradients; use 'reference'"):
        stream_attention(**call, backend=backend)


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where there was no compiler at installation."""
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / cpu.LIBRARY.name)
    for cached in (cpu.missing, cpu._library):
        cached.cache_clear()
    yield
    for cached in (cpu.missing, cpu._library):
        cached.cache_clear()


def test_a_missing_backend_is_an_error_where_it_is_named_and_else_none(no_library: None) -> None:
    with pytest.raises(
        RuntimeError, match=r"backend='cpu' is not on this machine: .* install g\+\+ or clang"
    ):
        stream_attention(**ordinary(), backend="cpu")
    assert torch.equal(stream_attention(**ordinary()), stream_attention(**ordinary(), backend="reference"))


def test_a_library_that_cannot_be_loaded_is_missing(no_library: None) -> None:
    """It was compiled for another machine, or is damaged."""
    cpu.LIBRARY.write_bytes(b"not a library")
    with pytest.raises(
        RuntimeError, match=r"backend='cpu' is not on this machine: .* install keyshift again"
    ):
        stream_attention(**ordinary(), backend="cpu")
    assert torch.equal(stream_attention(**ordinary()), stream_attention(**ordinary(), backend="reference"))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "call",
    [ordinary(), {**with_every_argument(), "block_tables_BP": None}, with_every_argument(), cut()],
    ids=["few arguments", "no pages", "every argument", "pages"],
)
def test_is_an_operator_as_pytorch_wants_them(call: Call, backend: str) -> None:
    names = [argument.name for argument in OPERATOR._schema.arguments]
    options = {**dict.fromkeys(names), **call, "backend": backend}
    torch.library.opcheck(OPERATOR, tuple(options[name] for name in names))


def test_compiled_with_gradients() -> None:
    """They are the definition's, and without a break of the graph."""
    call = ordinary(key_weights_HW=torch.rand(4, 3))
    compiled = torch.compile(stream_attention, fullgraph=True, backend="aot_eager")
    for name in ("queries", "keys_BGTS", "values_BGTV", "key_weights_HW"):
        call[name].requires_grad_()
        gradients = [
            torch.autograd.grad(attend(**call).square().sum(), call[name])[0]
            for attend in (compiled, stream_attention)
        ]
        torch.testing.assert_close(*gradients)


def test_forward_mode_gradients_are_those_of_the_backward_mode() -> None:
    stream = torch.randn(1, 1, 5, 4)

    def loss(queries: Tensor) -> Tensor:
        return stream_attention(queries, stream, None, scale=0.5).square().sum()

    queries = torch.randn(1, 2, 1, 4)
    torch.testing.assert_close(torch.func.jacfwd(loss)(queries), torch.func.jacrev(loss)(queries))


def test_scores_beyond_half_precision_do_not_overflow() -> None:
    """|q · k| is 80,000 here, more than float16 has; the scale comes after."""
    queries = torch.full((1, 1, 1, 8), 100.0, dtype=torch.float16)
    keys = torch.stack((queries[0, 0, 0], -queries[0, 0, 0]))[None, None]
    out = stream_attention(queries, keys, None, scale=0.1, backend="reference")
    torch.testing.assert_close(out, queries)
