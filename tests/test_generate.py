"""transformers' `generate()` in all its ways, over mechanisms that take every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FEW, Case, build, full, step, tokens
from torch import Tensor
from transformers import GenerationConfig, StaticCache

from keyshift import KeyshiftCache, KeyshiftForCausalLM, UserError, cache_bytes
from keyshift.cache import GRANULE, StreamLayer

PROMPT, NEW = 6, 8

every_path = pytest.mark.parametrize("case", FEW, ids=str)
every_path_without_state = pytest.mark.parametrize(
    "case", [case for case in FEW if not case.shifts_query], ids=str
)


def generate(model: KeyshiftForCausalLM, ids: Tensor, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)


def greedy_by_hand(model: KeyshiftForCausalLM, ids: Tensor, new: int = NEW) -> Tensor:
    for _ in range(new):
        ids = torch.cat((ids, full(model, ids)[:, -1:].argmax(-1)), dim=1)
    return ids


@every_path
def test_greedy_is_the_most_likely_token_at_every_step_with_and_without_cache(case: Case) -> None:
    model, ids = build(case), tokens(2, PROMPT)
    expected = greedy_by_hand(model, ids)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)


@every_path
def test_a_prompt_of_one_token(case: Case) -> None:
    model, ids = build(case), tokens(1, 1)
    assert torch.equal(generate(model, ids), greedy_by_hand(model, ids))


@every_path
def test_sampling_draws_the_same_tokens_with_and_without_cache(case: Case) -> None:
    model, ids = build(case), tokens(2, PROMPT)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        drawn.append(
            generate(model, ids, do_sample=True, top_k=5, num_return_sequences=2, use_cache=use_cache)
        )
    assert torch.equal(*drawn)
    torch.manual_seed(2)
    assert not torch.equal(generate(model, ids, do_sample=True, top_k=5, num_return_sequences=2), drawn[0])


@every_path
def test_beam_search_is_the_same_with_and_without_cache(case: Case) -> None:
    model, ids = build(case), tokens(2, PROMPT)
    beams = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    cached, uncached = generate(model, ids, **beams), generate(model, ids, use_cache=False, **beams)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores)


@every_path
@pytest.mark.parametrize("beams", [1, 2])
def test_each_sequence_of_a_left_padded_batch_is_generated_as_if_alone(case: Case, beams: int) -> None:
    model, ids, mask = build(case), tokens(3, PROMPT), torch.ones(3, PROMPT, dtype=torch.long)
    for row, pad in enumerate((0, 1, 4)):
        ids[row, :pad] = mask[row, :pad] = 0
    together = generate(model, ids, attention_mask=mask, num_beams=beams)
    for row, pad in enumerate((0, 1, 4)):
        alone = generate(model, ids[row : row + 1, pad:], num_beams=beams)
        assert torch.equal(together[row, PROMPT:], alone[0, PROMPT - pad :])


@every_path
def test_pad_tokens_after_the_first_token_are_text(case: Case) -> None:
    """Without a mask, transformers takes every pad token for padding; only those on the left are."""
    model, ids = build(case), tokens(1, PROMPT)
    ids[0, 3] = ids[0, -1] = 7
    together = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=7, eos_token_id=None)
    assert torch.equal(together, greedy_by_hand(model, ids, 3))


@every_path
def test_the_cache_is_reused_over_the_turns_of_a_chat(case: Case) -> None:
    model, ids = build(case), tokens(1, PROMPT)
    cache = KeyshiftCache(model.config)
    for turn in range(3):
        reply = generate(model, ids, past_key_values=cache, max_new_tokens=4)
        assert torch.equal(reply, greedy_by_hand(model, ids, 4))
        assert cache.get_seq_length() == reply.shape[1] - 1
        ids = torch.cat((reply, tokens(1, 3, seed=turn + 1)), dim=1)


@every_path_without_state
def test_assisted_decoding_gives_the_tokens_of_greedy_decoding(case: Case) -> None:
    """Drafts by another model, by the model itself, and from the prompt; most are rejected, some not."""
    model, ids = build(case), tokens(1, 4).repeat(1, 3)
    expected = greedy_by_hand(model, ids, 12)
    for assistant in (build(FEW[1]), model):
        assert torch.equal(generate(model, ids, assistant_model=assistant, max_new_tokens=12), expected)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3, max_new_tokens=12), expected)


def test_assisted_decoding_of_a_shifted_query_is_refused() -> None:
    model = build(next(case for case in FEW if case.shifts_query))
    with pytest.raises(UserError, match="rollback cannot restore"):
        generate(model, tokens(1, 4).repeat(1, 3), assistant_model=build(FEW[0]), max_new_tokens=12)


@every_path_without_state
@pytest.mark.parametrize("beams", [1, 2])
def test_static_cache(case: Case, beams: int) -> None:
    model, ids, mask = build(case), tokens(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    ids[1, :2] = mask[1, :2] = 0
    options = {"attention_mask": mask, "num_beams": beams, "return_dict_in_generate": True}
    static = generate(model, ids, cache_implementation="static", disable_compile=True, **options)
    assert isinstance(static["past_key_values"], StaticCache)
    assert torch.equal(static.sequences, generate(model, ids, **options).sequences)


@every_path
@pytest.mark.parametrize("chunk", [1, 4])
def test_chunked_prefill(case: Case, chunk: int) -> None:
    model, ids, mask = build(case), tokens(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    ids[1, :2] = mask[1, :2] = 0
    expected = generate(model, ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, attention_mask=mask, prefill_chunk_size=chunk), expected)


@every_path
def test_generate_allocates_what_is_predicted_once_and_for_all(case: Case) -> None:
    model, ids = build(case), tokens(2, PROMPT)
    for options, batch in (({}, 2), ({"num_beams": 3}, 6)):
        cache = generate(model, ids, return_dict_in_generate=True, **options)["past_key_values"]
        assert isinstance(cache, KeyshiftCache)
        assert cache.get_seq_length() == PROMPT + NEW - 1
        assert cache.capacity in (PROMPT + NEW - 1, PROMPT + NEW)
        predicted = cache_bytes(model.config, batch=batch, tokens=cache.capacity, dtype=torch.float32)
        assert cache.allocated_bytes == predicted


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The capacity of every allocation from now on."""
    made: list[int] = []
    allocate = StreamLayer._allocate

    def counted(self: StreamLayer, like: tuple[Tensor, ...], capacity: int) -> None:
        made.append(capacity)
        allocate(self, like, capacity)

    monkeypatch.setattr(StreamLayer, "_allocate", counted)
    return made


