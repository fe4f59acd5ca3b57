"""The benchmarks run and their last line is complete; whether bars are met, only a full run can say."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.data import train_tokenizer
from keyshift.ops.stream_attention import backends
from keyshift.tasks import TASKS

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
MECHANISMS = ("GQA", "GQA + shift", "GVA + shift", "MLA")


needs_kernel = pytest.mark.skipif(
    backends.missing("cpu") is not None and os.environ.get("CI") != "true", reason="no CPU kernel"
)


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def quickly(script: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a benchmark prints last, at a tiny size."""
    return result(run(script, "--quick", "--threads", "1", *arguments, **environment))


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line of a benchmark; its exit code agrees with its checks."""
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    checks = found["checks"]
    assert all(set(check) == {"name", "value", "bar", "ok"} for check in checks)
    assert all(math.isfinite(check["value"]) for check in checks)
    assert done.returncode == (0 if all(check["ok"] for check in checks) else 1), done.stderr
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [check["name"] for check in found["checks"]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_generation_memory() -> None:
    found = quickly("generation_memory.py")
    allocated = [f"cache bytes allocated over predicted: {mechanism}" for mechanism in MECHANISMS]
    assert names(found) == [
        *allocated,
        "peak growth over predicted cache: GVA + shift",
        "time per append at 256 tokens over 64",
        "tokens copied per token appended",
    ]
    assert all(check["ok"] for check in found["checks"] if check["name"] in allocated)
    assert {(each["mechanism"], each["cache"]) for each in found["generations"]} == {
        (mechanism, cache) for mechanism in MECHANISMS for cache in ("keyshift", "dynamic")
    }


def test_shift() -> None:
    assert names(quickly("shift.py")) == [
        "shift cost of a training step",
        "shift over unfold convolution",
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_circuits() -> None:
    found = quickly("circuits.py", "--rounds", "2")
    assert names(found) == [
        "time of head scores over plain forward passes",
        "time of head scores over forward passes without logits",
        "peak memory over forward passes without logits, MB",
    ]
    assert set(found["peak_megabytes"]) == {"plain", "hidden", "watched", "eager", "long"}


def test_tasks() -> None:
    compared = [name.removeprefix("tokens/s: ") for name in names(quickly("tasks.py"))]
    assert compared[: len(TASKS)] == list(TASKS)
    assert [name.split(",")[0] for name in compared[len(TASKS) :]] == ["hop_k", "induction", "recall"]


def test_trainer() -> None:
    variants = ["GQA", "GQA + KV shift", "MLA", "GVA", "GVA + shift"]
    assert names(quickly("training.py")) == [f"{name}: throughput over a plain loop's" for name in variants]


@needs_kernel
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler")
def test_decode() -> None:
    """Every step is compared; which of them memory binds is found out, and those have a check more."""
    found = quickly("decode.py")
    steps = ["GVA", "GVA + shift", "GQA", "GQA + shift", "GVA int8", "GVA int4", "MLA"]
    by_rate = re.compile(r"(.*) of read rate, (.*)")
    compared = [name for name in names(found) if not by_rate.match(name)]
    single, half = (f"T=512 {dtype} 1 thread" for dtype in ("float32", "bfloat16"))
    ratios = ["GVA over SDPA-GQA", "GVA shift", "GQA shift"]
    assert compared == [
        *(f"{each}, {single}" for each in (*ratios, "MLA over two products")),
        *(f"{each}, {half}" for each in (*ratios, "GVA int8 over SDPA-GQA", "MLA over two products")),
    ]
    ours = [row for row in found["rows"] if "binds" in row]
    assert [row["step"] for row in ours] == steps * 2
    bound = [row["step"] for row in ours if row["binds"] == "memory"]
    assert [match[1] for match in map(by_rate.match, names(found)) if match] == bound


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_generate() -> None:
    found = quickly("generate.py")
    llama, deepseek = "transformers Llama", "transformers DeepSeek-V3"
    against = {"GQA": llama, "GQA + shift": llama, "GVA": llama, "GVA + shift": llama, "MLA": deepseek}
    assert names(found) == [
        *(f"{ours} over {theirs} at {context}" for context in (32, 64) for ours, theirs in against.items()),
        *(f"{ours}: peak growth over predicted cache" for ours in against),
    ]
    assert [row["model"] for row in found["speed"]] == [*against, llama, deepseek] * 2
    assert [row["model"] for row in found["memory"]] == [*against, llama, deepseek]


@needs_kernel
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_numba_decode() -> None:
    assert names(quickly("numba_decode.py")) == ["numba over C++ at 256 tokens"]


def test_gpu_decode() -> None:
    """On a GPU if there is one, else interpreted: results are right, and every bar has its check."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    found = quickly("gpu_decode.py", **({"TRITON_INTERPRET": "1"} if backends.missing("triton") else {}))
    mechanisms = ("GVA", "shifted GVA", "MLA")
    errors = [f"error against double precision: {each}" for each in mechanisms]
    assert names(found) == [
        *errors,
        *(f"bandwidth over copy: {each}, least, T >= 48" for each in mechanisms),
        *(f"speed over SDPA GQA: {each}, least, T >= 48" for each in mechanisms),
    ]
    assert all(check["ok"] for check in found["checks"] if check["name"] in errors)
    assert [(cell["batch"], cell["tokens"]) for cell in found["cells"]] == [(2, 24), (2, 48)]


@pytest.mark.skipif(backends.missing("triton") is None, reason="there is a GPU, or Triton is interpreted")
def test_gpu_decode_says_what_it_lacks() -> None:
    done = run("gpu_decode.py", "--quick")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"gpu_decode: {backends.missing('triton')}"]
    assert done.stdout == ""


def test_cache_precision(tmp_path: Path) -> None:
    """Of an untrained model whose heads have two blocks of 32 channels."""
    readme = ROOT / "README.md"
    train_tokenizer([readme.read_text()], 300).save_pretrained(tmp_path)
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = KeyshiftConfig(**sizes, head_dim=64, attention="gva", position="decoupled_rope", shift="kv")
    torch.manual_seed(0)
    KeyshiftForCausalLM(config).save_pretrained(tmp_path)
    text = ["--text", str(readme), "--sequences", "4", "--length", "32"]
    found = result(run("cache_precision.py", str(tmp_path), *text))
    assert names(found) == ["int8 adds to the loss of gva, shift kv, head of 64"]
    assert found["checks"][0]["ok"]
    errors = {row["rounding"]: row["logit_error"] for row in found["rows"]}
    assert list(errors) == [
        f"{dtype}, {scales}" for dtype in ("int8", "int4") for scales in ("token", "token/32", "channel")
    ]
    assert 0 < errors["int8, token/32"] < errors["int8, token"] < errors["int4, token/32"] < 1
