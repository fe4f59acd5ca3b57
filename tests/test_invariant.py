"""The invariant: cached decoding equals the full forward pass, and allocated bytes equal predicted bytes.

For every mechanism x position x shift, in every way a cache is used. A scenario is a function of a model;
those in `IMPOSSIBLE` must raise an error that says why where the query is shifted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import CASES, FOREIGN, Case, assert_close, build, full, step, tokens
from torch import Tensor
from transformers import DynamicCache, StaticCache

from keyshift import KeyshiftCache, KeyshiftForCausalLM, UserError, cache_bytes
from keyshift.cache import GRANULE
from keyshift.configuration import CHOICES

T = 9


def new_cache(model: KeyshiftForCausalLM, max_length: int | None = None) -> KeyshiftCache:
    return KeyshiftCache(model.config, max_length)


def assert_bytes(cache: KeyshiftCache, model: KeyshiftForCausalLM, batch: int) -> None:
    """What is allocated is what is predicted for the cache's capacity."""
    predicted = cache_bytes(model.config, batch=batch, tokens=cache.capacity, dtype=model.dtype)
    assert cache.allocated_bytes == predicted


def decode(model: KeyshiftForCausalLM, ids: Tensor, cache: Any, pieces: list[int]) -> Tensor:
    """The logits of ``ids``, given to the model in pieces of these lengths."""
    return torch.cat([step(model, piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)


def token_by_token(model: KeyshiftForCausalLM) -> None:
    ids = tokens(2, T)
    for max_length in (None, T + 2):
        cache = new_cache(model, max_length)
        assert_close(decode(model, ids, cache, [1] * T), full(model, ids))
        assert cache.get_seq_length() == T
        assert cache.capacity == (max_length or GRANULE)
        assert_bytes(cache, model, 2)


def chunked_prefill_at_every_split(model: KeyshiftForCausalLM) -> None:
    ids = tokens(1, T)
    expected = full(model, ids)
    for split in range(1, T):
        cache = new_cache(model)
        assert_close(decode(model, ids, cache, [split, T - split]), expected)
        assert_bytes(cache, model, 1)
    assert_close(decode(model, ids, new_cache(model, 4), [2, 3, 1, T - 6]), expected)


def growth_past_a_granule(model: KeyshiftForCausalLM) -> None:
    ids = tokens(1, GRANULE + 12)
    pieces = [5, GRANULE - 6, 1, 1, 1, 10]
    for max_length in (None, 7):
        cache = new_cache(model, max_length)
        assert_close(decode(model, ids, cache, pieces), full(model, ids))
        assert cache.capacity == 2 * GRANULE
        assert_bytes(cache, model, 1)


def left_padding(model: KeyshiftForCausalLM) -> None:
    pads = (0, 2, 5)
    ids, mask = tokens(3, T), torch.ones(3, T, dtype=torch.long)
    for row, pad in enumerate(pads):
        ids[row, :pad] = mask[row, :pad] = 0
    for pieces in ([T], [1] * T, [3, 4, T - 7], [T - 1, 1]):
        cache, seen, logits = new_cache(model), 0, []
        for piece in ids.split(pieces, dim=1):
            seen += piece.shape[1]
            logits.append(step(model, piece, cache, attention_mask=mask[:, :seen]))
        for row, pad in enumerate(pads):
            assert_close(torch.cat(logits, 1)[row : row + 1, pad:], full(model, ids[row : row + 1, pad:]))
        assert_bytes(cache, model, 3)
    # Positions as generate() counts them, which give 0 or 1 to the padding.
    for filler in (0, 1):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, filler)
        for given in ({"attention_mask": mask}, {}):
            padded = full(model, ids, position_ids=positions, **given)
            for row, pad in enumerate(pads):
                assert_close(padded[row : row + 1, pad:], full(model, ids[row : row + 1, pad:]))


def right_padding(model: KeyshiftForCausalLM) -> None:
    ids, mask = tokens(2, T), torch.ones(2, T, dtype=torch.long)
    mask[1, 6:] = 0
    padded = full(model, ids, attention_mask=mask)
    assert_close(padded[1:, :6], full(model, ids[1:, :6]))
    assert_close(padded[:1], full(model, ids[:1]))


def packed_documents(model: KeyshiftForCausalLM) -> None:
    lengths = ([4, 1, T - 5], [2, T - 3, 1])
    ids = tokens(2, T)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    alone = torch.stack(
        [
            torch.cat([full(model, part[None])[0] for part in row_ids.split(row)])
            for row_ids, row in zip(ids, lengths, strict=True)
        ]
    )
    assert_close(full(model, ids, position_ids=positions), alone)
    assert_close(full(model, ids, document_ids=documents), alone)
    assert_close(full(model, ids, document_ids=documents, position_ids=positions), alone)
    for pieces in ([1] * T, [3, T - 3], [4, 1, T - 5], [6, T - 6], [7, 1, T - 8]):
        by_position, by_document = new_cache(model), new_cache(model)
        begin = 0
        for length in pieces:
            end = begin + length
            piece, expected = ids[:, begin:end], alone[:, begin:end]
            assert_close(step(model, piece, by_position, position_ids=positions[:, begin:end]), expected)
            assert_close(step(model, piece, by_document, document_ids=documents[:, :end]), expected)
            begin = end
        assert_bytes(by_document, model, 2)


def far_from_the_first_position(model: KeyshiftForCausalLM) -> None:
    ids, positions = tokens(1, T), torch.arange(3000, 3000 + T)[None]
    cache = new_cache(model)
    logits = [step(model, ids[:, i : i + 1], cache, position_ids=positions[:, i : i + 1]) for i in range(T)]
    assert_close(torch.cat(logits, 1), full(model, ids, position_ids=positions))


def beams_and_batches(model: KeyshiftForCausalLM) -> None:
    prompts, ends = tokens(2, 5), tokens(4, T - 5, seed=1)
    changes: dict[str, tuple[Callable[[KeyshiftCache], None], list[int]]] = {
        "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        "one beam takes over": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
    }
    for change, order in changes.values():
        for max_length in (None, T):
            cache = new_cache(model, max_length)
            step(model, prompts, cache)
            change(cache)
            ids = torch.cat((prompts[order], ends[: len(order)]), dim=1)
            expected = full(model, ids)[:, 5:]
            assert_close(decode(model, ids[:, 5:], cache, [1, T - 6]), expected)
            assert_bytes(cache, model, len(order))


def starting_again(model: KeyshiftForCausalLM) -> None:
    first, second = tokens(2, T), tokens(2, T, seed=1)
    for forget in (lambda cache: cache.reset(), lambda cache: cache.crop(-T)):
        cache = new_cache(model)
        decode(model, first, cache, [T - 1, 1])
        forget(cache)
        assert cache.get_seq_length() == 0
        assert_close(decode(model, second, cache, [1, 2, T - 3]), full(model, second))
        assert_bytes(cache, model, 2)


def rollback(model: KeyshiftForCausalLM) -> None:
    accepted, rejected = tokens(2, T), tokens(2, 4, seed=1)
    expected = full(model, accepted)
    for kept in (1, 2, 5):
        cache = new_cache(model)
        step(model, accepted[:, :kept], cache)
        decode(model, rejected, cache, [3, 1])
        cache.crop(-4)
        assert cache.get_seq_length() == kept
        assert_close(decode(model, accepted[:, kept:], cache, [1, T - kept - 1]), expected[:, kept:])
        assert_bytes(cache, model, 2)


def static_cache(model: KeyshiftForCausalLM) -> None:
    ids = tokens(2, T)
    for pieces in ([1] * T, [4, 1, T - 5]):
        cache = StaticCache(config=model.config, max_cache_len=T + 3)
        assert_close(decode(model, ids, cache, pieces), full(model, ids))
        assert_transformers_bytes(cache, model, T + 3)


def dynamic_cache(model: KeyshiftForCausalLM) -> None:
    ids = tokens(2, T)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        assert_close(decode(model, ids, cache, [4, 1, 1, T - 6]), full(model, ids))
        assert_transformers_bytes(cache, model, T)
        cache.crop(-3)
        assert_close(decode(model, ids[:, -3:], cache, [1, 2]), full(model, ids)[:, -3:])


def assert_transformers_bytes(cache: Any, model: KeyshiftForCausalLM, capacity: int) -> None:
    allocated = sum(stream.nbytes for layer in cache.layers for stream in (layer.keys, layer.values))
    assert allocated == cache_bytes(model.config, batch=2, tokens=capacity, dtype=model.dtype)


SCENARIOS = [
    token_by_token,
    chunked_prefill_at_every_split,
    growth_past_a_granule,
    left_padding,
    right_padding,
    packed_documents,
    far_from_the_first_position,
    beams_and_batches,
    starting_again,
    rollback,
    static_cache,
    dynamic_cache,
]

IMPOSSIBLE = {
    rollback: "shift='qkv' keeps the last raw queries, which a rollback cannot restore",
    static_cache: "shift='qkv' keeps raw queries, for which StaticCache has no place",
    dynamic_cache: "shift='qkv' keeps raw queries, for which DynamicCache has no place",
}


@pytest.mark.parametrize("case", [*CASES, *FOREIGN], ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_invariant(case: Case, scenario: Callable[[KeyshiftForCausalLM], None]) -> None:
    if case.shifts_query and scenario in IMPOSSIBLE:
        with pytest.raises(UserError, match=IMPOSSIBLE[scenario]):
            scenario(build(case))
    else:
        scenario(build(case))


def rms_error(actual: Tensor, truth: Tensor) -> float:
    return float((actual.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_invariant_in_bfloat16(case: Case) -> None:
    """Cached decoding is about as far from the truth (the same weights in float64) as the full forward is.

    The two round different intermediate results, so they cannot agree to the last bit. Measured over all
    cases: the full forward is off by 0.006 to 0.04 (RMS, 1 to 5 units of bfloat16's eps, 2^-7), and cached
    decoding by 0.8 to 1.25 times that.
    """
    ids = tokens(4, T)
    model, truth = build(case, torch.bfloat16), full(build(case, torch.float64), ids)
    error_of_full = rms_error(full(model, ids), truth)
    cache = new_cache(model)
    error_of_cached = rms_error(decode(model, ids, cache, [3, 1, 1, 1, T - 6]), truth)
    assert error_of_full < 8 * torch.finfo(torch.bfloat16).eps
    assert error_of_cached < 1.4 * error_of_full
    assert_bytes(cache, model, 4)


def test_cases_cover_every_choice_with_every_mechanism() -> None:
    """The settings that are drawn for each combination meet every mechanism, position and shift."""
    for axis in ("attention", "position", "shift"):
        for choice in CHOICES[axis]:
            chosen = [case for case in CASES if getattr(case, axis) == choice]
            assert {case.shift_window for case in chosen} == {2, 3, 4}
            assert {case.query_norm for case in chosen} == {False, True}
            assert {case.stream_norm for case in chosen} >= {False, True} or choice in ("mha", "gqa", "mqa")
            for field in ("shift_heads", "shift_weights", "rope_allocation", "mlp"):
                if (choice, field) != ("shared_kv", "rope_allocation"):
                    assert {getattr(case, field) for case in chosen} == set(CHOICES[field]), (choice, field)
    carved = [
        case for case in CASES if case.position == "decoupled_rope" and case.rope_allocation == "carved"
    ]
    assert {case.attention for case in carved} == set(CHOICES["attention"]) - {"shared_kv"}
