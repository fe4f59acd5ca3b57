"""Memory and speed of a 4,096-token generation: our cache against transformers' `DynamicCache`.

    python benchmarks/generation_memory.py [--rounds 1] [--tokens 4096] [--threads 2]

Four mechanisms of one decoder (4 layers, 384 wide, 8 heads of 128, float32, random weights; G d_h = 512 and
MLA's latent 512, so that GVA and MLA keep equally many bytes) generate greedily from a 16-token prompt, with
the `KeyshiftCache` that `generate()` picks and with a `DynamicCache`, which appends by concatenation.

- Each generation has a fresh process (Linux: /proc). Growth is the peak resident memory while it generates
  (VmHWM, reset before) over the resident memory after the model was built and an 8-token generation made the
  libraries load what they load once. It includes activations, not weights.
- Predicted is `keyshift.cache_bytes` of the tokens stored: all but the last generated one, which is never fed
  back.
- tokens/s comes from whole runs a minute long. A round runs every contender once, in random order; the speed
  ratios are medians over rounds, and with the default of one round merely indicative.
- The bar on growth: the cache, the largest of one step's activations and the allocator's slack may add up to
  a quarter of the cache; a cache that is copied as it grows, or keys that are rebuilt, cannot stay under it.
- Appending is timed on one layer with room, as `generate()` allocates it, at 512 and at 16,384 tokens. That a
  layer without room appends in amortised O(1) is counted, not timed: tokens copied per token appended, one by
  one from none to 16,384 (a buffer that grows by a quarter copies at most five). Its time, growth included,
  stands beside (`append_*`): fresh memory for large buffers comes page by page from the system, small buffers
  are reused by the allocator, so it does rise with length at first. Concatenation copies all at every token.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from memory import reset_peak, resident
from pairing import Times, arguments, at_most, exactly, finish, ratio, say, timed
from transformers.cache_utils import DynamicCache, DynamicLayer

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, cache_bytes
from keyshift.cache import StreamLayer
from keyshift.modeling import CACHE_NAME

PROMPT = 16
STREAM = 512
"""Width of the layer's streams where appending is timed."""
APPEND_ROUNDS = 15
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 128,
}
DECOUPLED = {"position": "decoupled_rope", "qk_rope_head_dim": 32}
MECHANISMS: dict[str, dict[str, Any]] = {
    "GQA": {"attention": "gqa"},
    "GQA + shift": {"attention": "gqa", "shift": "kv"},
    "GVA + shift": {"attention": "gva", "shift": "kv", **DECOUPLED},
    "MLA": {"attention": "mla", "kv_lora_rank": 512, **DECOUPLED},
}
CACHES: dict[str, Callable[[], dict[str, Any]]] = {
    "keyshift": dict,  # generate() picks it
    "dynamic": lambda: {CACHE_NAME: DynamicCache()},
}


@dataclass(frozen=True)
class Contender:
    """One generation."""

    mechanism: str
    cache: str
    tokens: int
    threads: int
    seed: int
    sizes: dict[str, int]

    def config(self) -> KeyshiftConfig:
        groups = {} if self.mechanism == "MLA" else {"num_key_value_heads": 4}
        return KeyshiftConfig(
            **{**self.sizes, **groups, **MECHANISMS[self.mechanism]}, max_position_embeddings=self.tokens
        )


@dataclass(frozen=True)
class Generation:
    """What one generation took."""

    predicted_bytes: int
    allocated_bytes: int
    peak_growth_bytes: int
    tokens_per_second: float
    parameters: int


def generation(contender: Contender) -> Generation:
    """Run one, in a process of its own."""
    torch.set_num_threads(contender.threads)
    torch.manual_seed(contender.seed)
    config = contender.config()
    model = KeyshiftForCausalLM(config).eval()
    prompt = torch.randint(config.vocab_size, (1, PROMPT))

    def generate(tokens: int) -> Any:
        return model.generate(
            prompt,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            **CACHES[contender.cache](),
        )

    generate(8)
    reset_peak()
    before, began = resident("VmRSS"), time.perf_counter()
    output = generate(contender.tokens - PROMPT)
    seconds, peak = time.perf_counter() - began, resident("VmHWM")
    assert output.sequences.shape == (1, contender.tokens)
    streams = [s for layer in getattr(output, CACHE_NAME).layers for s in (layer.keys, layer.values)]
    return Generation(
        predicted_bytes=cache_bytes(config, batch=1, tokens=contender.tokens - 1, dtype=model.dtype),
        allocated_bytes=sum(stream.untyped_storage().nbytes() for stream in streams),
        peak_growth_bytes=peak - before,
        tokens_per_second=(contender.tokens - PROMPT) / seconds,
        parameters=model.num_parameters(),
    )


