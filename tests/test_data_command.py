"""``keyshift data``: stores made, looked at, and what is said of mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from commands import in_process
from texts import sentences, write_jsonl, write_parquet

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, cli, data


def test_a_store_from_files_and_a_look_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", sentences(500))
    monkeypatch.chdir(tmp_path)
    making = ["prepare", "in", "--out", "store", "--train-tokenizer", "--vocab-size", 400]
    code, out, _ = in_process("data", *making)
    assert code == 0
    store = data.TextData.open("store")
    assert store.end_token == 0
    assert f"{store.train.token_count:,}" in out
    assert "it was there already" not in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = in_process("data", "check", "store", "--json")
    assert json.loads(out) == {**store.summary(), "end_token": 0, "store": "store"}
    code, out, errors = in_process("data", *making, "--json")
    assert json.loads(out)["train"] == store.summary()["train"]
    assert "it was there already" in errors
    tokens = tmp_path / "store/00000.train.tokens"
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    code, out, errors = in_process("data", "check", "store")
    assert (code, out) == (2, "")
    assert errors.startswith("error: store/00000.train.tokens: corrupt")
    assert len(errors.splitlines()) == 1


def test_a_store_from_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_parquet(tmp_path / "set/test-0.parquet", {"body": sentences(400), "id": list(range(400))})
    data.train_tokenizer(sentences(300), 400).save_pretrained(tmp_path / "tokenizer")
    options = ["--dataset", tmp_path / "set", "--split", "test", "--column", "body", "--workers", 1]
    more = ["--tokenizer", tmp_path / "tokenizer/tokenizer.json", "--validation-fraction", 0.3]
    code, _, _ = in_process("data", "prepare", *options, *more, "--out", tmp_path / "store")
    assert code == 0
    store = data.TextData.open(tmp_path / "store")
    tokenizer = data.load_tokenizer(store.tokenizer_path)
    decoded = [
        tokenizer.decode(tokens) for side in (store.train, store.validation) for tokens in side.documents()
    ]
    assert sorted(decoded) == sorted(sentences(400))
    assert store.validation.document_count > 80


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["prepare", "in", "--train-tokenizer"], ["--out"]),
        (["prepare", "in", "--out", "o"], ["--tokenizer", "--train-tokenizer"]),
        (["prepare", "in", "--out", "o", "--tokenizer", "x", "--train-tokenizer"], ["either --tokenizer"]),
        (["prepare", "--out", "o", "--train-tokenizer"], ["PATH", "--dataset"]),
        (["prepare", "in", "--dataset", "d", "--out", "o", "--train-tokenizer"], ["PATH", "--dataset"]),
        (["prepare", "in", "--config", "c", "--out", "o", "--train-tokenizer"], ["--config=c"]),
        (["prepare", "nowhere", "--out", "o", "--train-tokenizer"], ["nowhere"]),
        (["prepare", "in", "--out", "o", "--train-tokenizer", "--workers", "0"], ["workers is 0"]),
        (["prepare", "in", "--out", "o", "--tokenizer", "./none"], ["./none"]),
        (["check", "in"], ["not a prepared store", "keyshift data prepare"]),
    ],
)
def test_mistakes(
    tmp_path: Path, arguments: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", sentences(50))
    monkeypatch.chdir(tmp_path)
    code, _, errors = in_process("data", *arguments)
    assert code == 2
    assert all(part in errors for part in parts)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_asked_to_stop_it_stops_and_goes_on_later(tmp_path: Path) -> None:
    """Ctrl-C while two processes tokenise: exit code 130 soon, nothing half-written, finished shards kept."""
    file = write_jsonl(tmp_path / "a.jsonl", [f"{n} " + "word and word " * 100 for n in range(8_000)])
    data.train_tokenizer(sentences(300), 400).save_pretrained(tmp_path / "tokenizer")
    script = (  # with shards small enough that they are finished soon
        "import functools, keyshift.cli, keyshift.data\n"
        "keyshift.data.prepare = functools.partial(keyshift.data.prepare, shard_bytes=200_000)\n"
        "keyshift.cli.main()"
    )
    command = [sys.executable, "-c", script, "data", "prepare", file, "--out", tmp_path / "store"]
    command += ["--tokenizer", tmp_path / "tokenizer", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob(".store.partial/records/*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert not (tmp_path / "store").exists()
    assert not list(tmp_path.glob(".store.partial/*/.*"))
    assert list(tmp_path.glob(".store.partial/records/*.json"))


def test_a_model_learns_where_a_text_ends(tmp_path: Path) -> None:
    """Trained on a store with end tokens, ``generate`` stops by itself; on one without, it never does."""
    documents = [f"{number}. {'ab' * (number % 7 + 1)}!" for number in range(300)]
    file = write_jsonl(tmp_path / "a.jsonl", documents)
    lengths = {}
    for ended in (True, False):
        store = data.prepare([file], tmp_path / f"{ended}", tokenizer=None, vocab_size=257, end_token=ended)
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = KeyshiftForCausalLM(KeyshiftConfig(vocab_size=257, max_position_embeddings=128, **sizes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(60):
            loss = model(**store.train.batch(step, 8, 48, seed=0)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tokenizer = data.load_tokenizer(store.tokenizer_path)
        prompts = [[0, *tokenizer.encode(f"{number}. ab", add_special_tokens=False)] for number in (11, 25)]
        lengths[ended] = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=0, pad_token_id=0
            ).shape[1]
            - len(prompt)
            for prompt in prompts
        ]
    assert max(lengths[True]) < 30
    assert min(lengths[False]) == 60


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/data.md").read_text()
    command = typer.main.get_command(cli.app).commands["data"].commands["prepare"]  # type: ignore[attr-defined]
    options = {name: each.default for each in command.params for name in each.opts if name.startswith("--")}
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|", page, re.MULTILINE))
    assert rows.keys() == options.keys()
    for name, default in options.items():
        if default and not isinstance(default, bool) and name != "--out":
            assert rows[name] == f"`{default}`"
