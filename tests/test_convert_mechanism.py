"""GQA made into GVA: exact where the smaller cache can hold it, near elsewhere, measured in any case."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_process
from texts import write_jsonl
from tiny import LLAMA3, YARN, assert_close, draw_biases_and_norms_, full, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.attention.module import attentions
from keyshift.convert import plan
from keyshift.convert.across import average_turns, choose_pairs, collect, directions, fill_
from keyshift.convert.mechanism import adapt, layer_errors, target_of
from keyshift.data import train_tokenizer
from keyshift.opened import load_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def source(**fields: Any) -> KeyshiftForCausalLM:
    torch.manual_seed(0)
    model = KeyshiftForCausalLM(KeyshiftConfig(**{**SIZES, **fields})).eval()
    draw_biases_and_norms_(model)
    return model


def fitted(
    model: KeyshiftForCausalLM, rope_width: int, shift: str = "none", **latent: Any
) -> KeyshiftForCausalLM:
    """The GVA or MLA model, calibrated on random tokens."""
    moments = collect(model, [tokens(8, 64, seed=seed) for seed in range(4)])
    turns = average_turns(model.config, 64)
    target = target_of(model.config, rope_width, shift, **latent)
    target.rope_pairs = choose_pairs([directions(m, m.maps()) for m in moments], turns, rope_width // 2)
    made = KeyshiftForCausalLM(target).eval()
    others = {name: weight for name, weight in model.state_dict().items() if ".self_attn." not in name}
    made.load_state_dict(others, strict=False)
    for new, old in zip(attentions(made), attentions(model), strict=True):
        fill_(new, old, moments[new.layer_idx], turns)
    return made


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"projection_bias": "qkv"},
        {"projection_bias": "all"},
        {"scaled_rope": LLAMA3},
        {"scaled_rope": YARN},
        {"head_dim": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("attention", ["gva", "mla"])
def test_one_group_with_a_rotary_key_as_wide_as_a_head_is_the_same_model(
    attention: str, fields: dict[str, Any]
) -> None:
    """All of its keys go into the rotary key and all of its values into the stream."""
    model = source(attention="mqa", **fields)
    made = fitted(model, model.config.head_dim, attention=attention)
    assert made.config.attention == attention
    assert_close(full(made, tokens(2, 60)), full(model, tokens(2, 60)), 1e-4)


@pytest.mark.parametrize("fields", [{}, {"projection_bias": "all", "scaled_rope": YARN}], ids=str)
@pytest.mark.parametrize("attention", ["gva", "mla"])
def test_a_rotary_key_as_wide_as_all_groups_keys_loses_nothing(
    attention: str, fields: dict[str, Any]
) -> None:
    """Every pair is there once for each group; the streams have the values to themselves."""
    model = source(num_key_value_heads=2, **fields)
    made = fitted(model, 16, attention=attention)
    assert made.config.rope_pairs == [0, 0, 1, 1, 2, 2, 3, 3]
    assert_close(full(made, tokens(2, 60)), full(model, tokens(2, 60)), 1e-4)


@pytest.mark.parametrize("attention", ["gva", "mla"])
def test_keys_that_stand_still_and_are_a_map_of_the_values_are_kept_exactly(attention: str) -> None:
    """RoPE so slow that only the first pair turns, in which there is nothing."""
    model = source(attention="mqa", rope_theta=1e30)
    for layer in attentions(model):
        mixed = torch.randn(8, 8) @ layer.source.v_proj.weight.detach()
        mixed[[0, 4]] = 0
        layer.source.k_proj.weight.data.copy_(mixed)
    assert max(layer_errors(model, fitted(model, 2, attention=attention), tokens(2, 60))) < 1e-4


@pytest.mark.parametrize("fields", [{}, {"projection_bias": "all"}], ids=str)
def test_a_latent_as_wide_as_keys_and_values_keeps_all_keys_that_stand_still(fields: dict[str, Any]) -> None:
    """Of two groups, whose keys and values have nothing to do with each other: 28 channels, of which one pair
    has its place in the rotary key."""
    model = source(num_key_value_heads=2, rope_theta=1e30, **fields)
    for layer in attentions(model):
        for parameter in layer.source.k_proj.parameters():
            parameter.data[[0, 4, 8, 12]] = 0
    whole, short = (fitted(model, 2, attention="mla", latent_width=width) for width in (26, 25))
    ids = tokens(2, 60)
    assert_close(full(whole, ids), full(model, ids), 1e-4)
    assert max(layer_errors(model, short, ids)) > 1e-3


def test_a_wider_latent_is_nearer_and_holds_more_than_the_streams_of_groups() -> None:
    model = source(num_key_value_heads=2)
    errors = [
        sum(layer_errors(model, fitted(model, 4, attention="mla", latent_width=width), tokens(4, 60)))
        for width in (4, 8, 16, 24)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < sum(layer_errors(model, fitted(model, 4), tokens(4, 60)))


def test_a_wider_rotary_key_is_nearer() -> None:
    model = source(num_key_value_heads=2)
    errors = [sum(layer_errors(model, fitted(model, width), tokens(4, 60))) for width in (2, 4, 8, 12)]
    assert errors == sorted(errors, reverse=True)


def test_the_pairs_that_lose_most_without_rotation_are_chosen() -> None:
    model = source(num_key_value_heads=2, head_dim=16)
    for layer in attentions(model):
        keys = layer.source.k_proj.weight.data.unflatten(0, (2, 16))
        keys[:, 3] *= 30
        keys[:, 11] *= 30
    made = fitted(model, 4)
    assert 3 in made.config.rope_pairs
    assert len(made.config.rope_pairs) == 2


@pytest.mark.parametrize("attention", ["gva", "mla"])
def test_a_shift_at_the_identity_changes_nothing(attention: str) -> None:
    model = source(num_key_value_heads=2)
    plain, shifted = (fitted(model, 4, shift=shift, attention=attention) for shift in ("none", "kv"))
    assert shifted.config.shift == "kv"
    assert torch.equal(full(shifted, tokens(2, 30)), full(plain, tokens(2, 30)))


@pytest.mark.parametrize(
    ("fields", "width", "message"),
    [
        ({"shift": "kv"}, 4, "without a shift, not attention='gqa', position='rope', shift='kv'"),
        ({"attention": "gva", "position": "decoupled_rope"}, 4, "not attention='gva'"),
        ({"position": "alibi"}, 4, "position='alibi'"),
        ({"query_norm": True}, 4, r"norms of queries and keys stand between"),
        ({"key_norm": True}, 4, r"norms of queries and keys stand between"),
        ({}, 3, "--rope-width=3 must be even, above 0 and at most 8"),
        ({}, 10, "--rope-width=10 must be even"),
    ],
)
def test_what_cannot_be_converted_is_refused(fields: dict[str, Any], width: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        target_of(KeyshiftConfig(**{**SIZES, **fields}), width, "none")


# The command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text and a Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("place")
    text = "\n\n".join(" ".join(f"line {n * k % 89} says {k}" for k in range(400)) for n in range(6))
    (folder / "text.txt").write_text(text)
    (folder / "short.txt").write_text("a few words")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).save_pretrained(folder / "llama")
    train_tokenizer([text], 300).save_pretrained(folder / "llama")
    return folder


GVA = ("--attention", "gva", "--text", "text.txt", "--tokens", "2000")
MLA = ("--attention", "mla", *GVA[2:])


def test_the_command_writes_a_checkpoint_and_says_how_near_it_is(place: Path, tmp_path: Path) -> None:
    done = in_process("convert", "llama", tmp_path / "gva", *GVA, cwd=place)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    model = KeyshiftForCausalLM.from_pretrained(tmp_path / "gva")
    assert lines[0] == f"llama to gva: {model.num_parameters():,} parameters"
    said = json.loads(in_process("convert", "llama", "dry", *GVA, "--dry-run", "--json", cwd=place).stdout)
    weights = model.num_parameters() * model.dtype.itemsize
    assert said["disk_bytes"] == weights
    assert 0 <= (tmp_path / "gva/model.safetensors").stat().st_size - weights < 2**14  # its header
    assert lines[2].startswith("cache: 128 to 80 bytes a token in bfloat16, 0.625 of it")
    assert lines[3].startswith("perplexity: ")
    assert max(map(len, lines[:-1])) <= 80
    assert (model.config.attention, model.config.position) == ("gva", "decoupled_rope")
    row = json.loads(in_process("convert", "llama", tmp_path / "other", *GVA, "--json", cwd=place).stdout)
    again = adapt(plan(str(place / "llama")), place / "text.txt", tokens=2000)
    assert row["loss_after"] == pytest.approx(again.loss_after, rel=1e-6)
    assert row["loss_before"] != row["loss_after"]
    assert len(row["layer_errors"]) == 2
    assert_close(full(model, tokens(1, 60)), full(again.model, tokens(1, 60)))
    answered = in_process("generate", tmp_path / "gva", "line", "--max-new-tokens", 3)
    assert answered.returncode == 0, answered.stderr


def test_a_disk_that_is_too_small_is_said_before_the_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Disk", (), {"free": 1000}))
    done = in_process("convert", "llama", tmp_path / "gva", *GVA, cwd=place)
    assert done.returncode == 2
    assert "are free there" in done.stderr
    assert "calibration text" not in done.stderr


def test_short_documents_make_short_rows(place: Path, tmp_path: Path) -> None:
    """Rows lie within documents: of 90 documents of some 100 tokens none has 512."""
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 600}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).save_pretrained(tmp_path / "llama")
    for path in (place / "llama").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "llama")
    tokenizer = load_tokenizer(str(tmp_path / "llama"))
    texts = [f"line {100 + n} says {1000 + n * n}. " * 8 for n in range(90)]
    lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert 64 <= min(lengths) <= max(lengths) < 128
    write_jsonl(tmp_path / "short.jsonl", texts)
    adapted = adapt(plan(str(tmp_path / "llama")), tmp_path / "short.jsonl", tokens=4096)
    assert adapted.tokens == 64 * 48  # of 64 rows, a quarter of which is measured on


def test_mla_caches_as_many_bytes_unless_told_otherwise(place: Path, tmp_path: Path) -> None:
    for name, width, ratio in (("mla", (), 0.625), ("narrow", ("--latent-width", "8"), 0.375)):
        done = in_process("convert", "llama", tmp_path / name, *MLA, *width, "--json", cwd=place)
        row = json.loads(done.stdout)
        assert row["bytes_after"] / row["bytes_before"] == ratio
        model = KeyshiftForCausalLM.from_pretrained(tmp_path / name)
        assert (model.config.attention, model.config.stream_norm) == ("mla", False)
        again = adapt(
            plan(str(place / "llama")),
            place / "text.txt",
            tokens=2000,
            attention="mla",
            latent_width=model.config.kv_lora_rank,
        )
        assert row["loss_after"] == pytest.approx(again.loss_after, rel=1e-6)
        assert_close(full(model, tokens(1, 60)), full(again.model, tokens(1, 60)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "mha"], "--attention mha is not known; use same, gva or mla"),
        (["--attention", "gva"], "pass --text, and no --to"),
        ([*GVA, "--to", "original"], "pass --text, and no --to"),
        (["--attention", "gva", "--text", "nowhere.txt"], "nowhere.txt"),
        (["--attention", "gva", "--text", "nowhere.txt", "--dry-run"], "nowhere.txt"),
        (["--attention", "gva", "--text", "short.txt"], "has 0 rows of 64 tokens within documents and"),
        ([*GVA, "--rope-width", "5"], "--rope-width=5 must be even"),
        ([*GVA, "--rope-width", "5", "--dry-run"], "--rope-width=5 must be even"),
        ([*GVA, "--latent-width", "5"], "--latent-width 5 is for --attention mla"),
        (["--latent-width", "5"], "--latent-width 5 is for --attention mla"),
        (["--attention", "mla"], "--attention mla fits a keyshift model on text: pass --text"),
        ([*MLA, "--latent-width", "0", "--dry-run"], "--latent-width=0 must be above 0 and at most 32"),
        ([*MLA, "--latent-width", "33"], "--latent-width=33 must be above 0 and at most 32"),
        ([*GVA, "--shift", "all"], "shift='all' is not known"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    place: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = in_process("convert", "llama", tmp_path / "out", *arguments, cwd=place)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
