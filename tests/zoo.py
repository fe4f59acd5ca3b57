"""Tiny random models of other libraries' architectures, each with what makes its attention special."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

VOCAB = 41

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HALF = {**SIZES, "head_dim": 4}
MHA = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 4}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", HALF),
    "gemma2": (
        "Gemma2",
        {
            **HALF,
            "attn_implementation": "eager",
            "sliding_window": 4,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": ("Gemma3", {**HALF, "sliding_window": 4, "query_pre_attn_scalar": 4}),
    "gpt_neox": ("GPTNeoX", {**MHA, "rotary_pct": 0.5}),
    "opt": ("OPT", {**MHA, "ffn_dim": 24, "word_embed_proj_dim": 16, "init_std": 0.3}),
    "phi3": ("Phi3", SIZES),
    "olmo2": ("Olmo2", SIZES),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 8,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **HALF,
            "attn_implementation": "eager",
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 4,
        },
    ),
    "cohere": ("Cohere", SIZES),
    "granite": (
        "Granite",
        {**SIZES, "residual_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    ),
}
"""The class's prefix and the arguments of its configuration."""

HEADS = {"GPT2": "LMHeadModel"}


def config(name: str, **changes: Any) -> Any:
    prefix, arguments = ARCHITECTURES[name]
    prefix = {"Gemma3": "Gemma3Text"}.get(prefix, prefix)
    return getattr(transformers, f"{prefix}Config")(**{**arguments, **changes})


def fresh(name: str, **changes: Any) -> Any:
    """A new model, always with the same weights; biases, gains and sinks are random too."""
    prefix, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}{HEADS.get(prefix, 'ForCausalLM')}")(
        config(name, **changes)
    ).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
    return model


@functools.cache
def build(name: str) -> Any:
    """The architecture's model; do not change its weights."""
    return fresh(name)
