"""Models by name or folder: what opens, and that whatever does not is one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.cache_report import load_config
from keyshift.circuits import loading
from keyshift.circuits.loading import load_model, shipped_models

VOCAB = 30
IDS = torch.arange(12)[None] * 7 % VOCAB


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **changes})
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that is as it should be, to be damaged."""
    gpt2().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def tokenizer(tokens: int = VOCAB) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(tokens)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", unk_token="w1")


def test_a_transformers_folder(folder: Path) -> None:
    model = load_model(str(folder))
    assert torch.equal(model.logits(IDS), gpt2()(IDS).logits)
    assert model.tokenizer is None
    assert model.name == folder.name
    assert not model.module.training


def test_its_tokenizer(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    model = load_model(str(folder))
    assert model.bos == 0
    assert model.encode("w3 w5").tolist() == [[0, 3, 5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_own_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    gpt2().to(dtype).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).dtype == dtype


def test_ours(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    ours = KeyshiftForCausalLM(KeyshiftConfig(**sizes, intermediate_size=48, shift="kv")).eval()
    ours.save_pretrained(tmp_path)
    assert torch.equal(load_model(str(tmp_path)).logits(IDS), ours(IDS).logits)


def test_a_head_that_is_not_used_does_no_harm(folder: Path) -> None:
    rewrite(folder, lambda weights: {**weights, "score.weight": torch.zeros(2, 16)})
    assert torch.equal(load_model(str(folder)).logits(IDS), gpt2()(IDS).logits)


@pytest.mark.parametrize("name", ["two-layer", "one-layer-shift"])
def test_shipped_models_are_whole_and_small(name: str) -> None:
    assert list(shipped_models()) == ["two-layer", "one-layer-shift"]
    model = load_model(name)
    assert model.name == name
    assert model.bos == 0
    assert len(model.tokenizer) == model.vocabulary
    files = [path for folder in shipped_models().values() for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 8_000_000


def test_shipped_models_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "MODELS", folder.parent)
    monkeypatch.setattr(loading, "SHIPPED", ("gpt2",))
    assert shipped_models() == {"gpt2": folder}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")  # no folder of that name here, and the hub is off
    model = load_model("gpt2")
    assert model.name == "gpt2"
    assert torch.equal(model.logits(IDS), gpt2()(IDS).logits)


def test_the_terminal_stays_clean(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    rewrite(folder, lambda weights: {**weights, "score.weight": torch.zeros(2, 16)})
    capfd.readouterr()
    load_model(str(folder))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, True)
    if not bars:
        logging.disable_progress_bar()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def drop(folder: Path) -> None:
    rewrite(folder, lambda weights: {k: v for k, v in weights.items() if "0.mlp.c_fc.weight" not in k})


def misshape(folder: Path) -> None:
    rewrite(folder, lambda weights: {**weights, "transformer.wpe.weight": torch.zeros(3, 3)})


def spoil(folder: Path) -> None:
    rewrite(folder, lambda weights: {**weights, "transformer.wpe.weight": torch.full((32, 16), torch.nan)})


def halve(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def need_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop, "missing keys ['transformer.h.0.mlp.c_fc.weight']"),
        (misshape, "mismatched keys"),
        (spoil, "transformer.wpe.weight"),
        (halve, "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "no model configuration"),
        (lambda folder: (folder / "config.json").write_text("{ not"), "no model configuration"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no model configuration"),
        (need_code, "custom code"),
        (lambda folder: (folder / "tokenizer.json").write_text("{ not"), "the tokenizer of"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(
                '{"tokenizer_class": "GPT2Tokenizer"}'
            ),
            "no vocabulary",
        ),
        (lambda folder: tokenizer(VOCAB + 1).save_pretrained(folder), "do not belong together"),
    ],
)
def test_a_damaged_folder_is_one_line(folder: Path, damage: Callable[[Path], Any], said: str) -> None:
    damage(folder)
    with pytest.raises(UserError) as error:
        load_model(str(folder))
    assert said in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def bert() -> BertConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes)


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder with a head": (lambda: BertForMaskedLM(bert()), "reads later tokens"),
    "encoder": (lambda: BertModel(bert()), "missing keys"),
    "encoder and decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, num_layers=1, num_heads=2, d_ff=16)
        ),
        "AutoModelForCausalLM",
    ),
    "no attention": (
        lambda: MambaForCausalLM(
            MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
        "has no attention weights",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_models_are_refused(kind: str, tmp_path: Path) -> None:
    make, said = OTHERS[kind]
    make().save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        load_model(str(tmp_path))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("~/nowhere-at-all", "no such folder"),
        ("nobody/Nothing-0.5B", "couldn't connect"),
        ("two-layers", "couldn't connect"),
        ("", "pass the folder of a checkpoint"),
    ],
)
def test_a_name_of_nothing(name: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        load_model(name)
    assert said in str(error.value)
    assert repr(name) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(UserError, match="not a folder; pass the folder of a checkpoint"):
        load_model(str(folder / "config.json"))


@pytest.mark.parametrize(
    "name", ["attn-only-2l", "solu-1l-wiki", "redwood_attn_2l", "NeelNanda/GELU_1L512W_C4_Code"]
)
def test_what_needs_transformer_lens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    with pytest.raises(UserError) as error:
        load_model(name)
    assert str(error.value) == f"model={name!r} needs TransformerLens: pip install 'keyshift[tl]'"


def test_a_hub_name_may_have_a_dot() -> None:
    with pytest.raises(UserError, match="couldn't connect"):
        load_config("nobody/Nothing-0.5B")
