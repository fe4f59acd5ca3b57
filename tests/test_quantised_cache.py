"""Rounded caches: what 8 and 4 bits keep, and that decoding from them is a full pass over rounded streams.

The second way to compute the same is a model that rounds its streams in full passes too (`rounding`). To it a
rounded cache makes no difference, in any scenario of the invariant and any way to generate. Comparisons are
made in double precision, where two ways of computing a number do not round it to neighbouring integers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_invariant as invariant
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import NEW, PROMPT, generate, greedy_by_hand
from tiny import CASES, FEW, Case, build, case, full, relative_error, step, tokens
from torch import Tensor
from transformers import GenerationConfig

from keyshift import (
    KeyshiftCache,
    KeyshiftConfig,
    KeyshiftForCausalLM,
    UserError,
    cache_bytes,
    cache_bytes_per_token,
)
from keyshift.attention.frame import Frame
from keyshift.attention.module import Attention
from keyshift.attention.rotary import Rotation, rotate
from keyshift.cache import CACHE_DTYPES, SCALE_DTYPE
from keyshift.ops.stream_attention.quantised import LARGEST, dequantise, quantise

MODELS = [*FEW, case("gqa", "decoupled_rope", "kv")]
"""Every path through the attention module, and a key stream beside a rotary key."""

SIZES = {"head_dim": 64, "kv_lora_rank": 64}
"""A head has two blocks of 32 channels."""

SCENARIOS = [
    each
    for each in invariant.SCENARIOS
    if each not in (invariant.right_padding, invariant.static_cache, invariant.dynamic_cache)
]
"""Those that make a `KeyshiftCache`."""

every_kind = pytest.mark.parametrize("kind", CACHE_DTYPES.values(), ids=CACHE_DTYPES)
every_cache_dtype = pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
every_model = pytest.mark.parametrize("case", MODELS, ids=str)
every_model_without_state = pytest.mark.parametrize(
    "case", [case for case in MODELS if not case.shifts_query], ids=str
)


# ---- numbers -----------------------------------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn, kind: torch.dtype) -> tuple[Tensor, int]:
    """A stream [tokens, S] of numbers of any magnitude to 1e5, and into how many blocks it is divided."""
    count, blocks, pairs = (draw(st.integers(1, most)) for most in (2, 3, 3))
    width = blocks * pairs * 2
    numbers = st.lists(st.floats(-1e5, 1e5, width=32), min_size=count * width, max_size=count * width)
    return torch.tensor(draw(numbers)).view(count, width), blocks


@every_kind
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_number_is_off_by_at_most_half_a_step_and_the_rounding_of_its_scale(
    kind: torch.dtype, scale_dtype: torch.dtype, data: st.DataObject
) -> None:
    """A scale is rounded relatively, or, below the smallest normal number, to a multiple of the smallest."""
    stream, blocks = data.draw(streams(kind))
    integers, scales = quantise(stream, kind, blocks, scale_dtype)
    restored = dequantise(integers, scales, torch.float64)
    of_scales = torch.finfo(scale_dtype)
    parts = stream.double().unflatten(-1, (blocks, -1))
    exact = parts.abs().amax(-1) / LARGEST[kind]
    off = exact.clamp_min(of_scales.smallest_normal) * of_scales.eps / 2
    bound = (scales.double() / 2 + LARGEST[kind] * off) * (1 + 1e-6)
    assert ((restored.unflatten(-1, (blocks, -1)) - parts).abs() <= bound[..., None]).all()
    assert (restored[stream == 0] == 0).all()


@every_kind
@given(magnitude=st.floats(0.01, 1e5), signs=st.lists(st.sampled_from((-1, 1)), min_size=8, max_size=8))
@settings(deadline=None)
def test_a_block_of_one_magnitude_is_off_by_the_rounding_of_its_scale(
    kind: torch.dtype, magnitude: float, signs: list[int]
) -> None:
    integers, scales = quantise(magnitude * torch.tensor(signs), kind, 1, torch.float16)
    restored = dequantise(integers, scales, torch.float64)
    assert torch.equal(restored, LARGEST[kind] * scales.double() * torch.tensor(signs))
    assert abs(float(restored.abs().max()) / magnitude - 1) <= 0.5001 * torch.finfo(torch.float16).eps


def test_four_bits_are_packed_by_halves() -> None:
    """Byte k has channels k and k + S/2; with a largest magnitude of 7 in each block the scales are 1."""
    stream = torch.tensor([[-7.0, 1, 2, -3, 0, 7, -4, 5], [7, 6, -5, 4, 3, -7, 1, 0]])
    packed, scales = quantise(stream, torch.uint8, 2, torch.float16)
    assert (scales == 1).all()
    assert torch.equal((packed & 15).float() - 8, stream[:, :4])
    assert torch.equal((packed >> 4).float() - 8, stream[:, 4:])
    assert torch.equal(dequantise(packed, scales, torch.float32), stream)


@every_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e9])
def test_a_block_that_has_no_scale_reads_as_nan(kind: torch.dtype, bad: float) -> None:
    """NaN and infinity stay visible, and so does what is too large for a float16 scale; and only there."""
    stream = torch.tensor([1.0, 2, -3, 0, 4, bad, -6, 7])
    restored = dequantise(*quantise(stream, kind, 4, torch.float16), torch.float32)
    assert restored[4:6].isnan().all()
    assert torch.equal(restored.isfinite(), torch.tensor([True] * 4 + [False] * 2 + [True] * 2))


@pytest.mark.parametrize(
    ("width", "kind", "blocks"), [(8, torch.int8, 3), (6, torch.uint8, 4), (7, torch.uint8, 1)]
)
def test_channels_that_do_not_divide_are_refused(width: int, kind: torch.dtype, blocks: int) -> None:
    with pytest.raises(ValueError, match=f"{width} channels does not divide into {blocks} blocks"):
        quantise(torch.ones(2, width), kind, blocks, torch.float16)


# ---- decoding ----------------------------------------------------------------------------------------------


@functools.cache
def plain(case: Case, dtype: torch.dtype = torch.float64) -> KeyshiftForCausalLM:
    """The case's model with larger heads; do not change it."""
    torch.manual_seed(0)
    return KeyshiftForCausalLM(case.config(**SIZES)).eval().to(dtype)


