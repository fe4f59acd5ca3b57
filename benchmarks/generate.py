"""`generate()` at growing context: our mechanisms against transformers' own classes of the same sizes.

    python benchmarks/generate.py [--rounds 7] [--contexts 2048 8192 32768] [--dtype float32]

Models of about 100M parameters with random weights: 12 layers, 768 wide, 12 heads of 64, 4 groups, vocabulary
32,000, tied embeddings; MLA with a latent of 256; rotary width 32 where it is decoupled. GQA and GVA are
held against `LlamaForCausalLM`, MLA against `DeepseekV3ForCausalLM` with dense layers only, each with the
cache that its own `generate()` picks (`DynamicCache`). One sequence, greedy.

- The cache is filled with random numbers up to the context, since the time of a step does not depend on
  them, and `generate()` continues it. A round generates 4 tokens with every model, in random order; a model's
  time is the median interval between tokens, and ratios are medians over rounds.
- Memory is measured in a process of its own for each model: the peak resident memory (Linux: VmHWM) while 16
  tokens are generated at the longest context, over what was resident before the cache was made. Predicted is
  `keyshift.cache_bytes` of the tokens that the cache has room for.
- The docs' figure is drawn with --figure PATH.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from memory import reset_peak, resident
from pairing import Check, Times, arguments, at_least, at_most, finish, interval, ratio, say, timed
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
)
from transformers.cache_utils import Cache, DynamicCache

from keyshift import KeyshiftCache, KeyshiftConfig, KeyshiftForCausalLM, cache_bytes
from keyshift.modeling import CACHE_NAME

NEW = 4
CHUNK = 1024
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "tie_word_embeddings": True,
}
QUICK = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
LATENT = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}
GROUPED = {"num_key_value_heads": 4}
DECOUPLED = {"position": "decoupled_rope", "qk_rope_head_dim": 32}
OURS: dict[str, dict[str, Any]] = {
    "GQA": {"attention": "gqa", **GROUPED},
    "GQA + shift": {"attention": "gqa", "shift": "kv", **GROUPED},
    "GVA": {"attention": "gva", **GROUPED, **DECOUPLED},
    "GVA + shift": {"attention": "gva", "shift": "kv", **GROUPED, **DECOUPLED},
    "MLA": {"attention": "mla", "position": "decoupled_rope", **LATENT},
}
LLAMA, DEEPSEEK = "transformers Llama", "transformers DeepSeek-V3"
AGAINST = {"GQA": LLAMA, "GQA + shift": LLAMA, "GVA": LLAMA, "GVA + shift": LLAMA, "MLA": DEEPSEEK}


def build(name: str, sizes: dict[str, Any], context: int, dtype: torch.dtype) -> Any:
    """A model with random weights, its longest context being ``context``."""
    torch.manual_seed(0)
    sizes = {**sizes, "max_position_embeddings": context}
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    if name == LLAMA:
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **GROUPED))
    elif name == DEEPSEEK:
        dense = {"first_k_dense_replace": sizes["num_hidden_layers"], "q_lora_rank": None}
        heads = {"qk_nope_head_dim": width, "v_head_dim": width, "rope_interleave": False}
        groups = {"num_key_value_heads": sizes["num_attention_heads"]}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **LATENT, **dense, **heads, **groups))
    else:
        model = KeyshiftForCausalLM(KeyshiftConfig(**sizes, **OURS[name]))
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


@torch.no_grad()
def filled_cache(model: Any, tokens: int, room: int) -> Cache:
    """The cache that ``generate()`` would pick, holding so many tokens of noise."""
    cache: Cache = (
        KeyshiftCache(model.config, max_length=room)
        if isinstance(model, KeyshiftForCausalLM)
        else DynamicCache(config=model.config)
    )
    model(torch.zeros(1, 1, dtype=torch.long), **{CACHE_NAME: cache}, use_cache=True)
    for layer in cache.layers:
        for stored in range(1, tokens, CHUNK):  # in chunks, so that the noise itself takes no memory
            new = min(CHUNK, tokens - stored)
            shapes = ((*each.shape[:2], new, each.shape[3]) for each in (layer.keys, layer.values))
            layer.update(*(torch.randn(shape, dtype=layer.keys.dtype) for shape in shapes))
    return cache


class Clock(StoppingCriteria):
    """Notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: GenerationMixin, cache: Cache, new: int) -> float:
    """Continue the cache by ``new`` tokens, then forget them: seconds per token, the median."""
    stored = cache.get_seq_length()
    clock = Clock()
    ids = torch.zeros(1, stored + 1, dtype=torch.long)
    given = {CACHE_NAME: cache, "stopping_criteria": [clock]}
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **given)  # type: ignore[operator]
    cache.crop(stored - cache.get_seq_length())
    gaps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return statistics.median(gaps)


