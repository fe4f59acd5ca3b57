"""Checkpoints for the tests of serving, and what `generate` says to a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from keyshift import KeyshiftConfig, KeyshiftForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
}
DECOUPLED = {"position": "decoupled_rope"}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {"attention": "gqa", "projection_bias": "all", "key_norm": True, "tie_word_embeddings": True},
    "gqa-shift": {"attention": "gqa", "shift": "kv"},
    "gva": {"attention": "gva", **DECOUPLED},
    "gva-shift": {"attention": "gva", "shift": "kv", "shift_window": 3, **DECOUPLED},
    "gva-shift-of-groups": {"attention": "gva", "shift": "kv", "shift_heads": "kv", **DECOUPLED},
    "mla": {"attention": "mla", **DECOUPLED},
    "mla-shift": {"attention": "mla", "shift": "kv", "shift_weights": "gate", **DECOUPLED},
    "alibi": {"attention": "gqa", "position": "alibi", "shift": "kv", "mlp": "none"},
    "learned": {"attention": "shared_kv", "position": "learned", "shift": "k"},
    "decoupled-gqa": {"attention": "gqa", "shift": "v", **DECOUPLED},
}
"""Every mechanism, position and shift that is served, and what else a layer may have."""


def checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """A random model whose attention is far from flat."""
    torch.manual_seed(0)
    config = KeyshiftConfig(**{**SIZES, **VARIANTS.get(name, {}), **changes})
    model = KeyshiftForCausalLM(config)
    model.save_pretrained(folder / name)
    return folder / name


def prompts(*lengths: int, seed: int = 0, begin: tuple[int, ...] = ()) -> list[list[int]]:
    """Random token numbers, after those that all begin with."""
    draws = torch.Generator().manual_seed(seed)
    return [[*begin, *torch.randint(3, 160, (length,), generator=draws).tolist()] for length in lengths]


@torch.inference_mode()
def greedy(model: KeyshiftForCausalLM, prompt: list[int], count: int) -> list[int]:
    """What `generate` puts behind a prompt, whatever ends a text."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return found[0, len(prompt) :].tolist()
