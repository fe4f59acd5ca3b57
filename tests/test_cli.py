"""The command line as a user meets it: exit codes, one-line errors, JSON, 80 columns, a quick help."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import in_process
from rich.console import Console

from keyshift.ops.stream_attention import backends, cpu

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 100,
}


def keyshift(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keyshift.cli", *arguments]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def test_help_imports_neither_torch_nor_transformers():
    script = (
        "import sys; sys.argv = ['keyshift', '--help']\n"
        "from keyshift import cli\n"
        "try: cli.main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'pyarrow', 'pydantic', 'lm_eval'}\n"
        "heavy = (heavy | {'datasets'}) & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout
    assert "cache" in done.stdout


def test_papers_lists_every_experiment_with_claim_and_verdict():
    rows = json.loads(in_process("papers", "--json").stdout)
    recipes = Path(__file__).resolve().parents[1] / "recipes" / "papers"
    assert {row["recipe"] for row in rows} == {f"papers/{path.stem}" for path in recipes.glob("*.toml")}
    assert all({"small", "quick", "paper"} <= set(row["sizes"]) for row in rows)
    shown = in_process("papers").stdout
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())
    for row in rows:
        assert all(words in text for words in (row["recipe"], row["paper"], row["verdict"]))


def test_cache_prints_predicted_and_measured_bytes_of_every_mechanism(config):
    rows = json.loads(in_process("cache", config, "--tokens", "300", "--batch", "2", "--json").stdout)
    by_name = {row["mechanism"]: row for row in rows}
    assert all(row["bytes_measured"] == row["bytes_predicted"] for row in rows)
    per_token = {name: row["bytes_per_token"] for name, row in by_name.items()}
    layers, width = 3 * 2, 4 * 64  # bf16
    assert per_token["GQA"] == per_token["GQA + KV shift"] == layers * 2 * width
    assert per_token["GVA, d_r = 16"] == per_token["GVA, d_r = 16 + shift"] == layers * (width + 16)
    assert per_token["MHA"] == layers * 2 * 16 * 64
    assert per_token["MQA"] == layers * 2 * 64
    assert per_token["MLA"] == layers * (4 * 64 + 32)
    assert by_name["GVA, d_r = 16"]["bytes_predicted"] == 300 * 2 * layers * (width + 16)
    # GVA paper, eq. 13, for G d_h = 256
    assert round(by_name["GVA, d_r = 16"]["ratio_to_gqa"], 3) == 0.531
    assert round(by_name["GVA, d_r = 24"]["ratio_to_gqa"], 3) == 0.547


def test_cache_fits_80_columns_and_shows_a_checkpoint_of_ours_first(tmp_path):
    from keyshift import KeyshiftConfig

    KeyshiftConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, attention="mla", position="decoupled_rope"
    ).save_pretrained(tmp_path)
    done = in_process("cache", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("this model")


BYTES_PER_HEAD = {
    "bf16": lambda width: 2 * width,
    "int8": lambda width: width + 2,
    "int4": lambda width: width // 2 + width // 32 * 2,
}
"""Of one token, with its float16 scales."""


@pytest.mark.parametrize("dtype", BYTES_PER_HEAD)
def test_cache_says_how_many_sequences_fit(config: str, dtype: str) -> None:
    options = ["--memory", "80GB", "--tokens", "32k", "--dtype", dtype, "--json"]
    rows = json.loads(in_process("cache", config, *options).stdout)
    head = BYTES_PER_HEAD[dtype]
    layer = {
        "MHA": 2 * 16 * head(64),
        "GQA": 2 * 4 * head(64),
        "GQA + KV shift": 2 * 4 * head(64),
        "MQA": 2 * head(64),
        "MLA": head(4 * 64) + 2 * 32,
        "shared KV": 4 * head(64),
        "GVA, no rotary key": 4 * head(64),
        "GVA, d_r = 16": 4 * head(64) + 2 * 16,
        "GVA, d_r = 16 + shift": 4 * head(64) + 2 * 16,
        "GVA, d_r = 24": 4 * head(64) + 2 * 24,
    }
    assert {row["mechanism"]: row["bytes_per_token"] for row in rows} == {
        name: 3 * size for name, size in layer.items()
    }
    for row in rows:
        sequence = 32_768 * row["bytes_per_token"]
        assert row["bytes_measured"] == row["bytes_predicted"] == sequence
        assert row["sequences"] == 80_000_000_000 // sequence


def test_cache_counts_the_state_of_a_shifted_query_once_per_sequence() -> None:
    from keyshift import KeyshiftConfig
    from keyshift.cache_report import cache_rows

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = KeyshiftConfig(**sizes, shift="qkv", shift_window=3)
    ours = cache_rows(config, tokens=10, batch=1, dtype="int8", memory=100_000)[0]
    sequence = 2 * (10 * 2 * 2 * (16 + 2) + 2 * 4 * 16 * 2)
    assert ours["mechanism"] == "this model"
    assert ours["bytes_measured"] == ours["bytes_predicted"] == sequence
    assert ours["sequences"] == 100_000 // sequence


def test_cache_fits_80_columns_with_many_sequences_too(config: str) -> None:
    done = in_process("cache", config, "--memory", "10TB", "--tokens", "16")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert f"{10 * 10**12 // (16 * 3 * 2 * 2 * 64):,}" in done.stdout  # MQA's, the most


def test_cache_measures_one_layer_where_all_do_not_fit(config, monkeypatch):
    from keyshift import cache_report

    monkeypatch.setattr(cache_report, "MEMORY_SHARE", 0.0)
    rows = cache_report.cache_rows(cache_report.load_config(config), tokens=300, batch=2, dtype="fp32")
    assert {row["layers_measured"] for row in rows} == {1}
    assert all(row["bytes_measured"] == row["bytes_predicted"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cache", "nowhere/config.json"], "nowhere/config.json"),
        (["cache", "CONFIG", "--dtype", "int9"], "dtype='int9'"),
        (["cache", "CONFIG", "--memory", "80XB"], "memory='80XB'"),
        (["cache", "CONFIG", "--memory", "0"], "memory='0'"),
        (["cache", "CONFIG", "--memory", "80"], "memory='80'"),
        (["cache", "CONFIG", "--memory", "80GB", "--batch", "2"], "leave out --batch=2"),
        (["cache", "CONFIG", "--tokens", "32q"], "tokens='32q'"),
        (["cache", "CONFIG", "--tokens", "0k"], "tokens='0k'"),
        (["compare", "inducton"], "did you mean 'induction'"),
        (["compare", "text"], "no text to read"),
        (["compare", "text", "nowhere.txt"], "nowhere.txt"),
        (
            ["compare", "induction", "--set", "trainin.steps=3"],
            "trainin is not known; did you mean 'training'",
        ),
        (["compare", "induction", "--set", "steps"], "must look like"),
        (["compare", "induction", "--set", "model.num_key_value_heads=3"], "not divisible"),
        (["compare", "induction", "--steps", "0"], "training.steps=0"),
        (
            ["compare", "papers/learning-rates", "x.txt", "--set", "training.learning_rate=1e-3"],
            'training.learning_rate=0.001 does not reach axes."learning rate"."0.001", which sets its own',
        ),
        (
            ["compare", "papers/gva-sweep", "x.txt", "--set", "data.sequence_length=32"],
            "data.sequence_length=32 does not reach axes.context.long",
        ),
        (
            ["compare", "induction", "--steps", "5", "--set", 'variants."1-layer GQA".training=7'],
            'variants."1-layer GQA".training=7 must be a table',
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, config, arguments, message):
    own_process = arguments in (["cache", "nowhere/config.json"], ["compare", "text", "nowhere.txt"])
    command = keyshift if own_process else in_process
    done = command(*(config if a == "CONFIG" else a for a in arguments), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stdout.strip() == ""


def test_doctor_lists_every_backend_as_the_backends_themselves_do() -> None:
    rows = json.loads(in_process("doctor", "--json").stdout)
    assert [row["backend"] for row in rows] == list(backends.BACKENDS)
    for row in rows:
        assert set(row) == {"operation", "backend", "available", "detail"}
        assert row["operation"] == "stream_attention"
        reason = backends.missing(row["backend"])
        assert row["available"] == (reason is None)
        assert row["detail"] if reason is None else row["detail"] == reason


def test_doctor_fits_80_columns() -> None:
    done = in_process("doctor")
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    best = "reference" if backends.missing("cpu") else "cpu"
    assert f"generate() decodes on the CPU with: {best}" in lines
    for name in backends.BACKENDS:
        here = "no" if backends.missing(name) else "yes"
        assert any(line.split()[:2] == [name, here] for line in lines)


@pytest.mark.parametrize("missing", [True, False])
def test_doctor_says_what_decodes_and_why_not_the_kernel(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keyshift.doctor import backend_rows, print_backends

    reason = "not compiled; pip install keyshift[kernel]"  # brackets are no markup
    monkeypatch.setattr(cpu, "missing", lambda: reason if missing else None)
    monkeypatch.setattr(cpu, "kernels", lambda: {"avx2": 0, "baseline": 1})
    printed = io.StringIO()
    print_backends(backend_rows(), Console(file=printed, width=80))
    words = " ".join(printed.getvalue().split())
    assert (reason in words) == missing
    assert ("avx2 (also baseline), 1 thread" in words) == (not missing)
    assert f"decodes on the CPU with: {'reference' if missing else 'cpu'}" in words
    assert max(map(len, printed.getvalue().splitlines())) <= 80


def test_compare_prints_a_table_or_json(tmp_path):
    small = [
        "--steps",
        "4",
        "--seeds",
        "1",
        "--set",
        "model.hidden_size=16",
        "--set",
        "training.batch_size=4",
    ]
    table = keyshift("compare", "induction", *small, cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert max(map(len, table.stdout.splitlines())) <= 100
    assert (tmp_path / "runs/induction/report.html").exists()
    report = json.loads((tmp_path / "runs/induction/report.json").read_text())
    assert report["command"].startswith("keyshift compare induction --steps 4")  # though it was python -m
    as_json = in_process("compare", "induction", *small, "--out", "other", "--json", cwd=tmp_path)
    rows = json.loads(as_json.stdout)
    assert [row["variant"] for row in rows][:2] == ["1-layer GQA", "2-layer GQA"]
    again = keyshift("compare", "induction", *small, cwd=tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr


def test_a_diverged_run_is_exit_code_1(tmp_path):
    hot = [
        "--steps",
        "30",
        "--seeds",
        "1",
        "--set",
        "training.learning_rate=1e25",
        "--set",
        "model.hidden_size=16",
    ]
    done = keyshift("compare", "induction", *hot, cwd=tmp_path)
    assert done.returncode == 1
    assert "at step" in done.stderr
    assert (tmp_path / "runs/induction/report.html").exists()


@pytest.mark.parametrize(
    "content", ["[1, 2]", "{", '{"hidden_size": 8}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_configuration_that_makes_no_sense_is_one_line(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    done = in_process("cache", str(path))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_cache_reads_the_sizes_of_a_deepseek_configuration(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    path.write_text(json.dumps({"model_type": "deepseek_v3", **LLAMA_LIKE, **heads, **sizes}))
    rows = {row["mechanism"]: row for row in json.loads(in_process("cache", str(path), "--json").stdout)}
    assert rows["MLA"]["bytes_per_token"] == 4 * 2 * (512 + 64)
    assert rows["GQA"]["bytes_per_token"] == 4 * 2 * 2 * 8 * 128


LLAMA_LIKE = {"hidden_size": 256, "num_hidden_layers": 4}
