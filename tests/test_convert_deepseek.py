"""Models that cache one stream as DeepSeek checkpoints: the same logits there, with and without its cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_process
from safetensors.torch import load_file
from tiny import LLAMA3, YARN, assert_close, draw_biases_and_norms_, full, tokens
from transformers import AutoModelForCausalLM, DeepseekV2ForCausalLM, DynamicCache

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError, cache_bytes
from keyshift.convert import convert, plan
from keyshift.convert.files import INDEX, WEIGHTS
from keyshift.modeling import CACHE_NAME

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "attention": "gva",
    "num_key_value_heads": 2,
    "position": "decoupled_rope",
    "qk_rope_head_dim": 4,
    "stream_norm": True,
    "eos_token_id": 3,
}
LONG = "original_max_position_embeddings"
SHARPER = {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 8.0, "truncate": False}

MODELS: dict[str, dict[str, Any]] = {
    "gva": {},
    "gva, tied": {"tie_word_embeddings": True},
    "gva, carved": {"rope_allocation": "carved"},
    "gva, one group": {"num_key_value_heads": 1},
    "gva, wider heads": {"head_dim": 12, "rope_theta": 500.0},
    "gva, every second pair": {"rope_pairs": [2, 0]},
    "gva, all pairs, yarn": {"rope_pairs": [1, 0, 3, 2], "qk_rope_head_dim": 8, "scaled_rope": SHARPER},
    "mla": {"attention": "mla", "num_key_value_heads": None, "kv_lora_rank": 12},
    "mla, tied, yarn": {
        "attention": "mla",
        "kv_lora_rank": 20,
        "tie_word_embeddings": True,
        "scaled_rope": YARN,
    },
    "shared_kv": {"attention": "shared_kv"},
}


def ours(**fields: Any) -> KeyshiftForCausalLM:
    torch.manual_seed(0)
    model = KeyshiftForCausalLM(KeyshiftConfig(**{**SIZES, **fields})).eval()
    draw_biases_and_norms_(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_deepseek_model_computes_the_same_from_its_own_cache_too(name: str, tmp_path: Path) -> None:
    model = ours(**MODELS[name])
    model.save_pretrained(tmp_path / "ours")
    assert convert(plan(str(tmp_path / "ours"), to="deepseek_v2"), tmp_path / "theirs") < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert type(theirs) is DeepseekV2ForCausalLM
    ids = tokens(2, 60)
    expected = full(model, ids)
    assert_close(full(theirs, ids), expected)
    cache = DynamicCache()
    with torch.no_grad():
        pieces = [theirs(piece, **{CACHE_NAME: cache}).logits for piece in ids.split([40, 1, 1, 18], 1)]
    assert_close(torch.cat(pieces, 1), expected)
    stored = sum(stream.nbytes for layer in cache.layers for stream in (layer.keys, layer.values))
    assert stored == cache_bytes(model.config, batch=2, tokens=60, dtype=torch.float32)
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(theirs.generate(ids[:, :9], **settings), model.generate(ids[:, :9], **settings))


@pytest.mark.parametrize("name", ["gva", "gva, every second pair", "mla, tied, yarn"])
def test_and_comes_back_as_mla(name: str, tmp_path: Path) -> None:
    model = ours(**MODELS[name])
    model.save_pretrained(tmp_path / "ours")
    convert(plan(str(tmp_path / "ours"), to="original"), tmp_path / "theirs")
    assert convert(plan(str(tmp_path / "theirs")), tmp_path / "back") < 1e-5
    back = KeyshiftForCausalLM.from_pretrained(tmp_path / "back")
    assert (back.config.attention, back.config.stream_norm) == ("mla", True)
    assert_close(full(back, tokens(2, 60)), full(model, tokens(2, 60)))


def test_zeros_and_ones_are_stored_and_counted(tmp_path: Path) -> None:
    """kv_b_proj of GVA: M_h and 1 in the group's block, 0 elsewhere."""
    model = ours()
    model.save_pretrained(tmp_path / "ours")
    planned = plan(str(tmp_path / "ours"), to="deepseek_v2")
    convert(planned, tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs" / WEIGHTS)
    maps = weights["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 16, 2, 8)
    for head in range(4):
        assert torch.equal(maps[head, :8, head // 2], model.model.layers[1].self_attn.source.key_map[head].T)
        assert torch.equal(maps[head, 8:, head // 2], torch.eye(8))
        assert not maps[head, :, 1 - head // 2].any()
    needs = planned.needs()
    assert needs["parameters"] == sum(weight.numel() for weight in weights.values())
    assert needs["added_parameters"] == 2 * (4 * 16 * 16 - 4 * 8 * 8)
    assert abs(needs["disk_bytes"] - (tmp_path / "theirs" / WEIGHTS).stat().st_size) < 1000


def test_shards_and_half_precision_stay(tmp_path: Path) -> None:
    """Weights that are made of several go to the shard of the first, wherever the others are."""
    ours().to(torch.bfloat16).save_pretrained(tmp_path / "ours", max_shard_size="6KB")
    convert(plan(str(tmp_path / "ours"), to="deepseek_v2"), tmp_path / "theirs")
    index = json.loads((tmp_path / "theirs" / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 2
    for shard in set(index.values()):
        tensors = load_file(tmp_path / "theirs" / shard)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert {index.pop(name) for name in tensors} == {shard}
    assert not index
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert theirs.dtype == torch.bfloat16
    again = KeyshiftForCausalLM.from_pretrained(tmp_path / "ours").float()
    assert_close(full(theirs.float(), tokens(2, 30)), full(again, tokens(2, 30)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream_norm": False}, "stream_norm=False has no place in a deepseek_v2 model.*train one with"),
        ({"attention": "gqa", "position": "rope", "stream_norm": False}, "takes attention 'mla', 'gva' or"),
        ({"position": "rope"}, "not attention='gva', position='rope'"),
        ({"shift": "kv"}, "shift='kv' has no place in a deepseek_v2 model"),
        ({"query_norm": True}, "query_norm=True has no place"),
        ({"projection_bias": "qkv"}, "projection_bias='qkv' has no place"),
        ({"mlp": "none"}, "mlp='none' has no place"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05: the norm over DeepSeek's latent has 1e-06"),
        ({"rope_pairs": [1, 0]}, None),
        ({"rope_pairs": [1, 3]}, r"rope_pairs=\[1, 3\] has no place.*train one without rope_pairs"),
        ({"rope_pairs": [0, 0]}, r"rope_pairs=\[0, 0\] has no place"),
        ({"rope_pairs": [0, 2], "scaled_rope": {**YARN, LONG: 1024}}, r"rope_pairs=\[0, 2\] has no place"),
        ({"scaled_rope": LLAMA3}, "scaled_rope of kind 'llama3' has no place"),
        ({"scaled_rope": {**YARN, "attention_factor": 0.5}}, "queries and keys by 0.5, which has no place"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8},
            "hidden_size=32 is not divisible",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_what_deepseek_has_not_is_refused_by_name(
    fields: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    ours(**fields).save_pretrained(tmp_path / "ours")
    if message is None:
        assert plan(str(tmp_path / "ours"), to="deepseek_v2").target.rope_parameters["rope_theta"] == 100.0
        return
    with pytest.raises(UserError, match=message):
        plan(str(tmp_path / "ours"), to="deepseek_v2")


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    at = "model.layers.0.self_attn."
    changes = {
        f"weights missing: {at}rope_key.weight": lambda found: found.pop(at + "rope_key.weight"),
        "weights not known: extra": lambda found: found.update(extra=torch.ones(1)),
        rf"misshapen: {at}kv_b_proj.weight from \[3, 8, 8\]": lambda found: found.update(
            {at + "source.key_map": torch.ones(3, 8, 8)}
        ),
        rf"misshapen: {at}kv_a_proj_with_mqa.weight \[19, 32\] instead of \[20, 32\]": lambda found: (
            found.update({at + "source.v_proj.weight": torch.ones(15, 32)})
        ),
    }
    ours().save_pretrained(tmp_path / "ours")
    whole = load_file(tmp_path / "ours" / WEIGHTS)
    for message, change in changes.items():
        weights = dict(whole)
        change(weights)
        save_file(weights, tmp_path / "ours" / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            plan(str(tmp_path / "ours"), to="deepseek_v2")


def test_the_command(tmp_path: Path) -> None:
    ours().save_pretrained(tmp_path / "ours")
    done = in_process("convert", "ours", "theirs", "--to", "deepseek_v2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "keyshift to deepseek_v2: 19,840 parameters, 1,536 of them new"
    assert max(map(len, done.stdout.splitlines())) <= 80
    ours(stream_norm=False).save_pretrained(tmp_path / "plain")
    done = in_process("convert", "plain", "out", "--to", "deepseek_v2", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()
