"""Our decoder with another library's weights gives that library's logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CASES, FEW, SIZES, Case, assert_close, build, full, step, tokens
from torch import Tensor
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from keyshift import KeyshiftCache, KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.attention.rotary import alibi_slopes

T = 40

SHARED = {
    name: SIZES[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "initializer_range",
    )
}


def copied(config: KeyshiftConfig, weights: dict[str, Tensor]) -> KeyshiftForCausalLM:
    model = KeyshiftForCausalLM(config).eval()
    model.load_state_dict(weights, strict=True)
    return model


def assert_same_logits(ours: KeyshiftForCausalLM, theirs: PreTrainedModel) -> None:
    """Whole, cached, left-padded and packed."""
    ids = tokens(2, T)
    expected = full(theirs, ids)
    assert_close(full(ours, ids), expected)
    cache = KeyshiftCache(ours.config)
    assert_close(torch.cat([step(ours, piece, cache) for piece in ids.split(7, 1)], 1), expected)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = {"attention_mask": mask, "position_ids": positions}
    assert_close(full(ours, ids, **padded)[1, 9:], full(theirs, ids, **padded)[1, 9:])
    packed = {"position_ids": torch.cat([torch.arange(n) for n in (15, 1, T - 16)])[None]}
    assert_close(full(ours, ids[:1], **packed), full(theirs, ids[:1], **packed))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_llama(groups: int, tied: bool) -> None:
    torch.manual_seed(0)
    shared = {**SHARED, "num_key_value_heads": groups, "tie_word_embeddings": tied}
    theirs = LlamaForCausalLM(LlamaConfig(**shared)).eval()
    weights = {
        name.replace("k_proj", "source.k_proj").replace("v_proj", "source.v_proj"): weight
        for name, weight in theirs.state_dict().items()
    }
    ours = copied(KeyshiftConfig(**shared), weights)
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("interleaved", [True, False])
def test_deepseek_v3(interleaved: bool) -> None:
    """MLA with decoupled RoPE. DeepSeek may rotate neighbouring channels; we rotate halves, so rows move."""
    torch.manual_seed(0)
    head, rope, rank, layers = 8, 4, 12, SHARED["num_hidden_layers"]
    theirs = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SHARED,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=rank,
            qk_nope_head_dim=head,
            v_head_dim=head,
            qk_rope_head_dim=rope,
            first_k_dense_replace=layers,
            num_mtp_layers=0,
            rope_interleave=interleaved,
        )
    ).eval()
    order = torch.tensor([0, 2, 1, 3] if interleaved else [0, 1, 2, 3])
    weights = theirs.state_dict()
    for layer in range(layers):
        prefix = f"model.layers.{layer}.self_attn."
        queries = weights[prefix + "q_proj.weight"].unflatten(0, (4, head + rope)).clone()
        queries[:, head:] = queries[:, head:][:, order]
        latent, rope_key = weights.pop(prefix + "kv_a_proj_with_mqa.weight").split((rank, rope))
        keys, values = weights.pop(prefix + "kv_b_proj.weight").unflatten(0, (4, 2 * head)).chunk(2, dim=1)
        weights |= {
            prefix + "q_proj.weight": queries.flatten(0, 1),
            prefix + "rope_key.weight": rope_key[order],
            prefix + "source.down_proj.weight": latent,
            prefix + "source.norm.weight": weights.pop(prefix + "kv_a_layernorm.weight"),
            prefix + "source.key_up.weight": keys.flatten(0, 1),
            prefix + "source.value_up.weight": values.flatten(0, 1),
        }
    config = KeyshiftConfig(
        **SHARED, attention="mla", position="decoupled_rope", kv_lora_rank=rank, qk_rope_head_dim=rope
    )
    assert_same_logits(copied(config, weights), theirs)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 16, 20, 32, 71, 112])
def test_alibi_slopes_of_bloom(heads: int) -> None:
    """BLOOM gives biases relative to the first token; one place on is worth one slope."""
    biases = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(heads), biases[:, 0, 2] - biases[:, 0, 1])


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_alibi_slopes_of_mpt(heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(heads), -build_mpt_alibi_tensor(heads, 2)[:, 0, 0])


def with_attention(case: Case, implementation: str) -> KeyshiftForCausalLM:
    model = KeyshiftForCausalLM(case.config(attn_implementation=implementation)).eval()
    model.load_state_dict(build(case).state_dict())
    assert model.config._attn_implementation == implementation
    return model


def padded_and_packed() -> list[dict[str, Tensor]]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    return [{}, {"attention_mask": mask}, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3]])}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_equals_sdpa(case: Case) -> None:
    ids, eager = tokens(2, 9), with_attention(case, "eager")
    for inputs in padded_and_packed():
        assert_close(full(eager, ids, **inputs), full(build(case), ids, **inputs))


@pytest.mark.parametrize("case", FEW, ids=str)
def test_attention_weights_are_returned_by_eager_attention(case: Case) -> None:
    model, ids = with_attention(case, "eager"), tokens(2, 9)
    with torch.no_grad():
        outputs = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    assert len(outputs.attentions) == model.config.num_hidden_layers
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    for weights in outputs.attentions:
        assert weights.shape == (2, 4, 9, 9)
        assert weights.triu(1).abs().max() == 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    with pytest.raises(UserError, match="attn_implementation='eager'"):
        build(case)(ids, output_attentions=True)


@pytest.mark.parametrize("case", [case for case in FEW if case.position != "alibi"], ids=str)
def test_flex_attention_equals_sdpa(case: Case) -> None:
    ids, flex = tokens(2, 9), with_attention(case, "flex_attention")
    for inputs in padded_and_packed():
        assert_close(full(flex, ids, **inputs), full(build(case), ids, **inputs))


def test_flex_attention_with_alibi_is_refused() -> None:
    with pytest.raises(UserError, match="position='alibi' with attn_implementation='flex_attention'"):
        full(with_attention(FEW[1], "flex_attention"), tokens(1, 9))


def by_hand(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.mT * scaling).masked_fill(hidden, -torch.inf)
    by_hand.calls += 1
    return (scores.softmax(-1) @ value).transpose(1, 2), None


by_hand.calls = 0
AttentionInterface.register("by_hand", by_hand)


@pytest.mark.parametrize("case", [case for case in FEW if case.position != "alibi"], ids=str)
def test_a_registered_attention_function_sees_shifted_keys_and_values(case: Case) -> None:
    """Anything that transformers' AttentionInterface knows plugs in, the shift included."""
    ids, model = tokens(2, 9), with_attention(case, "by_hand")
    before = by_hand.calls
    assert_close(full(model, ids), full(build(case), ids))
    assert by_hand.calls == before + model.config.num_hidden_layers


def test_padding_with_an_unknown_attention_function_is_refused() -> None:
    """Its mask format is unknown, and to ignore the padding would be wrong."""
    with pytest.raises(UserError, match="attn_implementation='by_hand'"):
        full(with_attention(FEW[0], "by_hand"), tokens(2, 9), **padded_and_packed()[1])
