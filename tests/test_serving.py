"""vLLM with the plugin, in this process: greedy tokens are those of `generate`, pages hold raw streams."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from served import VARIANTS, checkpoint, greedy, prompts

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, cache_bytes_per_token
from keyshift.errors import UserError
from keyshift.hub import plan_upload

vllm = pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

NEW = 24
MEMORY = 1 << 22
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@contextmanager
def engine(path: Path, **options: Any) -> Iterator[Any]:
    settings = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": MEMORY,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
        "block_size": 16,
        "disable_log_stats": False,
    }
    started = vllm.LLM(str(path), **{**settings, **options})
    try:
        yield started
    finally:
        started.llm_engine.engine_core.shutdown()
        del started
        gc.collect()


def answers(started: Any, texts: list[list[int]]) -> list[Any]:
    params = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    return started.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)


def assert_greedy(path: Path, texts: list[list[int]], found: list[Any]) -> None:
    model = KeyshiftForCausalLM.from_pretrained(path).eval()
    for text, answer in zip(texts, found, strict=True):
        assert list(answer.outputs[0].token_ids) == greedy(model, text, NEW)


def counted(started: Any, name: str) -> int:
    return sum(each.value for each in started.get_metrics() if each.name == f"vllm:{name}")


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_are_those_of_generate(tmp_path: Path, name: str) -> None:
    """Short and long prompts in one batch, cut into chunks of 64; then again, with what was cached."""
    path = checkpoint(tmp_path, name)
    texts = prompts(1, 15, 16, 17, 150, 64, 3)
    with engine(path) as started:
        first = answers(started, texts)
        assert_greedy(path, texts, first)
        again = answers(started, texts)
        assert_greedy(path, texts, again)
        # All whole pages, but at least one token is left to be computed.
        assert [each.num_cached_tokens for each in again] == [0, 0, 0, 16, 144, 48, 0]
        bytes_ = cache_bytes_per_token(KeyshiftConfig.from_pretrained(path), torch.float32)
        assert started.llm_engine.vllm_config.cache_config.num_gpu_blocks == MEMORY // (16 * bytes_)


def apart(options: dict[str, Any], *paths: Path, **environment: str) -> dict[str, int]:
    """Serve checkpoints in another process, compare with `generate` there, return what was counted."""
    script = Path(__file__).with_name("serve_apart.py")
    command = [sys.executable, script, json.dumps(options), *paths]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["gqa-shift", "gva-shift"])
def test_tokens_that_were_guessed_wrong_leave_nothing_behind(tmp_path: Path, name: str) -> None:
    """Apart, since vLLM cannot start a second engine once numba is loaded, which n-grams are found with."""
    numbers = apart({"speculative_config": NGRAM}, checkpoint(tmp_path, name))
    assert 0 < numbers["accepted"] < numbers["draft"]


@pytest.mark.parametrize("name", ["gqa-shift", "gva-shift"])
def test_requests_that_had_to_wait_go_on_where_they_were(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path, name)
    bytes_ = cache_bytes_per_token(KeyshiftConfig.from_pretrained(path), torch.float32)
    texts = prompts(100, 90, 110, 120, 80, 70)
    with engine(path, kv_cache_memory_bytes=36 * 16 * bytes_) as started:
        assert_greedy(path, texts, answers(started, texts))
        assert counted(started, "num_preemptions") > 0


def test_it_serves_with_no_settings(tmp_path: Path) -> None:
    """In the checkpoint's own way: bfloat16, compiled or not as vLLM likes."""
    path = checkpoint(tmp_path, "gva-shift", torch_dtype="bfloat16")
    defaults = {"dtype": "auto", "enforce_eager": False, "max_num_batched_tokens": None, "block_size": None}
    with engine(path, **defaults) as started:
        assert len(answers(started, prompts(20))[0].outputs[0].token_ids) == NEW


def test_two_processes_say_what_one_says(tmp_path: Path) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    paths = [checkpoint(tmp_path, name) for name in ("gva-shift", "gqa", "mla-shift", "alibi")]
    apart(options, *paths, VLLM_CPU_OMP_THREADS_BIND="0|1")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "query-shift": ({"attention": "gqa", "shift": "qkv"}, {}, "shift='qkv' keeps raw queries"),
    "rebuilt": ({"attention": "gva", "position": "rope"}, {}, "serve a model with position='decoupled_rope'"),
    "act": ({"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
    "cache": ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    "connector": (
        {},
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "kv_connector='ExampleConnector'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, options, message = REFUSED[name]
    path = checkpoint(tmp_path, name, **changes)
    with pytest.raises(Exception, match=message), engine(path, **options):
        pass


def test_a_weight_too_few_or_too_many_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint(tmp_path, "gva-shift")
    weights = load_file(path / "model.safetensors")
    shift = weights.pop("model.layers.1.self_attn.key_shift.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.key_shift\.weight"), engine(path):
        pass
    weights["model.layers.1.self_attn.key_shift.weight"] = shift
    weights["model.layers.1.self_attn.other.weight"] = shift.clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"layers\.1\.self_attn\.other"), engine(path):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_key_value_heads", 1), ("num_key_value_heads", 4), ("num_attention_heads", 2), ("shift_window", 2)],
)
def test_weights_of_another_shape_are_named_and_not_cut(tmp_path: Path, field: str, value: int) -> None:
    path = checkpoint(tmp_path, "gva-shift")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, field: value}))
    with (
        pytest.raises(UserError, match=r"the checkpoint's \w+.* is \(.*its config.json asks for"),
        engine(path),
    ):
        pass


def test_vllms_own_wrapper_of_transformers_models_is_refused(tmp_path: Path) -> None:
    """It would hand over keys that were shifted within a chunk, or expanded, and be silently wrong. vLLM
    refuses by itself; what it would meet if it did not, tests/test_model.py has."""
    path = checkpoint(tmp_path, "gva-shift")
    options = {"model_impl": "transformers", "trust_remote_code": True}
    with (
        plan_upload(path, "me/model").staged() as pushed,
        pytest.raises(Exception, match="KeyshiftForCausalLM"),
        engine(pushed, **options),
    ):
        pass


def test_a_pushed_checkpoint_is_served_as_it_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gva-shift")
    texts = prompts(40, 3)
    with plan_upload(path, "me/model").staged() as pushed, engine(pushed) as started:
        assert_greedy(path, texts, answers(started, texts))


def test_the_benchmark_runs_and_more_sequences_fit() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "serving.py"
    command = [sys.executable, script, "--quick", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    fits = {row["name"]: row["fits"] for row in found["rows"]}
    assert fits["GQA"] == fits["vLLM Llama (GQA)"] == fits["GQA + shift"]
    assert fits["GVA + shift"] == fits["GVA"] == fits["MLA"] > 1.7 * fits["GQA"]
    assert all(check["ok"] for check in found["checks"] if "sequences" not in check["name"])