def in_fresh_processes(contenders: list[Contender]) -> list[Generation]:
    """One after the other, each in a process forked from one that imported everything and ran nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keyshift.modeling", "transformers.generation"])
    done = []
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for contender, result in zip(contenders, pool.map(generation, contenders), strict=True):
            growth, predicted = (n / 2**20 for n in (result.peak_growth_bytes, result.predicted_bytes))
            say(
                f"{contender.mechanism}, {contender.cache}: peak growth {growth:.0f} MiB, "
                f"predicted {predicted:.0f} MiB, {result.tokens_per_second:.0f} tokens/s"
            )
            done.append(result)
    return done


def appending(
    fresh: Callable[[], StreamLayer | DynamicLayer], length: int, tokens: int
) -> Callable[[], float]:
    """A function for the seconds per token that a layer of ``length`` tokens takes to append ``tokens``."""
    stored, token = torch.zeros(1, 1, length, STREAM), torch.zeros(1, 1, 1, STREAM)

    @torch.inference_mode()
    def run() -> float:
        layer = fresh()
        layer.update(stored, stored)
        began = time.perf_counter()
        for _ in range(tokens):
            layer.update(token, token)
        return (time.perf_counter() - began) / tokens

    return run


def append_times(short: int, long: int, rounds: int, seed: int) -> dict[str, Times]:
    """Seconds per appended token and round, by way of appending and length."""
    ways: dict[str, Callable[[int], Callable[[], float]]] = {
        "with room": lambda length: appending(lambda: StreamLayer(length + 64), length, 64),
        "growing": lambda length: appending(StreamLayer, length, length // 4),
        "concatenation": lambda length: appending(DynamicLayer, length, 16),
    }
    return {
        way: timed(
            {f"{length}": make(length) for length in (short, long)}, rounds=rounds, seed=seed, label=way
        )
        for way, make in ways.items()
    }


def copies_per_append(tokens: int) -> float:
    """Tokens that a growing layer copies for each that is appended, one by one from none."""
    layer, token, copied = StreamLayer(), torch.zeros(1, 1, 1, 1), 0
    for length in range(tokens):
        before = layer.capacity
        layer.update(token, token)
        copied += length if layer.capacity != before else 0
    return copied / tokens


def main() -> int:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--tokens", type=int, default=4096, help="prompt included (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens, sizes, short, long = options.tokens, SIZES, 512, 16384
    if options.quick:
        tokens, sizes, short, long = 24, {**SIZES, "hidden_size": 32, "num_hidden_layers": 1}, 64, 256

    rows = [(mechanism, cache) for mechanism in MECHANISMS for cache in CACHES]
    runs: dict[tuple[str, str], list[Generation]] = {row: [] for row in rows}
    order, draw = [], random.Random(options.seed)
    for _ in range(options.rounds):
        order += draw.sample(rows, len(rows))
    contenders = [Contender(*row, tokens, options.threads, options.seed, sizes) for row in order]
    for row, result in zip(order, in_fresh_processes(contenders), strict=True):
        runs[row].append(result)
    appends = append_times(short, long, 5 if options.quick else APPEND_ROUNDS, options.seed)

    def growth(mechanism: str, cache: str) -> float:
        return statistics.median(
            run.peak_growth_bytes / run.predicted_bytes for run in runs[mechanism, cache]
        )

    def speed(row: tuple[str, str]) -> list[float]:
        return [run.tokens_per_second for run in runs[row]]

    checks = []
    for mechanism in MECHANISMS:
        first = runs[mechanism, "keyshift"][0]
        name = f"cache bytes allocated over predicted: {mechanism}"
        checks.append(exactly(name, first.allocated_bytes / first.predicted_bytes, 1.0))
    checks.append(
        at_most("peak growth over predicted cache: GVA + shift", growth("GVA + shift", "keyshift"), 1.25)
    )
    slower = {name: ratio(each[f"{long}"], each[f"{short}"]) for name, each in appends.items()}
    checks.append(at_most(f"time per append at {long} tokens over {short}", slower["with room"], 1.5))
    checks.append(at_most("tokens copied per token appended", copies_per_append(long), 5))
    return finish(
        checks,
        generations=[
            {
                "mechanism": mechanism,
                "cache": cache,
                **asdict(runs[mechanism, cache][0]),
                "peak_growth_bytes": statistics.median(r.peak_growth_bytes for r in runs[mechanism, cache]),
                "tokens_per_second": statistics.median(speed((mechanism, cache))),
            }
            for mechanism, cache in rows
        ],
        peak_growth_over_predicted={f"{m}, {c}": growth(m, c) for m, c in rows},
        speed_over_dynamic={m: ratio(speed((m, "keyshift")), speed((m, "dynamic"))) for m in MECHANISMS},
        append_long_over_short=slower,
        append_microseconds={
            name: {length: 1e6 * statistics.median(each) for length, each in times.items()}
            for name, times in appends.items()
        },
        tokens=tokens,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    sys.exit(main())
