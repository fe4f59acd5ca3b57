"""Why the CPU kernel is C++: the same decoding step of GVA written for numba, beside it.

    pip install numba
    python benchmarks/numba_decode.py [--rounds 15] [--tokens 16384 65536]

Float32, H = 32, G = 8, width 128, rotary width 32, one query, streams token-major as in decode.py. The numba
version has the same structure as the kernel (tasks over the sequence, blocks of 64 tokens, a running maximum,
scores and output from the same block, four heads at a time) and leaves vectors to the compiler. numba has no
bfloat16, and no say in which vectors stay in registers. The check is that C++ is at least as fast.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import numba
except ImportError:
    sys.exit("error: numba is not installed: pip install numba")
import numpy as np
import torch
from pairing import arguments, at_least, finish, ratio, say, timed

from keyshift.ops.stream_attention import stream_attention

HEADS, GROUPS, WIDTH, ROTARY = 32, 8, 128, 32
PER_GROUP = HEADS // GROUPS
BLOCK = 64
SPLITS = 32


@numba.njit(fastmath=True)
def block_of_group(  # type: ignore[no-untyped-def]
    q, rope_q, stream, rope, group, first, last, scale, top, total, out
):
    """Four heads over tokens first … last - 1: their maxima, sums and outputs so far are updated."""
    scores = np.empty((PER_GROUP, BLOCK), np.float32)
    for t in range(first, last):
        a = b = c = d = np.float32(0)
        for i in range(WIDTH):
            x = stream[t, group, i]
            a += q[0, i] * x
            b += q[1, i] * x
            c += q[2, i] * x
            d += q[3, i] * x
        for i in range(ROTARY):
            x = rope[t, i]
            a += rope_q[0, i] * x
            b += rope_q[1, i] * x
            c += rope_q[2, i] * x
            d += rope_q[3, i] * x
        scores[0, t - first], scores[1, t - first] = a * scale, b * scale
        scores[2, t - first], scores[3, t - first] = c * scale, d * scale
    for row in range(PER_GROUP):
        most = max(top[row], scores[row, : last - first].max())
        shrink = np.exp(top[row] - most)
        top[row] = most
        added = np.float32(0)
        for j in range(last - first):
            scores[row, j] = np.exp(scores[row, j] - most)
            added += scores[row, j]
        total[row] = total[row] * shrink + added
        for i in range(WIDTH):
            out[row, i] *= shrink
    for t in range(first, last):
        a, b, c, d = scores[0, t - first], scores[1, t - first], scores[2, t - first], scores[3, t - first]
        for i in range(WIDTH):
            x = stream[t, group, i]
            out[0, i] += a * x
            out[1, i] += b * x
            out[2, i] += c * x
            out[3, i] += d * x


@numba.njit(fastmath=True, parallel=True)
def decode(q, rope_q, stream, rope, scale):  # type: ignore[no-untyped-def]
    """Output [H, WIDTH] of queries [H, WIDTH], [H, ROTARY]; stream [T, G, WIDTH], rotary keys [T, ROTARY]."""
    tokens = stream.shape[0]
    tops = np.full((SPLITS, HEADS), -np.inf, np.float32)
    totals = np.zeros((SPLITS, HEADS), np.float32)
    outs = np.zeros((SPLITS, HEADS, WIDTH), np.float32)
    for split in numba.prange(SPLITS):
        begin, end = tokens * split // SPLITS, tokens * (split + 1) // SPLITS
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            for group in range(GROUPS):
                heads = slice(group * PER_GROUP, (group + 1) * PER_GROUP)
                block_of_group(
                    q[heads],
                    rope_q[heads],
                    stream,
                    rope,
                    group,
                    first,
                    last,
                    scale,
                    tops[split, heads],
                    totals[split, heads],
                    outs[split, heads],
                )
    result = np.zeros((HEADS, WIDTH), np.float32)
    for head in range(HEADS):
        most = tops[:, head].max()
        total = np.float32(0)
        for split in range(SPLITS):
            weight = np.exp(tops[split, head] - most)
            total += weight * totals[split, head]
            result[head] += weight * outs[split, head]
        result[head] /= total
    return result


def compare(tokens: int, options: Any) -> float:
    """Seconds of numba over those of the kernel, the median of the rounds' ratios."""
    generator = torch.Generator().manual_seed(options.seed)
    shapes = ((HEADS, WIDTH), (HEADS, ROTARY), (tokens, GROUPS, WIDTH), (tokens, ROTARY))
    q, rope_q, stream, rope = (torch.randn(shape, generator=generator) for shape in shapes)
    scale = np.float32(WIDTH**-0.5)
    arrays = [each.numpy() for each in (q, rope_q, stream, rope)]
    call = {
        "queries": q[None, :, None],
        "keys_BGTS": stream.transpose(0, 1)[None],
        "values_BGTV": None,
        "rope_queries_BHQR": rope_q[None, :, None],
        "rope_keys_BTR": rope[None],
        "scale": float(scale),
        "backend": "cpu",
    }
    expected = stream_attention(**call)[0, :, 0]
    torch.testing.assert_close(torch.from_numpy(decode(*arrays, scale)), expected, rtol=1e-4, atol=1e-5)
    contenders = {"numba": lambda: decode(*arrays, scale), "C++": lambda: stream_attention(**call)}
    label = f"{tokens} tokens, {options.threads} threads"
    times = timed(contenders, rounds=options.rounds, seed=options.seed, label=label)
    found = ratio(times["numba"], times["C++"])
    say(f"{label}: numba takes {found:.2f} of C++'s time")
    return found


def main() -> int:
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = [256], 2
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    checks = [
        at_least(f"numba over C++ at {tokens} tokens", compare(tokens, options), 1.0)
        for tokens in options.tokens
    ]
    return finish(checks)


if __name__ == "__main__":
    sys.exit(main())
