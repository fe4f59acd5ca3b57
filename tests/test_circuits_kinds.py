"""Kinds of models whose residual stream is not what it seems: found as they are, or refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny
import torch
import zoo
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BertLMHeadModel,
    CTRLConfig,
    FalconH1Config,
    GraniteConfig,
    JambaConfig,
    OPTConfig,
)

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.circuits import (
    CircuitModel,
    Settings,
    Vocabulary,
    ablate,
    analyse,
    head_scores,
    layer_weights,
    lift,
    load_model,
    mean_results,
    quadrants,
    read_prompt,
    read_streams,
    sample_repeats,
)

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4}


def of(config: Any) -> CircuitModel:
    torch.manual_seed(0)
    return CircuitModel(AutoModelForCausalLM.from_config(config), name="it")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_small_residual_factor_is_seen_through_rounding(dtype: torch.dtype) -> None:
    config = GraniteConfig(
        **SIZES,
        num_hidden_layers=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.02,
        residual_multiplier=0.22,
        embedding_multiplier=12.0,
    )
    torch.manual_seed(0)
    model = CircuitModel(AutoModelForCausalLM.from_config(config).to(dtype))
    ids = torch.randint(1, 60, (2, 20), generator=torch.Generator().manual_seed(1))
    assert read_streams(model, ids).factors == pytest.approx([0.22] * 4, rel=0.06)  # it was 1


def test_a_bias_is_not_taken_for_rounding() -> None:
    model = CircuitModel(zoo.fresh("gpt_oss").bfloat16())
    found = lift(model, sample_repeats(model, period=4, sequences=4, bos=1), 1, 0)
    assert "bias" in {part.name for part in found.parts}
    assert found.residual < 0.1 * max(1.0, *(abs(part.target) for part in found.parts))


@pytest.mark.parametrize(
    "config",
    [
        BartConfig(
            vocab_size=60,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            is_decoder=True,
            is_encoder_decoder=False,
        ),
        OPTConfig(
            **SIZES,
            num_hidden_layers=2,
            ffn_dim=64,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            do_layer_norm_before=False,
        ),
    ],
    ids=["bart", "opt"],
)
def test_a_normalised_stream_is_no_sum(config: Any) -> None:
    model = of(config)
    with pytest.raises(UserError, match="normalises the residual stream itself"):
        layer_weights(model, 0)
    with pytest.raises(UserError, match="normalises the residual stream itself"):
        lift(model, sample_repeats(model, period=5, sequences=2, bos=0), 1, 0)


def test_a_stream_that_is_scaled_on_its_way_is_refused() -> None:
    config = FalconH1Config(
        **SIZES,
        num_hidden_layers=2,
        num_key_value_heads=2,
        intermediate_size=64,
        head_dim=8,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_chunk_size=8,
        attention_in_multiplier=1.7,
    )
    with pytest.raises(UserError, match="what attention reads is unknown"):
        layer_weights(of(config), 0)


def test_attention_without_an_output_projection_is_refused() -> None:
    config = BertConfig(**SIZES, num_hidden_layers=2, intermediate_size=64, is_decoder=True)
    model = CircuitModel(BertLMHeadModel(config), name="it")
    with pytest.raises(UserError, match="no output projection of its own"):
        layer_weights(model, 0, fold_norms=False)


def test_an_encoder_is_refused() -> None:
    with pytest.raises(UserError, match="reads later tokens"):
        CircuitModel(BertLMHeadModel(BertConfig(**SIZES, num_hidden_layers=2, intermediate_size=64)).eval())


def test_layers_without_attention_are_no_part_of_the_embedding() -> None:
    config = JambaConfig(
        **SIZES,
        num_hidden_layers=3,
        num_key_value_heads=2,
        intermediate_size=64,
        attn_layer_offset=1,
        attn_layer_period=3,
        expert_layer_period=10,
        expert_layer_offset=9,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
        initializer_range=0.3,
    )
    model = of(config)
    ids = torch.randint(1, 60, (2, 10), generator=torch.Generator().manual_seed(1))
    streams = read_streams(model, ids)
    assert torch.equal(streams.embedded_BTD, model.embed(ids).detach())
    assert float(streams.rest_BTD.abs().max()) > 0.01
    notes = analyse(model, Settings(period=5, sequences=2, bos=0)).notes
    assert any("1 of 3 layers have attention" in note for note in notes)


def test_what_a_model_cannot_do_is_a_note_and_the_rest_is_measured() -> None:
    """CTRL computes in one dtype only, so that its matrices cannot be had in float64."""
    config = CTRLConfig(vocab_size=60, n_positions=64, n_embd=32, dff=64, n_layer=2, n_head=4)
    result = analyse(of(config), Settings(period=5, sequences=4, bos=0, heads=("1.0",)))
    assert any("no weight measurements" in note for note in result.notes)
    assert any("no key lift" in note for note in result.notes)
    assert all(head.ov is None for head in result.heads)
    assert all(head.induction_loss_increase is not None for head in result.heads)


def test_two_threads_do_not_see_each_other() -> None:
    models = [CircuitModel(zoo.fresh("llama")), CircuitModel(zoo.fresh("llama", rope_theta=77.0))]
    sequences = [sample_repeats(model, period=6, sequences=8, bos=1) for model in models]

    def scores(index: int) -> torch.Tensor:
        return head_scores(models[index], sequences[index]).scores[1]["induction"]

    expected = [scores(0), scores(1)]
    wrong: list[int] = []

    def work(index: int) -> None:
        wrong.extend(index for _ in range(10) if not torch.equal(scores(index), expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_training_mode_does_not_change_scores() -> None:
    inner = zoo.fresh("gpt2", resid_pdrop=0.5)
    model = CircuitModel(inner)
    sequences = sample_repeats(model, period=6, sequences=4, bos=1)
    before = head_scores(model, sequences).scores[1]["induction"]
    inner.train()
    assert torch.equal(head_scores(model, sequences).scores[1]["induction"], before)


def shifted(**fields: Any) -> KeyshiftForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = KeyshiftConfig(**sizes, num_key_value_heads=4, mlp="none", position="none", **fields)
    return KeyshiftForCausalLM(config).eval()


@torch.no_grad()
def test_sets_of_equal_weights_count_apart() -> None:
    inner = shifted(shift="kv")
    for block in inner.model.layers:
        block.self_attn.key_shift.weight.copy_(torch.tensor([[0.0, 1.0]]))
        block.self_attn.value_shift.weight.copy_(torch.tensor([[1.0, 0.0]]))
    result = analyse(CircuitModel(inner), Settings(period=5, sequences=2, bos=0))
    table = {(cell.key_previous, cell.value_previous): cell.heads for cell in quadrants(result.heads)}
    assert table[True, False] == [f"{layer}.{head}" for layer in (0, 1) for head in (0, 2, 4, 6)]


@torch.no_grad()
def test_shifted_queries_turn_the_sign_of_a_match() -> None:
    inner = shifted(shift="qkv")
    model = CircuitModel(inner)
    attention = inner.model.layers[0].self_attn
    attention.key_shift.weight.copy_(torch.tensor([[0.0, 1.0]]))
    values = []
    for gamma in (1.0, -1.0):
        attention.query_shift.weight.copy_(torch.tensor([[gamma, 0.0]]))
        values.append(Vocabulary(model).matching_through_shift(layer_weights(model, 0), 0).value)
    assert values[0] == pytest.approx(-values[1])
    attention.query_shift.weight.copy_(torch.tensor([[0.0, 1.0]]))
    assert Vocabulary(model).matching_through_shift(layer_weights(model, 0), 0).zero


@torch.no_grad()
def test_a_longer_window_is_read_where_it_weighs_most() -> None:
    inner = shifted(shift="kv", shift_window=3)
    for block in inner.model.layers:
        block.self_attn.key_shift.weight.copy_(torch.tensor([[0.0, 0.0, 1.0]]))
        block.self_attn.value_shift.weight.copy_(torch.tensor([[0.0, 1.0, 0.0]]))
    result = analyse(CircuitModel(inner), Settings(period=5, sequences=2, bos=0))
    assert {head.matching_with for head in result.heads} == {"shift, 2 back"}
    assert all(head.matching is not None and not head.matching.zero for head in result.heads)
    assert {head.copies for head in result.heads} == {0.0}  # β1 is 0: no token is on top


def test_what_is_no_model_or_no_tokens_is_one_line() -> None:
    with pytest.raises(UserError, match="is a Linear, not a causal language model"):
        CircuitModel(torch.nn.Linear(3, 3), name="it")  # type: ignore[arg-type]
    model = CircuitModel(tiny.build(tiny.FEW[0]), name="it")
    for ids in (
        torch.ones(5, dtype=torch.long),
        torch.ones(1, 0, dtype=torch.long),
        torch.ones(1, 5),
        "text",
    ):
        with pytest.raises(UserError, match="token ids must be integers of shape"):
            model.logits(ids)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"seed=\d+ must be between"):
        sample_repeats(model, period=5, seed=2**70, bos=0)
    with pytest.raises(UserError, match="head=9 is out of range"):
        layer_weights(model, 0, offset=3).ov(9)
    with pytest.raises(UserError, match="needs a tokenizer"):
        read_prompt(model, "a b a b", [(0, 0)])


def test_several_texts_are_one_padded_batch() -> None:
    model = load_model("one-layer-shift")
    texts = ["the module that the module that", "import os, import os", "a b a b a b a b a b"]
    ids, mask = model.encode_all(texts)
    assert ids.shape == mask.shape
    for text, row, real in zip(texts, ids, mask, strict=True):
        assert torch.equal(row[real.bool()], model.encode(text)[0])
        assert real.tolist() == sorted(real.tolist())  # padding on the left
    together = head_scores(model, ids, mask).scores[0]["previous_token"]
    alone = [head_scores(model, model.encode(text)).scores[0]["previous_token"] for text in texts]
    rows = mask.sum(1).double() - 1
    expected = sum(score * count for score, count in zip(alone, rows, strict=True)) / rows.sum()
    assert torch.allclose(together, expected, atol=1e-5)


def test_heads_go_by_name_too_and_means_are_taken_where_they_are_missing() -> None:
    model = load_model("two-layer")
    sequences = sample_repeats(model, period=10, sequences=6)
    means = mean_results(model, sequences.ids_ST)
    by_pair = ablate(model, sequences, [(0, 3)], means=means, watched=[(1, 3)])
    assert ablate(model, sequences, ["0.3"], watched=["1.3"]) == by_pair
    with pytest.raises(UserError, match="must look like"):
        ablate(model, sequences, ["0,3"])
