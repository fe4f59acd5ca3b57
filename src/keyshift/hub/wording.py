"""What a model is, in words: where keys come from, position, shift, sizes."""

from __future__ import annotations

from keyshift.configuration import KeyshiftConfig

SHIFTED = {"q": "queries", "k": "keys", "v": "values"}


def mechanism(config: KeyshiftConfig) -> dict[str, str]:
    """The lines of the table, by their first column."""
    return {
        "attention": attention(config),
        "position": position(config),
        "KV shift": shift(config),
        "layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}"
        + (
            f", SwiGLU of {config.intermediate_size}"
            if config.mlp == "swiglu"
            else ", no feed-forward layers"
        ),
        "heads": heads(config),
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"up to {config.max_position_embeddings:,} tokens",
    }


def attention(config: KeyshiftConfig) -> str:
    """Where keys come from, and what is cached."""
    groups = "one head" if config.num_key_value_heads == 1 else f"{config.num_key_value_heads} heads"
    return {
        "mha": "multi-head attention: every query head has its own keys and values",
        "gqa": f"grouped-query attention: the query heads share {groups} of keys and values",
        "mqa": "multi-query attention: all query heads share one head of keys and values",
        "mla": f"multi-head latent attention: keys and values of every head are computed from one latent of "
        f"{config.kv_lora_rank} numbers per token, and the latent is what is cached",
        "shared_kv": f"shared KV: the values of {groups} are cached, and are the keys too",
        "gva": f"grouped value attention (arXiv 2609.13285): the values of {groups} are cached, and every "
        "query head's keys are computed from them",
    }[config.attention]


def position(config: KeyshiftConfig) -> str:
    """How position enters."""
    width, scaled = config.qk_rope_head_dim, ""
    if config.scaled_rope is not None:
        factor = config.scaled_rope.get("factor")
        scaled = f", scaled for longer contexts ({config.scaled_rope['rope_type']}" + (
            f", factor {factor:g})" if factor is not None else ")"
        )
    base = f", base {config.rope_theta:g}{scaled}"
    place = "taken out of" if config.rope_allocation == "carved" else "beside"
    return {
        "rope": f"RoPE on whole heads{base}",
        "decoupled_rope": f"decoupled RoPE: {width} rotated channels {place} those of the head, with one "
        f"rotated key for all heads{base}",
        "alibi": "ALiBi: a penalty that grows with distance",
        "learned": "learned absolute positions, added to the embedding",
        "none": "none but the causal mask",
    }[config.position]


def shift(config: KeyshiftConfig) -> str:
    """What is mixed with the previous tokens'."""
    if config.shift == "none":
        return "none"
    *first, last = (SHIFTED[each] for each in config.shift)
    what = f"{', '.join(first)} and {last}" if first else last
    back = config.shift_window - 1
    before = "the previous token's" if back == 1 else f"those of the {back} previous tokens"
    whose = "query head" if config.shift_heads == "query" else "key/value head"
    return f"{what} are mixed with {before} (arXiv 2411.19574), by learned weights per {whose}"


def heads(config: KeyshiftConfig) -> str:
    """Their numbers and widths."""
    return f"{config.num_attention_heads} query heads of {config.head_dim} channels"


def same_heads(config: KeyshiftConfig) -> KeyshiftConfig:
    """Grouped-query attention with this model's heads: what its cache is compared with."""
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return KeyshiftConfig(
        attention="gqa",
        position="none",
        vocab_size=config.vocab_size,
        **{name: getattr(config, name) for name in sizes},
    )
