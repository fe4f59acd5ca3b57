"""Other libraries' decoders in our terms: their configurations and their names of weights, both ways.

A model of one of these architectures *is* a keyshift model: the same weights under other names. What such a
model can have and ours has not is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from keyshift.configuration import KeyshiftConfig
from keyshift.convert import deepseek
from keyshift.convert.files import Made
from keyshift.errors import UserError

SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps", "initializer_range"),
    *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache"),
)
"""Fields of the same name and meaning on both sides; ``head_dim`` too, which not every side writes down."""

ORIGIN = "converted_from"
"""Where a converted configuration keeps its architecture's name, so that there is a way back."""

BASE_MODEL = "base_model"
"""Where it keeps the source's name on the hub, if it came from there."""

MOVED = re.compile(r"(?<=\.self_attn\.)(k_proj|v_proj|k_norm)(?=\.)")
MOVED_BACK = re.compile(r"(?<=\.self_attn\.)source\.(k_proj|v_proj|k_norm)(?=\.)")


@dataclass(frozen=True)
class Architecture:
    """One of transformers' decoders.

    Attributes:
        beside: our fields beside the sizes, from a configuration of theirs. Raises `UserError` for what ours
            has not.
        settings: their fields beside the sizes, from a configuration of ours that has the right `beside`.
        seen: the configuration of ours that computes the same and may fit. Raises `UserError`.
    """

    name: str
    beside: Callable[[Any], dict[str, Any]]
    settings: Callable[[KeyshiftConfig], dict[str, Any]]
    seen: Callable[[KeyshiftConfig], KeyshiftConfig] = lambda config: config


def _llama(config: Any) -> dict[str, Any]:
    if config.mlp_bias:
        raise UserError("mlp_bias=true: a feed-forward layer with biases has no place in a keyshift model")
    return {"projection_bias": "all" if config.attention_bias else "none"}


def _mistral(config: Any) -> dict[str, Any]:
    window, longest = config.sliding_window, config.max_position_embeddings
    if window is not None and window < longest:
        raise UserError(
            f"sliding_window={window}, below max_position_embeddings={longest}: a keyshift model attends to "
            f"everything; a copy of the checkpoint with max_position_embeddings={window} can be converted"
        )
    return {}


def _qwen2(config: Any) -> dict[str, Any]:
    _check_window(config)
    return {"projection_bias": "qkv"}


def _qwen3(config: Any) -> dict[str, Any]:
    _check_window(config)
    bias = "all" if config.attention_bias else "none"
    return {"projection_bias": bias, "query_norm": True, "key_norm": True}


def _check_window(config: Any) -> None:
    if "sliding_attention" in (config.layer_types or ()):
        raise UserError(
            f"use_sliding_window=true with sliding_window={config.sliding_window}: a keyshift model attends "
            "to everything"
        )


def _biased(config: KeyshiftConfig) -> dict[str, Any]:
    return {"attention_bias": config.projection_bias == "all"}


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", _llama, _biased),
        Architecture("mistral", _mistral, lambda config: {"sliding_window": None}),
        Architecture("qwen2", _qwen2, lambda config: {"use_sliding_window": False}),
        Architecture("qwen3", _qwen3, _biased),
        Architecture(deepseek.NAME, deepseek.beside, deepseek.settings, deepseek.as_latent),
    )
}
"""SmolLM, SmolLM2, TinyLlama, Yi, … are ``llama``."""


def ours(config: PreTrainedConfig) -> KeyshiftConfig:
    """The configuration in our terms; ours stays as it is.

    Raises:
        UserError: another architecture than those of `ARCHITECTURES`, or something in it that ours has not.
    """
    if isinstance(config, KeyshiftConfig):
        return config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise UserError(
            f"model_type={config.model_type!r} cannot be converted; these can: {', '.join(ARCHITECTURES)}"
        )
    sizes = {name: getattr(config, name) for name in SAME}
    if (width := getattr(config, "head_dim", None)) is not None:
        sizes["head_dim"] = width
    return KeyshiftConfig(
        **{**sizes, **architecture.beside(config)},
        rope_parameters=dict(config.rope_parameters),
        **{ORIGIN: architecture.name},
    )


def theirs(config: KeyshiftConfig, name: str | None = None) -> PreTrainedConfig:
    """A configuration of ours as one of transformers' own.

    Args:
        name: of the architecture; None is the one that it came from, else one that it fits.

    Raises:
        UserError: none, or not this one, can say what the configuration says.
    """
    if name is None:
        name = getattr(config, ORIGIN, None) or _fitting(config)
    if name not in ARCHITECTURES:
        raise UserError(f"--to {name} is not known; use one of {', '.join(ARCHITECTURES)}")
    config = ARCHITECTURES[name].seen(config)
    fields = {field: getattr(config, field) for field in (*SAME, "head_dim")}
    rope = {"rope_type": "default", **(config.scaled_rope or {}), "rope_theta": config.rope_theta}
    settings = ARCHITECTURES[name].settings(config)
    made = AutoConfig.for_model(name, **fields, **settings, rope_parameters=rope)
    back = ours(made)
    for field in KeyshiftConfig.__annotations__:
        mine = getattr(config, field)
        if _matters(config, field) and mine != getattr(back, field):
            raise UserError(
                f"{field}={mine!r} has no place in a {name} model; a keyshift model can go back only if "
                "nothing was added to it"
            )
    return made


def _fitting(config: KeyshiftConfig) -> str:
    """The architecture whose keys, norms and biases these are."""
    if config.position == "decoupled_rope":
        return deepseek.NAME
    if config.key_norm:
        return "qwen3"
    return "qwen2" if config.projection_bias == "qkv" else "llama"


def _matters(config: KeyshiftConfig, field: str) -> bool:
    """Whether the model computes something else with another value of this field."""
    if field in ("qk_rope_head_dim", "rope_allocation", "kv_lora_rank", "key_map_init"):
        return False  # of other mechanisms, which themselves are compared
    if field == "attention":  # mha and mqa are gqa with the number of heads that is compared
        return config.attention not in ("mha", "mqa", "gqa")
    return not (field.startswith("shift_") and config.shift == "none")


def name_in_ours(name: str) -> str:
    """What a weight of theirs is called in our model."""
    return MOVED.sub(r"source.\1", name)


def name_in_theirs(name: str) -> str:
    """What a weight of ours is called in their model."""
    return MOVED_BACK.sub(r"\1", name)


def made_of(source: PreTrainedConfig, target: PreTrainedConfig, names: Iterable[str]) -> dict[str, Made]:
    """What every tensor of one configuration's model is made of, from another's that has these ``names``."""
    made: dict[str, Made] = {}
    rename: Callable[[str], str] = str
    if isinstance(source, KeyshiftConfig) and target.model_type == deepseek.NAME:
        made = deepseek.made_theirs(source)
    elif isinstance(target, KeyshiftConfig) and source.model_type == deepseek.NAME:
        made = deepseek.made_ours(target)
    elif isinstance(source, KeyshiftConfig) != isinstance(target, KeyshiftConfig):
        rename = name_in_ours if isinstance(target, KeyshiftConfig) else name_in_theirs
    used = {name for each in made.values() for name in each.sources}
    return {**made, **{rename(name): Made((name,)) for name in names if name not in used}}