def test_generate_allocates_once_per_layer(allocations: list[int]) -> None:
    model = build(FEW[0])
    generate(model, tokens(1, PROMPT), max_new_tokens=30)
    assert len(allocations) == model.config.num_hidden_layers


def test_growing_copies_each_token_a_bounded_number_of_times(allocations: list[int]) -> None:
    """Buffers grow by a quarter, so that all copies together are at most 1 / 0.25 = 4 times the last one."""
    layer, length = StreamLayer(), 5000
    token = torch.zeros(1, 1, 1, 2)
    for _ in range(length):
        layer.update(token, token)
    assert len(allocations) < 25
    assert sum(allocations[:-1]) < 4 * allocations[-1]
    assert allocations[-1] < 1.25 * length + GRANULE


def test_a_token_is_written_in_place() -> None:
    model, ids = build(FEW[0]), tokens(1, 3)
    cache = KeyshiftCache(model.config, max_length=10)
    step(model, ids, cache)
    address = cache.layers[0].keys.data_ptr()
    for i in range(7):
        step(model, ids[:, i % 3 : i % 3 + 1], cache)
    assert cache.layers[0].keys.data_ptr() == address
    assert cache.capacity == cache.get_seq_length() == 10


def test_continuous_batching_is_refused_with_a_way_out():
    model = build(FEW[0])
    with pytest.raises(UserError, match="use generate"):
        model.generate_batch(
            [[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2, eos_token_id=30)
        )


def test_a_cache_filled_under_inference_mode_is_continued_outside() -> None:
    model, ids = build(FEW[0]), tokens(1, PROMPT)
    cache = KeyshiftCache(model.config, max_length=2 * PROMPT + NEW)
    with torch.inference_mode():
        model(ids[:, :-1], past_key_values=cache, use_cache=True)
    assert torch.equal(generate(model, ids, past_key_values=cache), generate(model, ids))


def test_a_cache_of_another_dtype_is_refused() -> None:
    cache = KeyshiftCache(build(FEW[0]).config)
    step(build(FEW[0]), tokens(1, 3), cache)
    with pytest.raises(UserError, match=r"holds torch\.float32 and was given torch\.bfloat16"):
        step(build(FEW[0], torch.bfloat16), tokens(1, 1), cache)