@functools.cache
def rounding(case: Case, cache_dtype: str, dtype: torch.dtype = torch.float64) -> KeyshiftForCausalLM:
    """The same model, but full passes see its streams as they would come out of a rounded cache."""
    model = copy.deepcopy(plain(case, dtype))
    for block in model.model.layers:
        round_streams(block.self_attn, cache_dtype)
    return model


def round_streams(attention: Attention, cache_dtype: str) -> None:
    """Attention among new tokens rounds what it is given as a cache would: content, keys of whole-head RoPE
    rotated; and the rotary key to 16 bits."""
    attend, groups = attention._dense, attention.source.stream_heads

    def rounded(stream: Tensor) -> Tensor:
        width = stream.shape[-1]
        blocks = width // 32 if cache_dtype == "int4" and width % 32 == 0 else 1
        return dequantise(*quantise(stream, CACHE_DTYPES[cache_dtype], blocks, SCALE_DTYPE), stream.dtype)

    def attend_to_rounded(
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor,
        rope_key: Tensor | None,
        frame: Frame,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        values = rounded(values.unflatten(-1, (groups, -1))).flatten(-2)
        if keys is not None:
            heads = keys.unflatten(-1, (groups, -1))
            if attention.rotates_heads:
                there = frame.rotations[0]
                heads = rotate(rounded(rotate(heads, there)), Rotation(there.cos, -there.sin))
            else:
                heads = rounded(heads)
            keys = heads.flatten(-2)
        if rope_key is not None:
            rope_key = rope_key.half().to(rope_key)
        return attend(queries, keys, values, rope_key, frame, **kwargs)

    attention._dense = attend_to_rounded


@every_model
@every_cache_dtype
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_decoding_equals_a_full_pass_over_rounded_streams(
    scenario: Callable[[KeyshiftForCausalLM], None],
    cache_dtype: str,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invariant, "KeyshiftCache", functools.partial(KeyshiftCache, cache_dtype=cache_dtype))
    monkeypatch.setattr(invariant, "cache_bytes", functools.partial(cache_bytes, cache_dtype=cache_dtype))
    model = rounding(case, cache_dtype)
    if case.shifts_query and scenario in invariant.IMPOSSIBLE:
        with pytest.raises(UserError, match=invariant.IMPOSSIBLE[scenario]):
            scenario(model)
    else:
        scenario(model)


@every_model
@every_cache_dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_decodes_about_as_well_as_its_full_pass(
    dtype: torch.dtype, cache_dtype: str, case: Case
) -> None:
    """A number may be rounded to the neighbouring integer there: measured, the error is up to 1e-4 in float32
    (rounding itself makes 7e-3 and more), and in bfloat16 0.9 to 1.1 times the full pass's."""
    ids = tokens(4, invariant.T)
    model = rounding(case, cache_dtype, dtype)
    truth = full(rounding(case, cache_dtype, dtype=torch.float64), ids)
    error_of_full = invariant.rms_error(full(model, ids), truth)
    cache = KeyshiftCache(model.config, cache_dtype=cache_dtype)
    logits = invariant.decode(model, ids, cache, [3, 1, 1, 1, invariant.T - 6])
    assert invariant.rms_error(logits, truth) < max(1.4 * error_of_full, 1e-3)


@every_model
def test_fewer_bits_cost_more_and_the_first_call_nothing(case: Case) -> None:
    """Tokens of the first call, and no later ones, attend to each other as they are."""
    model, ids = plain(case), tokens(2, 9)
    logits = {}
    for cache_dtype in (None, *CACHE_DTYPES):
        cache = KeyshiftCache(model.config, cache_dtype=cache_dtype)
        logits[cache_dtype] = invariant.decode(model, ids, cache, [4, 5])
    for cache_dtype in CACHE_DTYPES:
        assert torch.equal(logits[cache_dtype][:, :4], logits[None][:, :4])
    off = [relative_error(logits[each][:, 4:], logits[None][:, 4:]) for each in CACHE_DTYPES]
    assert 1e-3 < off[0] < off[1] / 4


@every_model
@every_cache_dtype
def test_nan_in_a_cached_token_reaches_the_tokens_after_it(case: Case, cache_dtype: str) -> None:
    model, ids = build(case), tokens(1, 6)
    embedded = model.get_input_embeddings()(ids).detach()
    embedded[:, 3] = torch.nan
    cache = KeyshiftCache(model.config, cache_dtype=cache_dtype)
    with torch.no_grad():
        logits = [
            model(inputs_embeds=one, past_key_values=cache, use_cache=True).logits
            for one in embedded.split(1, dim=1)
        ]
    assert torch.cat(logits[:3]).isfinite().all()
    assert torch.cat(logits[3:]).isnan().all()


# ---- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
@every_cache_dtype
def test_allocated_bytes_are_predicted_bytes(cache_dtype: str, case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build(case, dtype)
        cache = KeyshiftCache(model.config, max_length=5, cache_dtype=cache_dtype)
        step(model, tokens(2, 3), cache)
        predicted = cache_bytes(model.config, batch=2, tokens=5, dtype=dtype, cache_dtype=cache_dtype)
        assert cache.allocated_bytes == predicted


@pytest.mark.parametrize(
    "sizes",
    [
        {"attention": "gqa", "position": "none", "head_dim": 7},
        {"attention": "gva", "position": "alibi", "head_dim": 7},
        {"attention": "mla", "position": "none", "kv_lora_rank": 7},
    ],
)
def test_four_bits_of_an_odd_head_are_refused(sizes: dict[str, Any]) -> None:
    config = KeyshiftConfig(**sizes)
    for refused in (
        lambda: KeyshiftCache(config, cache_dtype="int4"),
        lambda: cache_bytes_per_token(config, torch.float32, "int4"),
    ):
        with pytest.raises(UserError, match=r"cache_dtype='int4' .* a head of 7 is odd: use 'int8'"):
            refused()
    KeyshiftCache(config, cache_dtype="int8")


# ---- generate() --------------------------------------------------------------------------------------------


@every_model
@every_cache_dtype
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
    ],
    ids=["greedy", "beams", "sampling"],
)
def test_generation_is_that_of_a_model_that_rounds(
    options: dict[str, Any], cache_dtype: str, case: Case
) -> None:
    """In a cache of exactly the length, as large as predicted."""
    model, ids = rounding(case, cache_dtype), tokens(2, PROMPT)
    torch.manual_seed(1)
    rounded = generate(model, ids, cache_dtype=cache_dtype, return_dict_in_generate=True, **options)
    torch.manual_seed(1)
    assert torch.equal(rounded.sequences, generate(model, ids, use_cache=False, **options))
    cache = rounded["past_key_values"]
    assert cache.get_seq_length() == PROMPT + NEW - 1
    assert cache.capacity in (PROMPT + NEW - 1, PROMPT + NEW)
    batch = 2 * max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    assert cache.allocated_bytes == cache_bytes(
        model.config, batch=batch, tokens=cache.capacity, dtype=model.dtype, cache_dtype=cache_dtype
    )


