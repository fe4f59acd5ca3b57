"""The model as a transformers citizen: configs, errors, saving, training, initialisation, odd inputs."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CASES, FEW, SIZES, Case, assert_close, build, case, full, step, tokens
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from keyshift import KeyshiftCache, KeyshiftConfig, KeyshiftForCausalLM, UserError, cache_bytes_per_token
from keyshift.attention.module import Attention, rms
from keyshift.cache import cache_widths
from keyshift.configuration import CHOICES

every_case = pytest.mark.parametrize("case", CASES, ids=str)
few_cases = pytest.mark.parametrize("case", FEW, ids=str)


def fresh(case: Case, **changes: Any) -> KeyshiftForCausalLM:
    torch.manual_seed(0)
    return KeyshiftForCausalLM(case.config(**changes))


def gradients(model: KeyshiftForCausalLM) -> dict[str, Tensor]:
    assert all(parameter.grad is not None for parameter in model.parameters())
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# Saving and loading


@few_cases
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_bit_for_bit(case: Case, tied: bool, tmp_path: Path) -> None:
    model = fresh(case, tie_word_embeddings=tied, pad_token_id=0, eos_token_id=[1, 2]).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is KeyshiftForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(full(loaded, tokens(2, 9)), full(model, tokens(2, 9)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is KeyshiftConfig
    ignored = ("_name_or_path", "architectures", "dtype", "transformers_version")
    ours, theirs = model.config.to_dict(), config.to_dict()
    assert {k: v for k, v in ours.items() if k not in ignored} == {
        k: v for k, v in theirs.items() if k not in ignored
    }


def test_loaded_in_another_dtype(tmp_path: Path) -> None:
    fresh(FEW[3]).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_auto_classes_build_from_a_config() -> None:
    config = AutoConfig.for_model("keyshift", **SIZES)
    assert type(AutoModelForCausalLM.from_config(config)) is KeyshiftForCausalLM
    assert type(AutoModel.from_config(config)).__name__ == "KeyshiftModel"


@pytest.mark.parametrize(
    "theirs",
    [
        "from transformers import LlamaForCausalLM",
        pytest.param("from transformers import AutoConfig", marks=pytest.mark.slow),
        "from transformers import Trainer",
    ],
)
@pytest.mark.parametrize("ours_first", [True, False])
def test_import_order_does_not_matter(theirs: str, ours_first: bool) -> None:
    """Both models stay what they are: registering ours late broke others' imports once."""
    imports = ["import keyshift", theirs]
    run(
        *(imports if ours_first else reversed(imports)),
        "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM",
        "sizes = {'vocab_size': 7, 'hidden_size': 8, 'num_hidden_layers': 1, 'num_attention_heads': 2}",
        "sizes['intermediate_size'] = 8",
        "assert type(AutoModelForCausalLM.from_config(LlamaConfig(**sizes))) is LlamaForCausalLM",
        "ours = AutoModelForCausalLM.from_config(AutoConfig.for_model('keyshift', **sizes))",
        "assert type(ours) is keyshift.KeyshiftForCausalLM",
    )


@pytest.mark.parametrize("module", ["keyshift", "keyshift.cli", "keyshift.results", "keyshift.errors"])
def test_importing_loads_no_heavy_library(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    run(
        f"import sys, {module}",
        "heavy = {'torch', 'transformers', 'matplotlib', 'accelerate', 'pyarrow'} & set(sys.modules)",
        "assert not heavy, heavy",
    )


def run(*lines: str) -> None:
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Training


@every_case
def test_every_combination_trains(case: Case) -> None:
    """Forward and backward in training mode; every weight gets a finite gradient, and the loss falls."""
    model = fresh(case).train()
    ids, optimiser = tokens(2, 8), torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(2):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        model.constrain_()
        losses.append(loss.item())
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    assert losses[1] < losses[0]


@every_case
def test_bfloat16_forward_and_backward(case: Case) -> None:
    model, ids = fresh(case).bfloat16(), tokens(2, 8)
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    assert outputs.logits.dtype == torch.bfloat16
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@few_cases
def test_autocast(case: Case) -> None:
    model, ids = fresh(case), tokens(2, 9)
    cache = KeyshiftCache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        model.train()(ids, labels=ids).loss.backward()
        model.eval()
        cached = torch.cat([step(model, piece, cache) for piece in ids.split((4, 1, 4), 1)], dim=1)
    gradients(model)
    assert_close(cached, full(model, ids), tolerance=0.2)


@few_cases
def test_gradient_checkpointing_gives_the_same_gradients(case: Case) -> None:
    ids, plain, checkpointed = tokens(2, 9), fresh(case).train(), fresh(case).train()
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        model(ids, labels=ids, position_ids=torch.tensor([[*range(5), *range(4)]])).loss.backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(checkpointed)[name], gradient)


