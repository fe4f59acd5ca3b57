"""One decoding step of attention: `stream_attention` against what one would write with PyTorch.

    python benchmarks/decode.py [--rounds 21] [--tokens 16384 65536]

One query token, one sequence; H = 32 heads, G = 8 groups, width 128, rotary width 32 (GVA and GQA); MLA has
a latent of 512 and a rotary key of 64. Streams are token-major, as the cache keeps them.

- GVA, and GVA in 8 and 4 bits, against PyTorch's SDPA on GQA of the same H, G, width and dtype: the faster of
  ``enable_gqa=True`` and of the group folded into the query length, on contiguous [G, T, 128] tensors, which
  is what SDPA likes best. Rounded streams are held against bfloat16.
- A shift against the same mechanism without: keys and values mixed, window 2.
- MLA against the fastest of four ways to write it with two matrix products in PyTorch, query absorbed.
- GQA of ours beside SDPA, so that GVA can be held against both.
- Bytes read per second stand beside what this machine reads at most (a plain sum over 1 GiB, same threads, in
  the same rounds), and operations per second beside its peak (fused multiply-adds in registers; twice that
  for bfloat16 where the processor multiplies pairs).
- What binds is found by measurement too: the same step over caches of 1,024 and 2,048 tokens, which stay in
  the processor's own, tells what the arithmetic of a token takes (the difference, so that a call's fixed cost
  does not count). Where reading the bytes at the machine's rate takes longer than that, memory binds, and
  0.85 of its rate is the bar.

A round runs every contender once, in random order; ratios are medians over rounds. Needs g++ or clang++, as
the kernel does. Nothing else should run on the machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pairing import Check, Times, arguments, at_least, at_most, difference, finish, ratio, say, timed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from keyshift.cache import SCALE_DTYPE
from keyshift.ops.stream_attention import cpu, stream_attention
from keyshift.ops.stream_attention.quantised import quantise

HEADS, GROUPS, WIDTH, ROTARY = 32, 8, 128, 32
LATENT, LATENT_ROTARY = 512, 64
RESIDENT = (1024, 2048)
"""Tokens of caches that stay in the processor's own."""
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass
class Step:
    """One way to compute a decoding step, the bytes of the cache that it has to read and its operations."""

    run: Callable[[], object]
    bytes: int = 0
    operations: int = 0


@dataclass
class Setting:
    """What all contenders of a comparison share."""

    tokens: int
    dtype: torch.dtype
    generator: torch.Generator
    steps: dict[str, Step] = field(default_factory=dict)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def stream(self, groups: int, width: int) -> Tensor:
        """[1, G, T, width], token-major."""
        return self.noise(1, self.tokens, groups, width).transpose(1, 2)

    @property
    def label(self) -> str:
        threads = torch.get_num_threads()
        return f"T={self.tokens} {NAMES[self.dtype]} {threads} thread{'s' * (threads > 1)}"

    def add(self, name: str, run: Callable[[], object], streams: list[Tensor | None], widths: int) -> None:
        """``widths``: channels that each head multiplies per token, scores and output together."""
        size = sum(stream.numel() * stream.element_size() for stream in streams if stream is not None)
        self.steps[name] = Step(run, size, 2 * HEADS * self.tokens * widths)

    def add_ours(self, name: str, widths: int, **call: Any) -> None:
        names = ("keys_BGTS", "values_BGTV", "rope_keys_BTR", "key_scales_BGTN", "value_scales_BGTN")
        call = {"values_BGTV": None, "scale": WIDTH**-0.5, "backend": "cpu", **call}
        self.add(name, lambda: stream_attention(**call), [call.get(each) for each in names], widths)


