"""Scaled RoPE: slower angles, so that a model reads further than it was trained to (transformers' kinds).

A kind is here if its angles depend on the position alone. Those that depend on the length of the sequence
(``dynamic``, ``longrope``) would leave cached keys at other angles than new ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keyshift.errors import UserError, nearest

REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The kinds, and what each has to be told."""

OPTIONAL = {"yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")}


def check_scaling(scaling: Mapping[str, Any]) -> None:
    """Refuse what `scaled` cannot compute.

    Raises:
        UserError: an unknown kind, a number that is missing, unknown, or not one.
    """
    kind = scaling.get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise UserError(
            f"rope_type={kind!r} turns a token by the length of its sequence, which keys that are cached "
            f"cannot follow; use {', '.join(map(repr, REQUIRED))} or 'default'"
        )
    if kind not in REQUIRED:
        raise UserError(f"rope_type={kind!r} is not known; {nearest(str(kind), ('default', *REQUIRED))}")
    known = {"rope_type", *REQUIRED[kind], *OPTIONAL.get(kind, ())}
    given = [name for name in OPTIONAL.get(kind, ()) if scaling.get(name) is not None and name != "truncate"]
    for name in (*REQUIRED[kind], *given):
        value = scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"rope_type={kind!r} needs {name} above 0, not {value!r}")
    if not isinstance(scaling.get("truncate", True), bool):
        raise UserError(f"truncate={scaling['truncate']!r} of rope_type={kind!r} must be true or false")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UserError(
            f"rope_type='llama3' needs low_freq_factor={scaling['low_freq_factor']} below "
            f"high_freq_factor={scaling['high_freq_factor']}"
        )
    for name in scaling.keys() - known:
        raise UserError(f"{name}={scaling[name]!r} is not a number of rope_type={kind!r}; leave it out")


def scaled(speeds_P: Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Radians per token of every pair of channels [P], and what cosines and sines are multiplied by.

    Args:
        speeds_P: of ordinary RoPE: theta^(-i / P) for the pair i.
        theta: the base.
        scaling: a kind and its numbers that `check_scaling` lets through.
    """
    if scaling["rope_type"] == "linear":
        return speeds_P / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(speeds_P, scaling), 1.0
    return _yarn(speeds_P, theta, scaling), _yarn_size(scaling)


def _llama3(speeds_P: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: pairs that turn often within the first context stay, rare ones are slowed, those between
    are mixed."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_P = scaling["original_max_position_embeddings"] * speeds_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return kept_P * speeds_P + (1 - kept_P) * speeds_P / scaling["factor"]


def _yarn(speeds_P: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """YaRN's (arXiv 2309.00071): the same, the mix being linear in the pair's number."""
    pairs = len(speeds_P)
    context = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(context / (times * 2 * math.pi)) / math.log(theta)

    first = pair_that_turns(scaling.get("beta_fast") or 32)
    last = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    numbers_P = torch.arange(pairs, dtype=speeds_P.dtype, device=speeds_P.device)
    slowed_P = ((numbers_P - first) / ((last - first) or 0.001)).clamp(0, 1)
    return (1 - slowed_P) * speeds_P + slowed_P * speeds_P / scaling["factor"]


def _yarn_size(scaling: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys by: scores of long contexts are sharpened."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def size(weight: float) -> float:
        return 0.1 * weight * math.log(max(1.0, scaling["factor"])) + 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return size(above) / size(below) if above and below else size(1.0)