@few_cases
def test_gradients_through_a_dynamic_cache_equal_those_of_the_full_pass(case: Case) -> None:
    if case.shifts_query:
        pytest.skip("keeps raw queries, for which DynamicCache has no place")
    ids, whole, pieces = tokens(2, 9), fresh(case).double(), fresh(case).double()
    whole(ids, use_cache=False).logits.square().sum().backward()
    cache = DynamicCache()
    logits = [pieces(part, past_key_values=cache, use_cache=True).logits for part in ids.split((4, 1, 4), 1)]
    torch.cat(logits, dim=1).square().sum().backward()
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(pieces)[name], gradient)


def test_loss_is_the_mean_cross_entropy_of_the_next_token_where_labels_are_given() -> None:
    model, ids = build(FEW[0]), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = labels[1, 7] = -100
    with torch.no_grad():
        outputs = model(ids, labels=labels, return_dict=True)
    expected = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(outputs.loss, expected)
    as_tuple = model(ids, labels=labels, return_dict=False, use_cache=False)
    torch.testing.assert_close(as_tuple[0], expected)
    torch.testing.assert_close(as_tuple[1], outputs.logits)


def test_loss_of_packed_documents_is_that_of_each_alone() -> None:
    model, ids, lengths = build(FEW[0]), tokens(1, 9), (4, 5)
    labels, positions = ids.clone(), torch.tensor([[*range(4), *range(5)]])
    labels[0, 4] = -100  # the second document's first token is nobody's next
    packed = model(ids, labels=labels, position_ids=positions, num_items_in_batch=7).loss
    parts = [model(part, labels=part).loss * (part.shape[1] - 1) for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, sum(parts) / 7)


# Initialisation


def real_text(batch: int, length: int, start: int = 0) -> Tensor:
    """Python's own documentation, as bytes."""
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()
    return torch.tensor(list(text[start : start + batch * length])).view(batch, length)


MATCHED = [
    {"attention": "gva", "rope_allocation": "additive"},
    {"attention": "gva", "rope_allocation": "carved"},
    {"attention": "gva", "stream_norm": True},
    {"attention": "mla", "key_map_init": "matched"},
    {"attention": "mla", "key_map_init": "matched", "stream_norm": False},
    {"attention": "gqa", "key_map_init": "matched"},
    {"attention": "gqa", "key_map_init": "matched", "key_norm": True, "projection_bias": "qkv"},
]


def matched_model(seed: int, hidden_size: int, query_norm: bool, **mechanism: Any) -> KeyshiftForCausalLM:
    torch.manual_seed(seed)
    config = KeyshiftConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=None if mechanism["attention"] == "mla" else 2,
        position="decoupled_rope",
        query_norm=query_norm,
        **mechanism,
    )
    return KeyshiftForCausalLM(config).eval()