def speeds(options: Any, sizes: dict[str, Any], context: int, dtype: torch.dtype) -> Times:
    """Seconds per token of every model, interleaved."""
    models = {name: build(name, sizes, context + 64, dtype) for name in (*OURS, LLAMA, DEEPSEEK)}
    caches = {name: filled_cache(model, context, context + 64) for name, model in models.items()}

    def contender(name: str) -> Callable[[], float]:
        return lambda: generate(models[name], caches[name], NEW)

    label = f"context {context}"
    return timed(
        {name: contender(name) for name in models},
        rounds=options.rounds,
        seed=options.seed,
        label=label,
        warmup=1,
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that a generation took."""

    peak_growth: int
    cache: int
    weights: int


def memory(name: str, sizes: dict[str, Any], context: int, dtype: torch.dtype, threads: int) -> Memory:
    """What one model takes, in a process of its own."""
    torch.set_num_threads(threads)
    model = build(name, sizes, context + 64, dtype)
    generate(model, filled_cache(model, 4, 64), NEW)  # libraries load what they load once
    reset_peak()
    before = resident("VmRSS")
    cache = filled_cache(model, context, context + 16)
    generate(model, cache, 16)
    peak = resident("VmHWM")
    held = sum(s.untyped_storage().nbytes() for layer in cache.layers for s in (layer.keys, layer.values))
    return Memory(peak - before, held, sum(p.numel() * p.element_size() for p in model.parameters()))


def main() -> int:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--figure", type=Path, help="where to draw tokens/s over context length")
    options = parser.parse_args()
    sizes = SIZES
    if options.quick:
        options.contexts, options.rounds, sizes = [32, 64], 2, QUICK
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    rows, checks = [], []
    for context in options.contexts:
        times = speeds(options, sizes, context, dtype)
        for name, each in times.items():
            over = AGAINST.get(name)
            quotient = None if over is None else ratio(times[over], each)
            row = {"model": name, "context": context, "tokens_per_second": 1 / statistics.median(each)}
            against = {"over": over, "speedup": quotient}
            if over is not None and quotient is not None:
                spread = interval(lambda t, n=name, o=over: ratio(t[o], t[n]), times)
                against["interval"] = spread
                bar = 1.5 if name.startswith("GVA") and context == 32768 else 1.0
                checks.append(at_least(f"{name} over {over} at {context}", quotient, bar))
            rows.append({**row, **against})
            times_faster = "" if quotient is None else f"{quotient:6.2f}x {over}"
            say(f"  {name:<26} {row['tokens_per_second']:7.2f} tokens/s {times_faster}")
    used, more = memories(options, sizes, dtype)
    if options.figure:
        draw(rows, options.figure, options.dtype)
    return finish(checks + more, speed=rows, memory=used, dtype=options.dtype)


def memories(
    options: Any, sizes: dict[str, Any], dtype: torch.dtype
) -> tuple[list[dict[str, Any]], list[Check]]:
    """Peak memory of every model at the longest context, against what is predicted."""
    context, rows, checks = max(options.contexts), [], []
    for name in (*OURS, LLAMA, DEEPSEEK):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(memory, name, sizes, context, dtype, options.threads).result()
        row = {"model": name, "context": context, **vars(found)}
        if name in OURS:
            config = KeyshiftConfig(**sizes, **OURS[name])
            predicted = cache_bytes(config, batch=1, tokens=context + 16, dtype=dtype)
            row["predicted"] = predicted
            checks.append(
                at_most(f"{name}: peak growth over predicted cache", found.peak_growth / predicted, 1.05)
            )
        rows.append(row)
        say(
            f"  {name:<26} cache {found.cache / 2**20:7.1f} MiB, "
            f"peak growth {found.peak_growth / 2**20:7.1f} MiB"
        )
    return rows, checks


def draw(rows: list[dict[str, Any]], path: Path, dtype: str) -> None:
    """Tokens per second over context length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["model"] for row in rows):
        points = [(row["context"], row["tokens_per_second"]) for row in rows if row["model"] == name]
        style = "--" if name.startswith("transformers") else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="tokens per second")
    contexts = sorted({row["context"] for row in rows})
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"generate() on {torch.get_num_threads()} CPU threads, {dtype}, about 100M parameters")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
