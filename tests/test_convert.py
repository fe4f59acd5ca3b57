"""Checkpoints of other libraries as keyshift models and back: same logits, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_process
from confined import memory_limit, run_in
from safetensors.torch import load_file, save_file
from test_reference_libraries import SHARED, assert_same_logits
from tiny import LLAMA3, YARN, draw_biases_and_norms_, full, tokens
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from keyshift import KeyshiftForCausalLM, UserError
from keyshift.convert import convert, plan
from keyshift.convert.files import INDEX, WEIGHTS
from keyshift.errors import RunError

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN_IN_FULL = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8.0, "truncate": False}

DENSE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
"""A DeepSeek model without experts."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one key head, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, as many key heads": ("llama", {"num_key_value_heads": 4}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama 3.1": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "llama, linear": ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 1e4}}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral with a window that is never full": ("mistral", {"sliding_window": 4096}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "qwen2, yarn in full": ("qwen2", {"rope_parameters": {**YARN_IN_FULL, "rope_theta": 1e4}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "deepseek_v2": ("deepseek_v2", DENSE),
    "deepseek_v2, narrow keys, tied": (
        "deepseek_v2",
        {**DENSE, "qk_nope_head_dim": 4, "tie_word_embeddings": True},
    ),
    "deepseek_v2, yarn": ("deepseek_v2", {**DENSE, "rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "qwen3 with biases": ("qwen3", {"head_dim": 6, "attention_bias": True}),
}


def build(name: str) -> PreTrainedModel:
    """A model of the other library, nothing in it at 0 or 1."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHARED, "num_key_value_heads": 2, "eos_token_id": 3, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    draw_biases_and_norms_(model)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by name."""
    root = tmp_path_factory.mktemp("theirs")

    def saved(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        if not folder.exists():
            build(name).save_pretrained(folder)
        return folder

    return saved


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_model_here_and_the_way_back_ends_where_it_began(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint(name)
    assert convert(plan(str(source)), tmp_path / "ours") < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(source)
    assert_same_logits(KeyshiftForCausalLM.from_pretrained(tmp_path / "ours"), theirs)
    assert convert(plan(str(tmp_path / "ours"), to="original"), tmp_path / "back") < 1e-5
    assert load_file(tmp_path / "back" / WEIGHTS).keys() == load_file(source / WEIGHTS).keys()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(theirs)
    assert torch.equal(full(back, tokens(2, 30)), full(theirs, tokens(2, 30)))


@pytest.mark.parametrize("shift", ["kv", "k", "v"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_shift_is_put_in_at_the_identity_and_then_learns(
    name: str, shift: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    convert(plan(str(checkpoint(name))), tmp_path / "plain")
    planned = plan(str(checkpoint(name)), shift=shift)
    assert planned.needs()["added_parameters"] == 2 * 2 * 2 * len(shift)  # layers, heads, window
    convert(planned, tmp_path / "shifted")
    plain, shifted = (KeyshiftForCausalLM.from_pretrained(tmp_path / each) for each in ("plain", "shifted"))
    assert shifted.config.shift == shift
    assert torch.equal(full(shifted, tokens(2, 30)), full(plain, tokens(2, 30)))
    ids = tokens(2, 30)
    shifted(ids, labels=ids).loss.backward()
    gradients = {name: weight.grad for name, weight in shifted.named_parameters() if "_shift." in name}
    assert len(gradients) == 2 * len(shift)
    assert all(gradient.abs().min() > 0 for gradient in gradients.values())


def test_shards_stay_shards_and_half_precision_stays_as_it_is(tmp_path: Path) -> None:
    theirs = build("qwen2").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="12KB")
    convert(plan(str(tmp_path / "theirs"), shift="kv"), tmp_path / "ours")
    shards = sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors")) == shards
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    for shard in shards:
        tensors = load_file(tmp_path / "ours" / shard)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert {index["weight_map"].pop(name) for name in tensors} == {shard}
    assert not index["weight_map"]
    assert KeyshiftForCausalLM.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


def test_what_belongs_to_a_checkpoint_goes_along_but_no_code(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "theirs")
    left = ("modeling_llama.py", "optimizer.bin", "trainer_state.json", "keyshift_state.json")
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", *left):
        (tmp_path / "theirs" / name).write_text("{}")
    convert(plan(str(tmp_path / "theirs")), tmp_path / "ours")
    found = {path.name for path in (tmp_path / "ours").iterdir()}
    expected = {"tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json", "config.json"}
    assert found == {*expected, WEIGHTS}


def test_old_files_may_hold_what_is_computed(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """RoPE's angles, and an output layer beside the embedding that it is tied to."""
    shutil.copytree(checkpoint("qwen2"), tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs" / WEIGHTS)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "theirs" / WEIGHTS, metadata={"format": "pt"})
    assert convert(plan(str(tmp_path / "theirs")), tmp_path / "ours") < 1e-5


def changed(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(source, target)
    weights = load_file(target / WEIGHTS)
    change(weights)
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
    return target


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NORM), f"weights missing: {NORM}"),
        (lambda weights: weights.update(extra=torch.ones(1)), "weights not known: extra"),
        (
            lambda weights: weights.update({NORM: torch.ones(3)}),
            rf"weights misshapen: {NORM} \[3\] instead of \[32\]",
        ),
        (lambda weights: weights.update({NORM: torch.ones(32).int()}), f"{NORM} is I32; quantised weights"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=message):
        plan(str(changed(checkpoint("llama"), tmp_path / "theirs", change)))


def with_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with another configuration."""
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, **changes}))
    return target


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "gpt_neox"}, "'gpt_neox' cannot be converted; these can: llama, mistral"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true"),
        ("mistral", {"sliding_window": 8}, "sliding_window=8, below max_position_embeddings=4096"),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window=true"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"hidden_act": "nothing"}, "hidden_act='nothing'"),
        (
            "deepseek_v2",
            {"first_k_dense_replace": 1},
            "first_k_dense_replace=1 of 2 layers: a keyshift model has",
        ),
        ("deepseek_v2", {"q_lora_rank": 8}, "q_lora_rank=8 has no place"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias=True has no place"),
        ("deepseek_v2", {"qk_nope_head_dim": 6}, "qk_nope_head_dim=6 has no place"),
        (
            "deepseek_v2",
            {"rms_norm_eps": 1e-5},
            "rms_norm_eps=1e-05: the norm over DeepSeek's latent has 1e-06",
        ),
        (
            "deepseek_v2",
            {"rope_parameters": {**YARN, "mscale_all_dim": 0.7, "mscale": 0.7, "rope_theta": 1e4}},
            "mscale_all_dim=0.7 also scales",
        ),
    ],
)
def test_what_a_keyshift_model_has_not_is_refused_by_name(
    name: str,
    changes: dict[str, Any],
    message: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=message):
        plan(str(with_config(checkpoint(name), tmp_path / "theirs", **changes)))


def test_what_was_added_has_no_way_back(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    convert(plan(str(checkpoint("qwen3")), shift="kv"), tmp_path / "shifted")
    with pytest.raises(UserError, match="shift='kv' has no place in a qwen3 model"):
        plan(str(tmp_path / "shifted"), to="original")
    convert(plan(str(checkpoint("qwen3"))), tmp_path / "plain")
    with pytest.raises(UserError, match=r"(query|key)_norm=True has no place in a llama model"):
        plan(str(tmp_path / "plain"), to="llama")


def test_a_model_of_ours_that_never_was_another_finds_the_one_that_it_fits(tmp_path: Path) -> None:
    from keyshift import KeyshiftConfig

    settings = {**SHARED, "num_key_value_heads": 2}
    for fields, expected in (({}, "llama"), ({"projection_bias": "qkv"}, "qwen2")):
        torch.manual_seed(0)
        KeyshiftForCausalLM(KeyshiftConfig(**settings, **fields)).save_pretrained(tmp_path / expected)
        planned = plan(str(tmp_path / expected), to="original")
        assert planned.target.model_type == expected
        assert convert(planned, tmp_path / f"{expected}-out") < 1e-5


def test_interrupted_or_failed_it_leaves_nothing_and_the_next_one_works(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(str(checkpoint("llama")))

    def interrupt(done: int, total: int) -> None:
        assert 0 < done <= total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(planned, tmp_path / "ours", interrupt)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".ours.partial").mkdir()  # of one that was killed
    (tmp_path / ".ours.partial" / "half").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr("keyshift.convert.conversion.TOLERANCE", -1.0)
        with pytest.raises(RunError, match="logits differ by"):
            convert(planned, tmp_path / "ours")
    assert not list(tmp_path.iterdir())
    convert(planned, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_too_large_to_compare_is_said_and_too_large_for_the_disk_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(str(checkpoint("llama")))
    with monkeypatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
        assert convert(planned, tmp_path / "ours") is None
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Disk", (), {"free": 1000}))
        with pytest.raises(UserError, match="are free there"):
            convert(planned, tmp_path / "other")


@pytest.mark.slow
def test_a_checkpoint_larger_than_memory_is_converted_shard_by_shard(tmp_path: Path) -> None:
    """In a container too, whose limit is not the machine's: comparing logits would end there."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_hidden_layers=26
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "llama", max_shard_size="100MB")
    size = sum(path.stat().st_size for path in (tmp_path / "llama").glob("*.safetensors"))
    limit = 700 * 2**20  # half of which are Python, PyTorch and transformers
    assert size > 1.2 * limit
    with memory_limit(limit) as group:
        done = run_in(group, "-m", "keyshift.cli", "convert", tmp_path / "llama", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    assert "logits: not compared" in done.stdout
    ours = KeyshiftForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(ours.lm_head.weight, model.lm_head.weight)
    assert torch.equal(ours.model.layers[25].mlp.up_proj.weight, model.model.layers[25].mlp.up_proj.weight)


# The command


def test_the_command_says_what_it_takes_what_it_did_and_fits_80_columns(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint("llama")
    done = in_process("convert", source, "dry", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())
    done = in_process("convert", source, "ours", "--shift", "kv", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("llama to keyshift: ")
    assert lines[0].endswith("16 of them new")
    assert lines[-2].startswith("logits: ")
    assert lines[-1] == "checkpoint: ours"
    assert max(map(len, lines)) <= 80
    row = json.loads(in_process("convert", "ours", "again", "--json", cwd=tmp_path).stdout)
    assert row["logits_difference"] == 0.0
    assert row["disk_bytes"] == (tmp_path / "again" / WEIGHTS).stat().st_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all", "out"], "SRC 'nowhere/at/all': no such folder"),
        (["./nowhere", "out"], "no such folder"),
        (["SRC", "SRC"], "exists; choose another folder"),
        (["SRC", "out", "--shift", "qkv"], "--shift qkv is not known; use kv, k or v"),
        (["SRC", "out", "--to", "gpt2"], "--to gpt2 is not known; use one of llama"),
        (["SRC", "out", "--to", "llama", "--shift", "kv"], "leave it out with --to llama"),
        (["empty", "out"], "no model configuration at"),
        (["pickle", "out"], "pytorch_model.bin is a pickle"),
        (["damaged", "out"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint("llama")
    (tmp_path / "empty").mkdir()
    for name in ("pickle", "damaged"):
        (tmp_path / name).mkdir()
        shutil.copy(source / "config.json", tmp_path / name)
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "damaged" / WEIGHTS).write_bytes(b"damaged")
    done = in_process("convert", *(source if each == "SRC" else each for each in arguments), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