def rms_of_keys_over_queries(model: KeyshiftForCausalLM, ids: Tensor) -> Tensor:
    """[layers, 2]: the content slice and the rotary slice."""
    ratios = []

    def measure(layer: Attention, args: tuple[Tensor, ...], _: Any) -> None:
        x = args[0]
        queries = layer.q_proj(x).unflatten(-1, (layer.heads, -1))
        queries = queries if layer.q_norm is None else layer.q_norm(queries)
        content, rotary = queries.split((layer.content_width, layer.rope_width), dim=-1)
        keys, _ = layer.source.expand(*layer.source.project(x))
        ratios.append(torch.stack((rms(keys) / rms(content), rms(layer.rope_key(x)) / rms(rotary))))

    hooks = [block.self_attn.register_forward_hook(measure) for block in model.model.layers]
    full(model, ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(ratios)


@pytest.mark.parametrize("mechanism", MATCHED, ids=lambda mechanism: "-".join(map(str, mechanism.values())))
@pytest.mark.parametrize("query_norm", [False, True])
def test_keys_start_at_the_queries_rms(mechanism: dict[str, Any], query_norm: bool) -> None:
    """On real text: right on average over draws, and within 5 % in every layer once matched to a batch.

    One draw without a batch is off by 5 % (content) to 10 % (rotary), one standard deviation: text of bytes
    has few distinct inputs, and the rotary key few channels, for the weights' noise to average out.
    """
    ids, drawn = real_text(4, 128), []
    for seed, hidden_size in itertools.product(range(4), (64, 128, 256)):
        model = matched_model(seed, hidden_size, query_norm, **mechanism)
        drawn.append(rms_of_keys_over_queries(model, ids))
        model.match_keys_(ids)
        assert (rms_of_keys_over_queries(model, ids) - 1).abs().max() < 0.05
    drawn = torch.cat(drawn)
    assert (drawn - 1).abs().max() < 0.5
    assert (drawn.mean(0) - 1).abs().max() < 0.05


def test_matching_shared_keys_leaves_them_the_values() -> None:
    model = matched_model(0, 64, False, attention="shared_kv")
    before = model.model.layers[0].self_attn.source.v_proj.weight.clone()
    model.match_keys_(real_text(2, 64))
    assert torch.equal(model.model.layers[0].self_attn.source.v_proj.weight, before)


def test_standard_init_draws_the_key_map_like_any_weight() -> None:
    config = KeyshiftConfig(**SIZES, attention="gva", position="decoupled_rope", key_map_init="standard")
    attention = KeyshiftForCausalLM(config).model.layers[0].self_attn
    assert abs(attention.source.key_map.std() / SIZES["initializer_range"] - 1) < 0.15


def test_loading_does_not_draw_loaded_weights_again(tmp_path: Path) -> None:
    model = matched_model(0, 64, True, attention="gva")
    model.match_keys_(real_text(2, 64))
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    loaded = KeyshiftForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


# Configuration


def config(**changes: Any) -> KeyshiftConfig:
    return KeyshiftConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({field: "nonsense"}, f"{field}='nonsense' is not known") for field in CHOICES),
        ({"attention": "gqq"}, "did you mean 'gqa'"),
        ({"position": None}, "position=None is not known"),
        ({"vocab_size": 0}, "vocab_size=0 must be a positive integer"),
        ({"hidden_size": -4}, "hidden_size=-4 must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a positive integer"),
        ({"intermediate_size": 0}, "intermediate_size=0 must be a positive integer or left out"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be a positive integer or left out"),
        ({"head_dim": -1}, "head_dim=-1 must be a positive integer or left out"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0 must be a positive integer or left out"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be a positive integer or left out"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be a positive integer"),
        ({"shift_window": 1}, "shift_window=1 must be 2, 3 or 4"),
        ({"shift_window": 5}, "shift_window=5 must be 2, 3 or 4"),
        ({"shift": "kv", "shift_window": 4, "max_position_embeddings": 3}, "larger than the sequence"),
        ({"hidden_size": 30}, "hidden_size=30 is not divisible by num_attention_heads=4"),
        ({"attention": "mha", "num_key_value_heads": 2}, "has 4 key/value heads, not num_key_value_heads=2"),
        ({"attention": "mqa", "num_key_value_heads": 2}, "has 1 key/value heads, not num_key_value_heads=2"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not divisible by num_key_value_heads=3"),
        ({"position": "rope", "head_dim": 7}, "needs an even head_dim, not 7"),
        ({"position": "decoupled_rope", "qk_rope_head_dim": 3}, "qk_rope_head_dim=3 must be even"),
        (
            {"attention": "shared_kv", "position": "decoupled_rope", "rope_allocation": "carved"},
            "use rope_allocation='additive' or attention='gva'",
        ),
        (
            {"position": "decoupled_rope", "rope_allocation": "carved", "qk_rope_head_dim": 8},
            "needs qk_rope_head_dim=8 below head_dim=8",
        ),
        ({"pad_token_id": 31}, "pad_token_id=31 is not below vocab_size=31"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_contradictions_are_refused_at_construction(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**changes)


def test_every_choice_constructs_runs_and_trains_or_is_refused() -> None:
    """All 28,800 products of the choices, biases in turn; every 67th, which meets them all, also runs."""
    built, others = 0, {name: values for name, values in CHOICES.items() if name != "projection_bias"}
    biases = CHOICES["projection_bias"]
    for number, values in enumerate(itertools.product(*others.values())):
        chosen = {**dict(zip(others, values, strict=True)), "projection_bias": biases[number % len(biases)]}
        try:
            small = config(
                **chosen,
                num_hidden_layers=1,
                hidden_size=8,
                intermediate_size=8,
                qk_rope_head_dim=None,
                head_dim=4,
            )
        except UserError:
            assert contradicts(**chosen), chosen
            continue
        assert not contradicts(**chosen), chosen
        if number % 67 == 0:
            built += 1
            model = KeyshiftForCausalLM(small)
            model(tokens(1, 3), labels=tokens(1, 3)).loss.backward()
    assert built > 340


def contradicts(**chosen: str) -> bool:
    carved = chosen["position"] == "decoupled_rope" and chosen["rope_allocation"] == "carved"
    saturated = chosen["shift_weights"] == "gate" and chosen["shift_init"] == "identity"
    return (carved and chosen["attention"] == "shared_kv") or (saturated and chosen["shift"] != "none")


def test_defaults_depend_on_the_mechanism() -> None:
    expected = {"mha": 4, "mqa": 1, "gqa": 1, "mla": 4, "shared_kv": 1, "gva": 1}
    assert {name: config(attention=name).num_key_value_heads for name in expected} == expected
    assert config(num_attention_heads=8).num_key_value_heads == 2
    assert [config(attention=name).stream_norm for name in expected] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert config(attention="gva").key_map_init == "matched"
    assert config(attention="mla").key_map_init == "standard"
    assert config(attention="gqa").shift_heads == "kv"
    assert config(attention="gva").shift_heads == "query"
    assert config(intermediate_size=None).intermediate_size == 88
    assert config(position="decoupled_rope", rope_allocation="carved").qk_head_dim == 8
    assert config(position="decoupled_rope", rope_allocation="additive").qk_head_dim == 12


def test_cached_scalars_of_the_papers_table() -> None:
    """GVA paper, section 3.4, at H = 8, G = 4, d_h = 64: G d_h = 256."""
    sizes = {**SIZES, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "num_hidden_layers": 1}

    def scalars(attention: str, **changes: Any) -> int:
        groups = {} if attention in ("mha", "mqa", "mla") else {"num_key_value_heads": 4}
        chosen = KeyshiftConfig(**{**sizes, **groups, "attention": attention, "position": "none", **changes})
        widths = cache_widths(chosen)
        assert cache_bytes_per_token(chosen, torch.bfloat16) == 2 * (
            widths.keys + widths.values + widths.rotary
        )
        return widths.keys + widths.values + widths.rotary

    assert scalars("mha") == 2 * 8 * 64
    assert scalars("mqa") == 2 * 64
    assert scalars("gqa") == 2 * 256
    assert scalars("shared_kv") == scalars("gva") == 256
    assert scalars("mla", position="decoupled_rope", kv_lora_rank=192, qk_rope_head_dim=32) == 192 + 32
    for rotary, ratio in ((16, 0.531), (24, 0.547)):
        width = scalars("gva", position="decoupled_rope", qk_rope_head_dim=rotary)
        assert width == 256 + rotary
        assert round(width / scalars("gqa", position="rope"), 3) == ratio


# Odd inputs


@every_case
def test_later_tokens_change_nothing_before_them(case: Case) -> None:
    """Down to a single token, which sees itself alone."""
    model, ids = build(case), tokens(1, 5)
    for length in (1, 2, 4):
        assert_close(full(model, ids[:, :length]), full(model, ids)[:, :length])


@few_cases
def test_an_empty_row_of_the_mask_is_finite_and_harms_no_other(case: Case) -> None:
    model, ids, mask = build(case), tokens(2, 6), torch.tensor([[1] * 6, [0] * 6])
    cache = KeyshiftCache(model.config)
    logits = torch.cat(
        (
            step(model, ids[:, :4], cache, attention_mask=mask[:, :4]),
            step(model, ids[:, 4:], cache, attention_mask=mask),
        ),
        dim=1,
    )
    assert logits.isfinite().all()
    assert_close(logits[:1], full(model, ids[:1]))
    assert_close(full(model, ids, attention_mask=mask)[:1], full(model, ids[:1]))


@few_cases
def test_decoding_past_right_padding_is_refused(case: Case) -> None:
    model, mask = build(case), torch.tensor([[1, 1, 1, 0, 0]])
    cache = KeyshiftCache(model.config)
    step(model, tokens(1, 5), cache, attention_mask=mask)
    with pytest.raises(UserError, match="zeros between ones"):
        step(model, tokens(1, 1), cache, attention_mask=torch.tensor([[1, 1, 1, 0, 0, 1]]))


def test_shapes_that_do_not_fit_are_refused() -> None:
    model, ids = build(FEW[0]), tokens(2, 5)
    for inputs, message in (
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask has shape"),
        ({"attention_mask": torch.ones(1, 5)}, "attention_mask has shape"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, "attention_mask has shape"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]] * 2)}, "zeros between ones"),
        ({"document_ids": torch.zeros(2, 4)}, "document_ids has shape"),
        ({"position_ids": torch.arange(4)[None]}, "position_ids has shape"),
        ({"position_ids": torch.arange(5)}, "position_ids has shape"),
        ({"position_ids": torch.zeros(3, 5)}, "position_ids has shape"),
        ({"inputs_embeds": torch.zeros(2, 5, 32)}, "exactly one of input_ids and inputs_embeds"),
    ):
        with pytest.raises(UserError, match=message):
            full(model, ids, **inputs)
    with pytest.raises(UserError, match="exactly one of input_ids and inputs_embeds"):
        model()


