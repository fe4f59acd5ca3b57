"""vLLM at a fixed memory budget: how many sequences of 4,096 tokens fit, and tokens/s with all of them there.

    .venv-serving/bin/python benchmarks/serving.py [--rounds 15] [--budget 160] [--shape paper]

It runs in the environment that `make test-serving` makes.

What a user would pick instead is GQA in the same engine: vLLM's own Llama, of the same sizes. Beside it this
project's models through the plugin: GQA, GVA, both with a KV shift, and MLA of GVA's bytes.

- Two layers, 512 wide, 8 heads, random weights, no compilation (vLLM would compile its own Llama only). The
  shape "paper" has 4 groups of 64 and a rotary key of 16; "kernel" 4 groups of 128 and one of 64, the widths
  that GPU kernels for MLA know.
- Fits: what vLLM says, and what is then seen: so many requests with their own text of 4,032 tokens are all
  decoding at once, and none had to be put off.
- Tokens/s: every engine is filled so, then one step of each in random order makes a round; ratios are medians
  over rounds of tokens per second, that is with more sequences where more fit.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from pairing import Times, arguments, at_least, exactly, finish, interval, ratio, say, timed
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from keyshift import KeyshiftConfig, KeyshiftForCausalLM

LENGTH, NEW = 4096, 64
QUICK_LENGTH = 256
LLAMA = "vLLM Llama (GQA)"
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SHAPES = {
    "paper": {"head_dim": 64, "qk_rope_head_dim": 16, "kv_lora_rank": 256},
    "kernel": {"head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512},
}
DECOUPLED = {"position": "decoupled_rope"}
OURS: dict[str, dict[str, Any]] = {
    "GQA": {"attention": "gqa"},
    "GQA + shift": {"attention": "gqa", "shift": "kv"},
    "GVA": {"attention": "gva", **DECOUPLED},
    "GVA + shift": {"attention": "gva", "shift": "kv", **DECOUPLED},
    "MLA": {"attention": "mla", **DECOUPLED},
}
BARS = {"paper": 1.8, "kernel": 1.7}
"""Of sequences; GQA's numbers over GVA's are 512 : 272 and 1024 : 576."""


def checkpoint(name: str, shape: str, length: int, folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": length}
    if name == LLAMA:
        width = {"head_dim": SHAPES[shape]["head_dim"]}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **width))
    else:
        model = KeyshiftForCausalLM(KeyshiftConfig(**sizes, **SHAPES[shape], **OURS[name]))
    model.save_pretrained(folder / name)
    return folder / name


class Engine:
    """vLLM with one model, filled with as many sequences as fit."""

    def __init__(self, path: Path, options: Any, length: int):
        self.vllm = LLM(
            str(path),
            dtype=options.dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=int(options.budget * (1 << 20)),
            max_model_len=length,
            max_num_seqs=256,
        )
        cache = self.vllm.llm_engine.vllm_config.cache_config
        # One page is vLLM's own.
        self.fits = (cache.num_gpu_blocks - 1) // -(-length // cache.block_size)

    def fill(self, length: int, seed: int) -> None:
        """Prefill until every sequence decodes."""
        draws = torch.Generator().manual_seed(seed)
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        for number in range(self.fits):
            ids = torch.randint(0, SIZES["vocab_size"], (length - NEW,), generator=draws).tolist()
            self.vllm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        begun: set[str] = set()
        while len(begun) < self.fits:
            begun |= {each.request_id for each in self.vllm.llm_engine.step() if each.outputs[0].token_ids}

    def standing(self) -> tuple[int, int]:
        """How many sequences are running, and how often one of them was put off."""
        running = self.vllm.llm_engine.engine_core.engine_core.scheduler.running
        return len(running), sum(request.num_preemptions for request in running)


def row(name: str, fits: int, times: Times, base_fits: int) -> dict[str, Any]:
    """What a model reached: sequences, tokens per second, and that over Llama, with its 95% interval."""

    def over(rounds: Times) -> float:
        return ratio(rounds[LLAMA], rounds[name]) * fits / base_fits

    speed = fits / statistics.median(times[name])
    say(f"{name}: {speed:.1f} tokens/s, {over(times):.2f} of {LLAMA}")
    return {
        "name": name,
        "fits": fits,
        "tokens_per_s": speed,
        "over": over(times),
        "interval": interval(over, times),
    }


def main() -> int:
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--budget", type=float, default=160, help="MiB of cache (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="paper", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    options = parser.parse_args()
    length = QUICK_LENGTH if options.quick else LENGTH
    if options.quick:
        options.rounds, options.budget = 2, 16
    torch.set_num_threads(options.threads)
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (LLAMA, *OURS):
            path = checkpoint(name, options.shape, length, Path(folder))
            engines[name] = Engine(path, options, length)
            engines[name].fill(length, options.seed)
            say(f"{name}: {engines[name].fits} sequences of {length:,} tokens in {options.budget:g} MiB")

    def step(name: str) -> Callable[[], Any]:
        return engines[name].vllm.llm_engine.step

    steps = {name: step(name) for name in engines}
    times = timed(steps, rounds=options.rounds, seed=options.seed, label="steps", warmup=2)
    checks, rows = [], []
    for name, engine in engines.items():
        rows.append(row(name, engine.fits, times, engines[LLAMA].fits))
        running, put_off = engine.standing()
        checks.append(exactly(f"{name}: all there at once", running, engine.fits))
        checks.append(exactly(f"{name}: none put off", put_off, 0))
    for name in ("GVA", "GVA + shift"):
        more = engines[name].fits / engines[LLAMA].fits
        checks.append(at_least(f"{name}: sequences over {LLAMA}", more, BARS[options.shape]))
    return finish(checks, shape=options.shape, dtype=options.dtype, budget_mib=options.budget, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