@every_model_without_state
@every_cache_dtype
def test_assisted_decoding_gives_the_tokens_of_greedy_decoding(case: Case, cache_dtype: str) -> None:
    """Drafts by another model and from the prompt; most are rejected."""
    model, ids = rounding(case, cache_dtype), tokens(1, 4).repeat(1, 3)
    expected = greedy_by_hand(model, ids, 12)
    for drafts in ({"assistant_model": plain(FEW[1])}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(
            generate(model, ids, cache_dtype=cache_dtype, max_new_tokens=12, **drafts), expected
        )


@every_cache_dtype
def test_a_cache_of_the_callers_is_made_as_long_as_needed_unless_it_has_a_length(cache_dtype: str) -> None:
    model, ids = rounding(MODELS[-1], cache_dtype), tokens(2, PROMPT)
    for max_length in (None, 50):
        cache = KeyshiftCache(model.config, max_length, cache_dtype)
        assert torch.equal(generate(model, ids, past_key_values=cache), greedy_by_hand(model, ids))
        assert cache.capacity in ((50,) if max_length else (PROMPT + NEW - 1, PROMPT + NEW))


def test_a_cache_dtype_beside_a_cache_is_refused() -> None:
    model = plain(FEW[0])
    for name in ("past_key_values", "cache"):
        with pytest.raises(UserError, match=f"cache_dtype='int8' does not go with {name}"):
            generate(model, tokens(1, 2), cache_dtype="int8", **{name: KeyshiftCache(model.config)})


@pytest.mark.parametrize("unknown", ["int9", torch.int8])
def test_an_unknown_cache_dtype_is_refused_with_a_suggestion(unknown: Any) -> None:
    model = plain(FEW[0])
    for refused in (
        lambda: generate(model, tokens(1, 2), cache_dtype=unknown),
        lambda: KeyshiftCache(model.config, cache_dtype=unknown),
        lambda: cache_bytes(model.config, batch=1, tokens=1, dtype=torch.float32, cache_dtype=unknown),
    ):
        with pytest.raises(UserError, match=r"cache_dtype=.*int.* did you mean 'int8'\?"):
            refused()


def test_a_rounded_cache_has_no_gradients() -> None:
    model = build(FEW[0])
    with pytest.raises(UserError, match=r"cache_dtype='int8' has no gradients"):
        model(tokens(1, 3), past_key_values=KeyshiftCache(model.config, cache_dtype="int8"), use_cache=True)


@pytest.mark.parametrize(
    "against", [{"use_cache": False}, {"cache_implementation": "static"}], ids=lambda case: next(iter(case))
)
@pytest.mark.parametrize("configured", [False, True])
def test_what_a_cache_dtype_does_not_go_with(against: dict[str, Any], configured: bool) -> None:
    """As keywords, or in a generation config."""
    options: dict[str, Any] = {"cache_dtype": "int8", **against}
    if configured:
        options = {"generation_config": GenerationConfig(**options)}
    with pytest.raises(UserError, match=f"cache_dtype='int8' does not go with {next(iter(against))}"):
        build(FEW[0]).generate(tokens(1, 3), max_new_tokens=2, **options)


def test_a_generation_config_may_name_the_cache_dtype() -> None:
    settings = GenerationConfig(cache_dtype="int8", max_new_tokens=2, return_dict_in_generate=True)
    cache = build(FEW[0]).generate(tokens(1, 3), generation_config=settings).past_key_values
    assert cache.cache_dtype == "int8"