def test_a_cache_of_another_batch_size_is_refused() -> None:
    model = build(FEW[0])
    for first, second in ((2, 1), (1, 2)):
        cache = KeyshiftCache(model.config)
        step(model, tokens(first, 4), cache)
        with pytest.raises(UserError, match=f"holds {first} sequences"):
            step(model, tokens(second, 1), cache)
        cache.reset()
        assert_close(step(model, tokens(second, 4), cache), full(model, tokens(second, 4)))


def test_positions_beyond_a_learned_table_are_refused() -> None:
    model = fresh(FEW[2], max_position_embeddings=8)
    with pytest.raises(UserError, match="position 8 is beyond max_position_embeddings=8"):
        full(model, tokens(1, 9))


@few_cases
def test_inputs_embeds_and_boolean_masks_and_shared_positions(case: Case) -> None:
    model, ids = build(case), tokens(2, 6)
    expected = full(model, ids)
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad():
        assert_close(model(inputs_embeds=embedded).logits, expected)
    assert_close(full(model, ids, attention_mask=torch.ones(2, 6, dtype=torch.bool)), expected)
    assert_close(full(model, ids, position_ids=torch.arange(6)[None]), expected)
    assert_close(full(model, ids, position_ids=torch.arange(6, dtype=torch.int32)[None]), expected)


