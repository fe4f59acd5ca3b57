"""``keyshift generate``: the tokens of ``generate()``, as they come, and what it says of the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import in_process
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError, cache_bytes
from keyshift.data import train_tokenizer
from keyshift.generation import Sampling, answer, prompt_ids
from keyshift.opened import Opened, open_checkpoint

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<a>{% endif %}"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
VARIANTS = {
    "gqa": {"attention": "gqa", "shift": "kv"},
    "gva": {"attention": "gva", "position": "decoupled_rope", "shift": "kv"},
    "mla": {"attention": "mla", "position": "decoupled_rope"},
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([" ".join(f"line {n} says {n * n % 97}, naïve 😀" for n in range(300))], 300)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with a checkpoint of every variant, one with a chat template, and a Llama."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, variant in VARIANTS.items():
        torch.manual_seed(0)
        config = KeyshiftConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **SIZES, **variant)
        KeyshiftForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    KeyshiftForCausalLM.from_pretrained(folder / "gva").save_pretrained(folder / "chat")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "chat")
    tokenizer.chat_template = None
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    return folder


def opened(root: Path, name: str) -> Opened:
    return open_checkpoint(str(root / name), "cpu", "auto")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_text_is_that_of_generate_and_comes_piece_by_piece(root: Path, name: str) -> None:
    model = opened(root, name)
    ids, pieces = prompt_ids(model, "line 3 says"), list[str]()
    given = answer(model, ids, Sampling(max_new_tokens=100), write=pieces.append)
    expected = model.model.generate(ids, max_new_tokens=100, do_sample=False)[0, ids.shape[1] :]
    assert given.text == model.tokenizer.decode(expected, skip_special_tokens=True)
    assert "".join(pieces) == given.text
    assert len([piece for piece in pieces if piece]) > 1
    assert (given.prompt_tokens, given.new_tokens) == (ids.shape[1], len(expected))
    cached = given.prompt_tokens + given.new_tokens - 1  # the last token is not read
    assert given.cache_bytes == cache_bytes(model.model.config, batch=1, tokens=cached, dtype=torch.float32)
    assert 0 < given.first_seconds < given.seconds
    assert given.tokens_per_second > 0


def test_draws_depend_on_the_seed_alone(root: Path) -> None:
    model = opened(root, "gqa")
    ids = prompt_ids(model, "line")

    def text(seed: int) -> str:
        return answer(model, ids, Sampling(max_new_tokens=30, temperature=1.0, top_p=0.9, seed=seed)).text

    assert text(0) == text(0) != text(1)


def test_it_ends_where_positions_end_and_where_it_is_asked_to(root: Path) -> None:
    model = opened(root, "gqa")
    ids = prompt_ids(model, "line " * 20)
    draws = Sampling(max_new_tokens=1000, temperature=1.0)
    model.tokenizer.eos_token = None  # so that the text has no end of its own
    model.model.generation_config.eos_token_id = None
    assert answer(model, ids, draws).new_tokens == 128 - ids.shape[1]
    count = iter(range(1, 100))
    assert answer(model, ids, draws, stop=lambda: next(count) == 7).new_tokens == 7


def test_a_conversation_goes_through_the_template(root: Path) -> None:
    model = opened(root, "chat")
    talk = [{"role": "user", "content": "line 1"}]
    assert model.tokenizer.decode(prompt_ids(model, talk)[0]) == "<user>line 1<a>"
    with pytest.raises(UserError, match=r"has no chat template; pass --raw"):
        prompt_ids(opened(root, "gva"), talk)


def test_other_libraries_models_answer_too(root: Path) -> None:
    given = answer(
        opened(root, "llama"), prompt_ids(opened(root, "llama"), "line"), Sampling(max_new_tokens=5)
    )
    assert given.cache_bytes > 0
    done = in_process("generate", root / "llama", "line", "--cache-dtype", "int8")
    assert done.returncode == 2
    assert "--cache-dtype='int8' rounds the cache of keyshift models" in done.stderr


# The command


def test_text_goes_to_standard_output_and_the_facts_beside_it(root: Path) -> None:
    done = in_process("generate", root / "gva", "line 3", "--max-new-tokens", "20")
    as_json = in_process("generate", root / "gva", "line 3", "--max-new-tokens", "20", "--json")
    row = json.loads(as_json.stdout)
    assert done.stdout == row["text"] + "\n"
    assert f"{row['prompt_tokens']} + {row['new_tokens']} tokens, first after" in done.stderr
    assert done.stderr.rstrip().endswith("kB")
    options = ("--cache-dtype", "int8", "--max-new-tokens", "1", "--json")
    small, whole = (in_process("generate", root / "gva", "line 3", *each) for each in (options, options[2:]))
    assert json.loads(small.stdout)["cache_bytes"] < 0.6 * json.loads(whole.stdout)["cache_bytes"]


def test_what_is_piped_in_is_the_prompt(root: Path) -> None:
    command = [sys.executable, "-m", "keyshift.cli", "generate", str(root / "gva"), "--max-new-tokens", "9"]
    done = subprocess.run(command, input="line 3", capture_output=True, text=True)
    assert done.stdout == in_process("generate", root / "gva", "line 3", "--max-new-tokens", 9).stdout


def test_a_conversation_remembers_what_was_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["line 1", "line 2", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    options = ("--system", "be", "--max-new-tokens", "4", "--json")
    done = in_process("generate", root / "chat", *options)
    assert done.returncode == 0, done.stderr
    decoder, at, answers = json.JSONDecoder(), 0, []
    while at < len(done.stdout.rstrip()):
        row, end = decoder.raw_decode(done.stdout[at:])
        answers.append(row)
        at += end + 1
    first, second = answers
    model = opened(root, "chat")
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "line 1"}]
    talk += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "line 2"}]
    assert second["prompt_tokens"] == prompt_ids(model, talk).shape[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere", "x"], "no such file or folder"),
        (["gva", "x", "--max-new-tokens", "0"], "--max-new-tokens=0 must be at least 1"),
        (["gva", "x", "--temperature", "-1"], "--temperature=-1.0 must be 0 (no draws) or above"),
        (["gva", "x", "--top-p", "0"], "--top-p=0.0 must be above 0 and at most 1"),
        (["gva", "x", "--cache-dtype", "int7"], "int7"),
        (["gva", "x", "--system", "be"], "--system='be' begins a conversation, and this is none"),
        (["gva", "line " * 200], "positions for 128; shorten it"),
        (["gva", "x", "--dtype", "int3"], "--dtype='int3' is not known"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(root: Path, arguments: list[str], message: str) -> None:
    done = in_process("generate", *arguments, cwd=root)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
