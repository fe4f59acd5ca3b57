"""A checkpoint that is damaged, foreign or does not fit is refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError

SIZES = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    KeyshiftForCausalLM(KeyshiftConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def refusal(folder: Path, **options) -> str:
    messages = []
    for load in (KeyshiftForCausalLM, AutoModelForCausalLM):
        with pytest.raises(UserError) as caught:
            load.from_pretrained(folder, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert str(folder) in messages[0]
    assert "\n" not in messages[0]
    return messages[0]


def edit(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file(checkpoint, share):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * share)])
    assert "cannot be read" in refusal(checkpoint)


@pytest.mark.parametrize("fields", [{"hidden_size": 64}, {"head_dim": 16}, {"vocab_size": 33}])
def test_a_configuration_of_other_sizes(checkpoint, fields):
    edit(checkpoint, **fields)
    assert "mismatched keys" in refusal(checkpoint)


@pytest.mark.parametrize("fields", [{"attention": "gva"}, {"shift": "kv"}, {"num_hidden_layers": 3}])
def test_a_configuration_that_asks_for_more(checkpoint, fields):
    edit(checkpoint, **fields)
    assert "missing keys" in refusal(checkpoint)


def test_a_configuration_that_asks_for_less(checkpoint):
    edit(checkpoint, num_hidden_layers=1)
    assert "unexpected keys" in refusal(checkpoint)


def test_misshapen_weights_pass_where_the_caller_says_so(checkpoint):
    edit(checkpoint, vocab_size=33)
    model = KeyshiftForCausalLM.from_pretrained(checkpoint, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape == (33, 32)


def test_another_librarys_checkpoint(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=31)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model_type='gpt2'"):
        KeyshiftForCausalLM.from_pretrained(tmp_path)


def test_a_whole_one_still_loads_with_its_options(checkpoint):
    model, info = KeyshiftForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"]


def test_the_decoder_loads_without_its_head(checkpoint):
    whole = KeyshiftForCausalLM.from_pretrained(checkpoint)
    headless = AutoModel.from_pretrained(checkpoint)
    ids = torch.arange(5)[None]
    assert torch.equal(headless(ids).last_hidden_state, whole.model(ids).last_hidden_state)
