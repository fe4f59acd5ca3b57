"""RMS of queries and keys at the start of training, content and rotary slice apart, in real GVA models.

GVA paper, section 3.1 and eq. 15. Shapes: B batch, T tokens, H heads, N content width, R rotary width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from keyshift.attention.module import Attention, attentions, rms
from keyshift.configuration import KeyshiftConfig
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.theory.logits import entropy_share
from keyshift.theory.results import SliceScales
from keyshift.theory.uncertainty import standard_error

SEEDS = 8
TOKENS = 64
STARTS = ("standard", "matched", "measured")
"""``key_map_init``; and matched, then `KeyshiftForCausalLM.match_keys_` on the batch."""
SIZES: dict[str, Any] = {
    "attention": "gva",
    "position": "decoupled_rope",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
}


class Slices(NamedTuple):
    """Queries [B, T, H, N + R], content keys [B, T, H, N] and the rotary key [B, T, R] of one layer."""

    queries: Tensor
    content_keys: Tensor
    rotary_key: Tensor


@torch.no_grad()
def read_slices(model: KeyshiftForCausalLM, input_ids: Tensor) -> list[Slices]:
    """Of every layer, on these tokens, before rotation, which changes no norm."""
    found: list[Slices] = []

    def read(layer: Attention, args: tuple[Any, ...]) -> None:
        x = args[0]
        queries = layer.q_proj(x).unflatten(-1, (layer.heads, -1))
        queries = queries if layer.q_norm is None else layer.q_norm(queries)
        keys, _ = layer.source.expand(*layer.source.project(x))
        rope_key = cast(nn.Linear, layer.rope_key)
        found.append(Slices(queries, keys, rope_key(x)))

    layers = attentions(model)
    hooks = [layer.register_forward_pre_hook(read) for layer in layers]
    try:
        model(input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def started(start: str, seed: int, *, query_norm: bool) -> tuple[KeyshiftForCausalLM, Tensor]:
    """A fresh model, float64, and a batch of random tokens."""
    init = "standard" if start == "standard" else "matched"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KeyshiftForCausalLM(
            KeyshiftConfig(**SIZES, key_map_init=init, query_norm=query_norm)
        ).double()
        input_ids = torch.randint(SIZES["vocab_size"], (2, TOKENS))
    if start == "measured":
        model.match_keys_(input_ids)
    return model, input_ids


class Scales(NamedTuple):
    """Key RMS over query RMS, per slice and of the whole head, and the logits: what one layer starts with."""

    content: float
    rotary: float
    pooled: float
    variance: float
    predicted: float
    entropy: float


def scales(slices: Slices) -> Scales:
    """Logits are those of the last token, before rotation: at most ln T of entropy."""
    queries, content_keys, rotary_key = slices
    width = content_keys.shape[-1]
    rotary_width = rotary_key.shape[-1]
    content, rotary = queries.split((width, rotary_width), dim=-1)
    shared = rotary_key[:, :, None].expand(*content_keys.shape[:3], -1)
    keys = torch.cat((content_keys, shared), dim=-1)
    logits = torch.einsum("bihd,bjhd->bhij", queries[:, -1:], keys) / queries.shape[-1] ** 0.5
    parts = (
        width * rms(content) ** 2 * rms(content_keys) ** 2
        + rotary_width * rms(rotary) ** 2 * rms(shared) ** 2
    )
    return Scales(
        content=float(rms(content_keys) / rms(content)),
        rotary=float(rms(shared) / rms(rotary)),
        pooled=float(rms(keys) / rms(queries)),
        variance=float(logits.square().mean()),
        predicted=float(parts / queries.shape[-1]),
        entropy=float(entropy_share(logits.softmax(-1)).mean()),
    )


def measure_start(start: str, *, query_norm: bool, seeds: int = SEEDS) -> SliceScales:
    """Mean and standard error over seeds, each the mean of a model's layers."""
    rows = []
    for seed in range(seeds):
        model, input_ids = started(start, seed, query_norm=query_norm)
        layers = [scales(each) for each in read_slices(model, input_ids)]
        rows.append(Scales(*(sum(column) / len(layers) for column in zip(*layers, strict=True))))
    columns = zip(*rows, strict=True)
    found = {name: standard_error(column) for name, column in zip(Scales._fields, columns, strict=True)}
    return SliceScales(
        start=start,
        query_norm=query_norm,
        seeds=seeds,
        **{name: estimate.value for name, estimate in found.items()},
        **{f"{name}_error": estimate.error for name, estimate in found.items()},
        content_spread=found["content"].error * seeds**0.5,
    )


def measure_starts() -> list[SliceScales]:
    """Every start, without and with a query norm."""
    return [measure_start(start, query_norm=norm) for norm in (False, True) for start in STARTS]