def test_outputs_that_the_config_asks_for_are_returned() -> None:
    asked = {"output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}
    outputs = fresh(FEW[0], **asked)(tokens(2, 6))
    assert len(outputs.hidden_states) == 3
    assert len(outputs.attentions) == 2
    assert fresh(FEW[0], **asked)(tokens(2, 6), output_hidden_states=False).hidden_states is None


def test_continuing_a_cache_under_gradient_checkpointing_is_refused() -> None:
    model = fresh(FEW[0]).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(UserError, match="cannot continue a cache"):
        model(tokens(1, 4), past_key_values=KeyshiftCache(model.config))


@few_cases
def test_logits_to_keep(case: Case) -> None:
    model, ids = build(case), tokens(2, 6)
    expected = full(model, ids)
    assert_close(full(model, ids, logits_to_keep=1), expected[:, -1:])
    assert_close(full(model, ids, logits_to_keep=torch.tensor([0, 3])), expected[:, [0, 3]])


def test_the_padding_token_has_a_zero_embedding_without_gradient() -> None:
    model, ids = fresh(FEW[0], pad_token_id=0), tokens(1, 5)
    ids[0, 0] = 0
    assert (model.model.embed_tokens.weight[0] == 0).all()
    model(ids, labels=ids).loss.backward()
    assert (model.model.embed_tokens.weight.grad[0] == 0).all()


@few_cases
def test_resizing_the_vocabulary(case: Case) -> None:
    model = fresh(case).eval()
    before = full(model, tokens(1, 5))
    model.resize_token_embeddings(40)
    after = full(model, tokens(1, 5))
    assert after.shape[-1] == model.config.vocab_size == 40
    assert_close(after[..., :31], before)


@pytest.mark.parametrize("case", [FEW[0], FEW[4]], ids=str)
def test_torch_compile(case: Case) -> None:
    """The tracing only ("eager" back end): no compiler needed, graph breaks allowed."""
    model, ids = build(case), tokens(2, 6)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False).logits, full(model, ids))
        mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
        padded = compiled(ids, attention_mask=mask, use_cache=False).logits
    assert_close(padded, full(model, ids, attention_mask=mask))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_norm": "no"}, "query_norm='no' must be true or false"),
        ({"stream_norm": 1}, "stream_norm=1 must be true, false or left out"),
        ({"rope_theta": "x"}, "rope_theta='x' must be a positive number"),
        ({"rope_theta": 0}, "rope_theta=0 must"),
        ({"rms_norm_eps": -5.0}, "rms_norm_eps=-5.0"),
        ({"initializer_range": float("nan")}, "initializer_range=nan"),
        ({"hidden_act": "sillu"}, "did you mean 'silu'"),
        ({"shift_window": 3.0}, "shift_window=3.0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters=[1] must be a table"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' must be a positive number"),
        ({"hidden_act": []}, "hidden_act=[] is not known"),
        ({"hidden_act": {}}, "hidden_act={} is not known"),
        ({"pad_token_id": "x"}, "pad_token_id='x' must be an integer or left out"),
        ({"pad_token_id": []}, "pad_token_id=[] must be"),
        ({"pad_token_id": True}, "pad_token_id=True must be"),
        ({"bos_token_id": 1.0}, "bos_token_id=1.0 must be an integer or left out"),
        ({"bos_token_id": [1]}, "bos_token_id=[1] must be"),
        ({"eos_token_id": "x"}, "eos_token_id='x' must be an integer, a list of some, or left out"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id=[1, 'x'] must be"),
        ({"eos_token_id": []}, "eos_token_id=[] must be"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(fields, message):
    with pytest.raises(UserError) as caught:
        KeyshiftConfig(**fields)
    assert message in str(caught.value)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.sampled_from(["kv", "silu"])
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.sampled_from(["", "rope_theta"]), SCALARS)
)


@settings(max_examples=40, deadline=None)
@given(value=VALUES)
@pytest.mark.parametrize("field", sorted({*KeyshiftConfig.__annotations__, "rope_parameters"}))
def test_whatever_a_field_is_set_to_is_taken_or_refused_in_one_line(field: str, value: Any) -> None:
    with contextlib.suppress(UserError):
        taken = KeyshiftConfig(**{field: value})
        kept = json.loads(json.dumps(taken.to_dict()))
        assert KeyshiftConfig(**kept).to_dict() == taken.to_dict()
        return
    with pytest.raises(UserError, match=r"\A.+\Z"):  # in one line
        KeyshiftConfig(**{field: value})


def test_several_tokens_may_end_a_text() -> None:
    assert KeyshiftConfig(eos_token_id=[1, 2], bos_token_id=0, pad_token_id=0).eos_token_id == [1, 2]


def test_rope_theta_may_be_spelt_as_transformers_spells_it():
    config = KeyshiftConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert config.rope_theta == 5e5
    assert KeyshiftConfig(**config.to_dict()).rope_theta == 5e5


@pytest.mark.parametrize("shift", ["none", "kv"])
def test_attention_that_would_cache_expanded_keys_is_refused(shift: str) -> None:
    """vLLM's wrapper of transformers' models sets this name, under which it registers its attention."""
    model = KeyshiftForCausalLM(case("gva", "decoupled_rope", shift).config())
    model.config._attn_implementation = "vllm"
    with pytest.raises(UserError, match=r"attn_implementation='vllm'.*keyshift's plugin serves the model"):
        model(torch.zeros(1, 3, dtype=torch.long))
