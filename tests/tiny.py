"""Tiny models for the tests: every mechanism, with weights large enough that attention is far from flat."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.configuration import CHOICES, GROUPED, RECONSTRUCTED

VOCAB = 31

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "qk_rope_head_dim": 4,
    "kv_lora_rank": 12,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ADOPTED: dict[str, dict[str, Any]] = {
    "qwen2": {"projection_bias": "qkv", "scaled_rope": YARN},
    "qwen3": {"projection_bias": "all", "query_norm": True, "key_norm": True},
    "llama3": {"scaled_rope": LLAMA3},
    "biases": {"projection_bias": "all"},
    "converted": {"projection_bias": "qkv", "rope_pairs": [3, 0]},
    "normed": {"projection_bias": "qkv", "stream_norm": True},
    "plain": {"projection_bias": "all", "stream_norm": False},
}
"""What other libraries' models have beside the three axes."""


@dataclass(frozen=True)
class Case:
    """One mechanism x position x shift, and one setting of everything that could interact with them; perhaps
    what models have that were ``adopted``."""

    attention: str
    position: str
    shift: str
    shift_window: int
    shift_heads: str
    shift_weights: str
    query_norm: bool
    rope_allocation: str
    mlp: str
    stream_norm: bool | None
    adopted: str = ""

    def __str__(self) -> str:
        axes = f"{self.attention}-{self.position}-{self.shift}"
        return f"{axes}-{self.adopted}" if self.adopted else axes

    def config(self, **changes: Any) -> KeyshiftConfig:
        groups = {"num_key_value_heads": 2} if self.attention in GROUPED else {}
        fields = {name: value for name, value in asdict(self).items() if name != "adopted"}
        return KeyshiftConfig(**{**SIZES, **groups, **fields, **ADOPTED.get(self.adopted, {}), **changes})

    @property
    def shifts_query(self) -> bool:
        return "q" in self.shift


def case(attention: str, position: str, shift: str) -> Case:
    """The case with these three axes; the other settings are drawn, always the same for the same axes."""
    draw = random.Random(f"{attention} {position} {shift} h").choice
    allocations = ("additive",) if attention == "shared_kv" else CHOICES["rope_allocation"]
    return Case(
        attention,
        position,
        shift,
        shift_window=draw((2, 3, 3, 4)),
        shift_heads=draw(CHOICES["shift_heads"]),
        shift_weights=draw(CHOICES["shift_weights"]),
        query_norm=draw((False, True)),
        rope_allocation=draw(allocations),
        mlp=draw(("swiglu", "swiglu", "none")),
        stream_norm=draw((False, True)) if attention in RECONSTRUCTED else None,
    )


CASES = [
    case(*axes) for axes in itertools.product(CHOICES["attention"], CHOICES["position"], CHOICES["shift"])
]
"""All 150 combinations of the three axes."""

FEW = [
    case("gqa", "rope", "kv"),
    case("gqa", "alibi", "none"),
    case("mha", "learned", "k"),
    case("mla", "decoupled_rope", "kv"),
    case("gva", "decoupled_rope", "kv"),
    case("gva", "rope", "k"),
    case("shared_kv", "none", "v"),
    case("mqa", "rope", "qkv"),
]
"""A handful that takes every path through the attention module."""


FOREIGN = [
    replace(case("gqa", "rope", "kv"), adopted="qwen2"),
    replace(case("gqa", "rope", "k"), adopted="qwen3"),
    replace(case("mqa", "alibi", "kv"), adopted="qwen3"),
    replace(case("mha", "decoupled_rope", "kv"), adopted="llama3"),
    replace(case("gva", "decoupled_rope", "kv"), adopted="qwen2"),
    replace(case("gva", "rope", "k"), adopted="llama3"),
    replace(case("gva", "decoupled_rope", "k"), adopted="converted"),
    replace(case("gva", "decoupled_rope", "v"), adopted="normed"),
    replace(case("mla", "rope", "none"), adopted="llama3"),
    replace(case("mla", "decoupled_rope", "k"), adopted="plain"),
    replace(case("shared_kv", "none", "kv"), adopted="biases"),
]


@functools.cache
def build(case: Case, dtype: torch.dtype = torch.float32) -> KeyshiftForCausalLM:
    """The case's model in evaluation mode; do not change its weights."""
    torch.manual_seed(0)
    model = KeyshiftForCausalLM(case.config()).eval()
    if case.adopted:
        draw_biases_and_norms_(model)
    return model.to(torch.bfloat16).to(dtype) if dtype != torch.float32 else model


@torch.no_grad()
def draw_biases_and_norms_(model: torch.nn.Module) -> None:
    """Away from 0 and 1, where they start and do nothing."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.3)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random token numbers, none of them 0."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def full(model: KeyshiftForCausalLM, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits of one forward call without a cache."""
    with torch.no_grad():
        return model(ids, use_cache=False, **inputs).logits


def step(model: KeyshiftForCausalLM, ids: Tensor, cache: Any, **inputs: Any) -> Tensor:
    """Logits of the new tokens, continuing the cache."""
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True, **inputs).logits


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of any token: the norm of its difference over the norm of what was expected."""
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.1e}"
