"""What rounding the cache costs in quality: a trained model's loss with its streams in 8 and 4 bits.

    python benchmarks/cache_precision.py CHECKPOINT... --text FILES... [--sequences 32] [--length 256]

Each checkpoint is a keyshift model with its tokenizer in the folder or in --tokenizer. The text is cut into
sequences, and every forward pass sees the content streams rounded and multiplied out (before a rotation of
whole heads; the rotary key of decoupled RoPE is left alone). Three ways to choose scales are compared:

- token: one scale per token and stream head, set when the token is written;
- token/32: one per token and block of 32 channels;
- channel: one per channel of the sequence, from the largest magnitude of the whole sequence. A cache cannot
  know that when it writes the first token, so this is a bound on what fixed scales could reach.

Printed are the added loss (nats per token) and the root mean square error of the logits over their standard
deviation. The check: 8 bits as `KeyshiftCache` keeps them add less than 0.01 nats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pairing import at_most, finish, say
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from keyshift import KeyshiftForCausalLM
from keyshift.attention.module import Attention
from keyshift.cache import BLOCK, CACHE_DTYPES, SCALE_DTYPE
from keyshift.ops.stream_attention.quantised import LARGEST, dequantise, quantise

Rounding = Callable[[Tensor], Tensor]
"""Of a stream's heads [B, T, G, S]."""


def by_token(kind: torch.dtype, blocks: int) -> Rounding:
    return lambda heads: dequantise(*quantise(heads, kind, blocks, SCALE_DTYPE), heads.dtype)


def by_channel(kind: torch.dtype) -> Rounding:
    def rounded(heads: Tensor) -> Tensor:
        scale = heads.abs().amax(dim=1, keepdim=True) / LARGEST[kind]
        return (heads / scale.clamp_min(1e-20)).round() * scale

    return rounded


def roundings(width: int) -> dict[str, Rounding]:
    """All that are compared, for heads of this width."""
    ways: dict[str, Rounding] = {}
    for name, kind in CACHE_DTYPES.items():
        ways[f"{name}, token"] = by_token(kind, 1)
        if width % BLOCK == 0:
            ways[f"{name}, token/{BLOCK}"] = by_token(kind, width // BLOCK)
        ways[f"{name}, channel"] = by_channel(kind)
    return ways


@contextmanager
def rounded_streams(model: KeyshiftForCausalLM, way: Rounding) -> Iterator[None]:
    """Every attention layer sees its content streams rounded this way."""
    sources = [module.source for module in model.modules() if isinstance(module, Attention)]
    plain = type(sources[0]).project

    def project(self: Any, x_BTE: Tensor) -> tuple[Tensor | None, Tensor]:
        keys, values = plain(self, x_BTE)
        keys, values = (
            None if s is None else way(s.unflatten(-1, (self.stream_heads, -1))).flatten(-2)
            for s in (keys, values)
        )
        assert values is not None
        return keys, values

    for source in sources:
        source.project = project.__get__(source)
    try:
        yield
    finally:
        for source in sources:
            del source.project


@torch.inference_mode()
def evaluate(model: KeyshiftForCausalLM, ids: Tensor) -> tuple[float, Tensor]:
    """Loss in nats per token, and the logits."""
    logits = torch.cat([model(part, use_cache=False).logits for part in ids.split(8)])
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())), logits


def sequences(tokenizer: Any, paths: list[Path], count: int, length: int) -> Tensor:
    """So many sequences [count, length] spread over the text."""
    ids = tokenizer("\n".join(path.read_text(errors="replace") for path in paths))["input_ids"]
    if len(ids) < count * length:
        raise SystemExit(f"error: the text has {len(ids)} tokens, less than {count} x {length}")
    step = (len(ids) - length) // max(1, count - 1)
    return torch.tensor([ids[i * step : i * step + length] for i in range(count)])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", help="folders of trained keyshift models")
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokenizer", help="where it is not beside the model")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    rows, checks = [], []
    for checkpoint in options.checkpoints:
        model = KeyshiftForCausalLM.from_pretrained(checkpoint).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or checkpoint)
        ids = sequences(tokenizer, options.text, options.sequences, options.length)
        loss, logits = evaluate(model, ids)
        config = model.config
        width = config.kv_lora_rank if config.attention == "mla" else config.head_dim
        label = f"{config.attention}, shift {config.shift}, head of {width}"
        say(f"{label}: loss {loss:.4f}")
        for name, way in roundings(width).items():
            with rounded_streams(model, way):
                rounded, found = evaluate(model, ids)
            error = float((found - logits).square().mean().sqrt() / logits.std())
            row = {"model": label, "rounding": name, "added_loss": rounded - loss, "logit_error": error}
            rows.append(row)
            say(f"  {name:<16} added loss {rounded - loss:+.5f}, logit error {error:.4f}")
            if name == "int8, token":
                checks.append(at_most(f"int8 adds to the loss of {label}", rounded - loss, 0.01))
    return finish(checks, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
