"""Decoding on one GPU: attention over the cache, against SDPA over a GQA cache and against memory's speed.

    python benchmarks/gpu_decode.py [--rounds 20]

One new token of each of B sequences attends to T cached ones, in bfloat16, with 32 query heads: GVA and
shifted GVA (8 streams of 128, d_r = 32) and MLA (a latent of 512, d_r = 64) by the Triton kernels, and GQA
(8 heads of 128) by `scaled_dot_product_attention` in the form that is fastest here. Projections are not
included.

- First every mechanism is compared with the definition in double precision, with lengths and document starts
  drawn, and NaN in all slots that may not be read and in fresh memory.
- A contender is a CUDA graph of calls on caches that together are four times the L2 cache at least, so that
  no call finds its cache there. CUDA events time it; numbers are per call.
- A round runs every contender once, in random order, and so a copy of 1 GiB on the device. Ratios are formed
  within a round, and their median over rounds is reported.
- Bandwidth is the bytes of the cache over the time, as a share of what the copy reads and writes.
- Sizes that do not fit into memory are skipped, and named.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pairing import arguments, at_least, at_most, finish, ratio, say, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from keyshift.ops.stream_attention import backends, stream_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
Call = dict[str, Any]
Calls = list[Callable[[], Tensor]]


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    heads: int = 32
    groups: int = 8
    width: int = 128
    tokens: tuple[int, ...] = (4096, 32768, 131072)
    batches: tuple[int, ...] = (1, 8, 64)
    copied_bytes: int = 1 << 30
    long: int = 32768
    """The bars hold from so many tokens on."""

    def gqa_bytes(self) -> int:
        """Per token."""
        return 2 * self.groups * self.width * DTYPE.itemsize


QUICK = Sizes(heads=4, groups=2, width=16, tokens=(24, 48), batches=(2,), copied_bytes=1 << 20, long=48)


@dataclass(frozen=True)
class Mechanism:
    """A stream of G heads of width S, and R rotary channels that they share."""

    groups: int
    width: int
    rotary: int
    window: int = 1

    def bytes(self) -> int:
        """Per token."""
        return (self.groups * self.width + self.rotary) * DTYPE.itemsize

    def query(self, heads: int, batch: int) -> Call:
        """A call without its cache."""
        call: Call = {
            "queries": noise(batch, heads, 1, self.width),
            "values_BGTV": None,
            "rope_queries_BHQR": noise(batch, heads, 1, self.rotary),
            "scale": (self.width + self.rotary) ** -0.5,
            "backend": "triton",
        }
        if self.window > 1:
            call["key_weights_HW"], call["value_weights_HW"] = noise(2, heads, self.window).float().abs()
        return call

    def cache(self, batch: int, tokens: int) -> Call:
        """Token-major."""
        stream, rope = noise(batch, tokens, self.groups, self.width), noise(batch, tokens, self.rotary)
        return {"keys_BGTS": stream.transpose(1, 2), "rope_keys_BTR": rope}


def mechanisms(sizes: Sizes) -> dict[str, Mechanism]:
    gva = sizes.groups, sizes.width, sizes.width // 4
    return {
        "GVA": Mechanism(*gva),
        "shifted GVA": Mechanism(*gva, window=2),
        "MLA": Mechanism(1, 4 * sizes.width, sizes.width // 2),
    }


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def error(mechanism: Mechanism, heads: int, tokens: int) -> float:
    """The largest error of an output, over the largest magnitude of a value."""
    call = {**mechanism.query(heads, 3), **mechanism.cache(3, tokens)}
    lengths = torch.randint(1, tokens + 1, (3,), device=DEVICE)
    starts = (lengths * torch.rand(3, device=DEVICE)).long()
    call |= {"lengths_B": lengths, "starts_BQ": starts[:, None]}
    largest = call["keys_BGTS"].abs().max()
    if mechanism.window > 1:
        largest = largest * call["value_weights_HW"].sum(1).max()
    slots = torch.arange(tokens, device=DEVICE)
    unread = (slots >= lengths[:, None]) | (slots < starts[:, None])
    call["keys_BGTS"].masked_fill_(unread[:, None, :, None], torch.nan)
    call["rope_keys_BTR"].masked_fill_(unread[..., None], torch.nan)
    torch.use_deterministic_algorithms(True)  # PyTorch then fills fresh memory with NaN
    assert torch.empty(9, device=DEVICE).isnan().all()
    out = stream_attention(**call)
    torch.use_deterministic_algorithms(False)
    exact = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}
    return float((out - stream_attention(**{**exact, "backend": "reference"})).abs().max() / largest)


def seconds_per_call(calls: Calls) -> Callable[[], float]:
    """A function that makes all the calls, one after the other."""
    for call in calls[:3]:  # compiles
        call()
    if INTERPRETED:

        def interpreted() -> float:
            began = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - began) / len(calls)

        return interpreted
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replayed() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / len(calls)

    return replayed


def caches_per_graph(cache_bytes: int) -> int:
    l2 = 0 if INTERPRETED else torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return max(1, -(-4 * l2 // cache_bytes))


def sdpa_forms(sizes: Sizes, batch: int, tokens: int) -> dict[str, Calls]:
    """The ways to have GQA from SDPA that work here: kernels, and how a group's query heads are passed."""
    caches = [
        noise(2, batch, sizes.groups, tokens, sizes.width).unbind()
        for _ in range(caches_per_graph(batch * tokens * sizes.gqa_bytes()))
    ]
    heads = noise(batch, sizes.heads, 1, sizes.width)
    folded = heads.view(batch, sizes.groups, -1, sizes.width)  # as if they were new tokens, without a mask

    def call(kernel: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(query, keys, values, enable_gqa=query is heads)

    forms: dict[str, Calls] = {}
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for how, query in (("enable_gqa", heads), ("folded", folded)):
            try:
                call(kernel, query, *caches[0])
            except RuntimeError:  # this kernel does not take it
                continue
            forms[f"SDPA, {kernel.name}, {how}"] = [
                lambda kernel=kernel, query=query, kv=kv: call(kernel, query, *kv) for kv in caches
            ]
    return forms


def contenders(sizes: Sizes, batch: int, tokens: int) -> dict[str, Calls]:
    """By name; GVA with and without a shift reads the same caches."""
    found = sdpa_forms(sizes, batch, tokens)
    caches: dict[tuple[int, int], list[Call]] = {}
    for name, mechanism in mechanisms(sizes).items():
        kind = mechanism.groups, mechanism.width
        if kind not in caches:
            count = caches_per_graph(batch * tokens * mechanism.bytes())
            caches[kind] = [mechanism.cache(batch, tokens) for _ in range(count)]
        query = mechanism.query(sizes.heads, batch)
        found[name] = [lambda call={**query, **each}: stream_attention(**call) for each in caches[kind]]
    source, target = torch.zeros(2, sizes.copied_bytes, dtype=torch.uint8, device=DEVICE)
    found["copy"] = [lambda: target.copy_(source)]
    return found


def fits(sizes: Sizes, batch: int, tokens: int) -> bool:
    if INTERPRETED:
        return True
    torch.cuda.empty_cache()  # of the size before
    kinds = {(each.groups, each.width): each.bytes() for each in mechanisms(sizes).values()}
    each_bytes = [batch * tokens * per_token for per_token in (*kinds.values(), sizes.gqa_bytes())]
    needed = sum(caches_per_graph(size) * size for size in each_bytes) + 2 * sizes.copied_bytes
    return needed < 0.9 * torch.cuda.mem_get_info()[0]


def measure(sizes: Sizes, batch: int, tokens: int, rounds: int, seed: int) -> dict[str, Any]:
    """One size: times, bandwidth over the copy's, speed over SDPA's."""
    graphs = {name: seconds_per_call(calls) for name, calls in contenders(sizes, batch, tokens).items()}
    times = timed(graphs, rounds=rounds, seed=seed, label=f"B={batch}, T={tokens}")
    medians = {name: statistics.median(each) for name, each in times.items()}
    sdpa = min((name for name in times if name.startswith("SDPA")), key=medians.__getitem__)

    def bandwidth(name: str, read: int) -> float:
        return batch * tokens * read / (2 * sizes.copied_bytes) * ratio(times["copy"], times[name])

    ours = mechanisms(sizes)
    return {
        "batch": batch,
        "tokens": tokens,
        "sdpa": sdpa,
        "microseconds": {name: 1e6 * seconds for name, seconds in medians.items()},
        "bandwidth_over_copy": {
            **{name: bandwidth(name, each.bytes()) for name, each in ours.items()},
            "SDPA": bandwidth(sdpa, sizes.gqa_bytes()),
        },
        "speed_over_sdpa": {name: ratio(times[sdpa], times[name]) for name in ours},
        "copy_gigabytes_per_second": 2e-9 * sizes.copied_bytes / medians["copy"],
    }


@torch.inference_mode()
def main() -> int:
    options = arguments(__doc__, rounds=20).parse_args()
    reason = backends.missing("triton")
    if reason is None and INTERPRETED and not options.quick:
        reason = "interpreted kernels are only for --quick"
    if reason is not None:
        say(f"gpu_decode: {reason}")
        return 2
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    sizes, rounds = (QUICK, 2) if options.quick else (Sizes(), options.rounds)

    limit = 100 * torch.finfo(DTYPE).eps if INTERPRETED else torch.finfo(DTYPE).eps
    checks = [
        at_most(f"error against double precision: {name}", error(each, sizes.heads, sizes.tokens[0]), limit)
        for name, each in mechanisms(sizes).items()
    ]
    cells, skipped = [], []
    for tokens in sizes.tokens:
        for batch in sizes.batches:
            if not fits(sizes, batch, tokens):
                say(f"B={batch}, T={tokens}: skipped, does not fit into memory")
                skipped.append({"batch": batch, "tokens": tokens})
                continue
            cells.append(measure(sizes, batch, tokens, rounds, options.seed))
            say(f"{cells[-1]}")

    def least(kind: str, name: str) -> float:
        return min((cell[kind][name] for cell in cells if cell["tokens"] >= sizes.long), default=0.0)

    since = f"least, T >= {sizes.long}"
    for name in mechanisms(sizes):
        checks.append(
            at_least(f"bandwidth over copy: {name}, {since}", least("bandwidth_over_copy", name), 0.8)
        )
    for name in mechanisms(sizes):
        checks.append(at_least(f"speed over SDPA GQA: {name}, {since}", least("speed_over_sdpa", name), 1.6))
    gpu = "interpreter" if INTERPRETED else torch.cuda.get_device_name()
    return finish(checks, gpu=gpu, cells=cells, skipped=skipped, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