def grouped(setting: Setting) -> None:
    """GVA, GQA and their shifted forms, and SDPA on GQA."""
    queries, keys, values = setting.noise(1, HEADS, 1, WIDTH), *(setting.stream(GROUPS, WIDTH) for _ in "kv")
    rotary = {
        "rope_queries_BHQR": setting.noise(1, HEADS, 1, ROTARY),
        "rope_keys_BTR": setting.noise(1, setting.tokens, ROTARY),
    }
    mix = torch.rand(HEADS, 2, generator=setting.generator)
    gva = {"queries": queries, "keys_BGTS": keys, **rotary}
    setting.add_ours("GVA", 2 * WIDTH + ROTARY, **gva)
    setting.add_ours("GVA + shift", 2 * WIDTH + ROTARY, **gva, key_weights_HW=mix, value_weights_HW=mix)
    setting.add_ours("GQA", 2 * WIDTH, queries=queries, keys_BGTS=keys, values_BGTV=values)
    turned = setting.noise(1, HEADS, 2, 1, WIDTH)
    shifted = {"queries": turned, "keys_BGTS": keys, "values_BGTV": values, "value_weights_HW": mix}
    setting.add_ours("GQA + shift", 3 * WIDTH, **shifted)
    for bits, kind, blocks in ((8, torch.int8, 1), (4, torch.uint8, WIDTH // 32)):
        integers, scales = (
            each.transpose(1, 2).contiguous().transpose(1, 2)
            for each in quantise(keys, kind, blocks, SCALE_DTYPE)
        )
        rounded = {**gva, "keys_BGTS": integers, "key_scales_BGTN": scales}
        setting.add_ours(f"GVA int{bits}", 2 * WIDTH + ROTARY, **rounded)
    k, v = keys.contiguous(), values.contiguous()
    folded = queries.view(1, GROUPS, HEADS // GROUPS, WIDTH)
    setting.add("SDPA folded", lambda: scaled_dot_product_attention(folded, k, v), [k, v], 2 * WIDTH)
    setting.add(
        "SDPA enable_gqa",
        lambda: scaled_dot_product_attention(queries, k, v, enable_gqa=True),
        [k, v],
        2 * WIDTH,
    )


def latent(setting: Setting) -> None:
    """MLA, and four ways to write it."""
    scale = (WIDTH + LATENT_ROTARY) ** -0.5
    queries, rope_queries = (
        setting.noise(1, HEADS, 1, LATENT),
        setting.noise(1, HEADS, 1, LATENT_ROTARY),
    )
    both = setting.noise(1, setting.tokens, LATENT + LATENT_ROTARY)
    stream, rope_keys = both[..., :LATENT].contiguous(), both[..., LATENT:].contiguous()
    setting.add_ours(
        "MLA",
        2 * LATENT + LATENT_ROTARY,
        queries=queries,
        keys_BGTS=stream[:, None],
        rope_queries_BHQR=rope_queries,
        rope_keys_BTR=rope_keys,
        scale=scale,
    )
    query, cached = torch.cat((queries, rope_queries), dim=-1)[0, :, 0], both[0]
    values = cached[:, :LATENT]
    written = {
        "torch, one product": lambda: ((query @ cached.T) * scale).softmax(-1) @ values,
        "torch, float softmax": lambda: (
            ((query @ cached.T).float() * scale).softmax(-1).to(cached.dtype) @ values
        ),
        "torch, transposed": lambda: (values.T @ ((cached @ query.T).T * scale).softmax(-1).T).T,
        "torch, two products": lambda: (
            ((queries[0, :, 0] @ stream[0].T + rope_queries[0, :, 0] @ rope_keys[0].T) * scale).softmax(-1)
            @ stream[0]
        ),
    }
    for name, run in written.items():
        setting.add(name, run, [both], 2 * LATENT + LATENT_ROTARY)


class Machine:
    """The rates that no kernel can exceed, measured by ``machine.cpp``."""

    def __init__(self, folder: Path):
        compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
        if compiler is None:
            raise SystemExit("error: there is no compiler; set CXX, or install g++ or clang++")
        library = folder / "machine.so"
        flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi"]
        source = Path(__file__).with_name("machine.cpp")
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.read_rate.restype = self._library.multiply_add_rate.restype = ctypes.c_double
        self._library.read_rate.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self._memory = torch.zeros(1 << 28)
        self._memory.fill_(1.0)

    def read_rate(self, threads: int) -> float:
        return self._library.read_rate(self._memory.data_ptr(), self._memory.numel(), threads)

    def peak(self, threads: int, dtype: torch.dtype) -> float:
        pairs = dtype == torch.bfloat16 and next(iter(cpu.kernels())) == "avx512_bf16"
        return self._library.multiply_add_rate(threads) * (2 if pairs else 1)


def fastest(setting: Setting, names: list[str]) -> str:
    """The fastest of several steps in three rounds; the others are dropped."""
    times = timed({n: setting.steps[n].run for n in names}, rounds=3, seed=0, label="choosing", warmup=1)
    medians = {name: statistics.median(each) for name, each in times.items()}
    best = min(medians, key=medians.__getitem__)
    say(", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in medians.items()))
    for name in names:
        if name != best:
            del setting.steps[name]
    return best


def row(setting: Setting, name: str, times: Times, rate: float, peak: float, over: str) -> dict[str, Any]:
    """What one contender did, for programs."""
    step, seconds = setting.steps[name], statistics.median(times[name])
    found = {
        "step": name,
        "tokens": setting.tokens,
        "dtype": NAMES[setting.dtype],
        "threads": torch.get_num_threads(),
        "milliseconds": 1e3 * seconds,
        "speedup": ratio(times[over], times[name]),
        "over": over,
        "gigabytes_per_second": step.bytes / seconds / 1e9,
        "read_share": step.bytes / rate / seconds,
        "gigaflops": step.operations / seconds / 1e9,
        "peak_share": step.operations / peak / seconds,
    }
    few, more = (resident(name, tokens) for tokens in RESIDENT)
    if few in times:
        per_token = difference(times[more], times[few]) / (RESIDENT[1] - RESIDENT[0])
        arithmetic = per_token * setting.tokens
        found["binds"] = "memory" if step.bytes / rate > arithmetic else "arithmetic"
    return found


def resident(name: str, tokens: int) -> str:
    return f"{name}, {tokens} tokens"


def line(found: dict[str, Any]) -> str:
    """The same for people."""
    return (
        f"  {found['step']:<20} {found['milliseconds']:8.2f} ms {found['speedup']:6.2f}x "
        f"{found['gigabytes_per_second']:6.1f} GB/s ({found['read_share']:4.0%}) "
        f"{found['gigaflops']:5.0f} GFLOP/s ({found['peak_share']:4.0%}) {found.get('binds', '')}"
    )


def compare(
    fill: Callable[[Setting], None], setting: Setting, machine: Machine, over: str, options: Any
) -> tuple[Times, str, list[dict[str, Any]]]:
    """Time the contenders that ``fill`` enters, with the machine's read rate measured in the same rounds.

    Of those whose name starts with ``over`` the fastest is what the others are held against.
    """
    threads = torch.get_num_threads()
    fill(setting)
    small = [Setting(tokens, setting.dtype, setting.generator) for tokens in RESIDENT]
    for each in small:
        fill(each)
    best = fastest(setting, [name for name in setting.steps if name.startswith(over)])
    ours = [name for name in setting.steps if not name.startswith(over)]
    reads: list[float] = []
    contenders: dict[str, Callable[[], object]] = {
        **{name: step.run for name, step in setting.steps.items()},
        **{resident(name, each.tokens): each.steps[name].run for each in small for name in ours},
        "read": lambda: reads.append(machine.read_rate(threads)),
    }
    times = timed(contenders, rounds=options.rounds, seed=options.seed, label=setting.label)
    peak = max(machine.peak(threads, setting.dtype) for _ in range(3))
    rate = statistics.median(reads[-options.rounds :])
    say(f"{setting.label}: reads {rate / 1e9:.1f} GB/s, peak {peak / 1e9:.0f} GFLOP/s")
    rows = [row(setting, name, times, rate, peak, best) for name in setting.steps]
    for found in rows:
        say(line(found))
    return times, best, rows


def main() -> int:
    parser = arguments(__doc__, rounds=21)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536], help="default: %(default)s")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = [512], 2
    if (reason := cpu.missing()) is not None:
        print(f"error: the CPU kernel is not here: {reason}", file=sys.stderr)
        return 2
    checks: list[Check] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        machine = Machine(Path(folder))
        for threads in range(1, options.threads + 1):
            torch.set_num_threads(threads)
            for tokens in options.tokens:
                for dtype in (torch.float32, torch.bfloat16):
                    checks += one(machine, tokens, dtype, options, rows)
    return finish(checks, rows=rows, kernel=next(iter(cpu.kernels())))


def one(
    machine: Machine, tokens: int, dtype: torch.dtype, options: Any, rows: list[dict[str, Any]]
) -> list[Check]:
    """Both comparisons at one length and dtype, and their checks."""
    setting = Setting(tokens, dtype, torch.Generator().manual_seed(options.seed))
    at, low = setting.label, dtype == torch.bfloat16
    times, sdpa, found = compare(grouped, setting, machine, "SDPA", options)
    checks = [
        at_least(f"GVA over SDPA-GQA, {at}", ratio(times[sdpa], times["GVA"]), 2.0 if low else 1.6),
        at_most(f"GVA shift, {at}", ratio(times["GVA + shift"], times["GVA"]), 1.1),
        at_most(f"GQA shift, {at}", ratio(times["GQA + shift"], times["GQA"]), 1.25),
    ]
    if low:
        checks.append(at_least(f"GVA int8 over SDPA-GQA, {at}", ratio(times[sdpa], times["GVA int8"]), 3.0))
    setting = Setting(tokens, dtype, setting.generator)
    times, best, more = compare(latent, setting, machine, "torch", options)
    checks.append(at_least(f"MLA over two products, {at}", ratio(times[best], times["MLA"]), 3.0))
    checks += [
        at_least(f"{each['step']} of read rate, {at}", each["read_share"], 0.85)
        for each in (*found, *more)
        if each.get("binds") == "memory"
    ]
    rows += (*found, *more)
    return checks


if __name__ == "__main__":
    sys.exit(main())
