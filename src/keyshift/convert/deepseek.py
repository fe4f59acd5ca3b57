"""Models that cache one stream as DeepSeek checkpoints without experts, and such checkpoints as MLA.

Whatever computes keys from a stream is MLA whose maps from the latent are sparse: the latent is the groups'
values side by side, of which a head's key and value read those of its group. So GVA can be served by whatever
serves DeepSeek. DeepSeek has a norm over its latent and turns neighbouring channels, we turn halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keyshift.attention.rope_scaling import scaled
from keyshift.configuration import RECONSTRUCTED, KeyshiftConfig
from keyshift.convert.files import Made
from keyshift.errors import UserError

NAME = "deepseek_v2"
LATENT_EPS = 1e-6
"""Of the norm over the latent in transformers, whatever the configuration says; engines take
``rms_norm_eps``."""


def beside(config: Any) -> dict[str, Any]:
    """Our fields beside the sizes, from a DeepSeek configuration.

    Raises:
        UserError: experts, a compressed query, biases, or widths that ours has not.
    """
    nope, rope, width = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if config.first_k_dense_replace < config.num_hidden_layers:
        raise UserError(
            f"first_k_dense_replace={config.first_k_dense_replace} of {config.num_hidden_layers} layers: "
            "a keyshift model has no experts"
        )
    for field in ("q_lora_rank", "attention_bias", "mlp_bias"):
        if value := getattr(config, field):
            raise UserError(f"{field}={value!r} has no place in a keyshift model")
    if nope not in (width, width - rope):
        raise UserError(
            f"qk_nope_head_dim={nope} has no place in a keyshift model: it has to be v_head_dim={width}, or "
            f"that less qk_rope_head_dim={rope}"
        )
    if config.rope_parameters.get("mscale_all_dim"):
        raise UserError(
            f"mscale_all_dim={config.rope_parameters['mscale_all_dim']} also scales scores without RoPE, "
            "which has no place in a keyshift model"
        )
    _check_eps(config.rms_norm_eps)
    return {
        "attention": "mla",
        "position": "decoupled_rope",
        "rope_allocation": "additive" if nope == width else "carved",
        "head_dim": width,
        "qk_rope_head_dim": rope,
        "kv_lora_rank": config.kv_lora_rank,
    }


def as_latent(config: KeyshiftConfig) -> KeyshiftConfig:
    """The configuration of the MLA model with ordinary RoPE that computes the same.

    Raises:
        UserError: no such model, or one without what DeepSeek always has.
    """
    if config.attention not in RECONSTRUCTED or config.position != "decoupled_rope":
        raise UserError(
            f"--to {NAME} takes attention 'mla', 'gva' or 'shared_kv' with position='decoupled_rope', not "
            f"attention={config.attention!r}, position={config.position!r}; see --attention"
        )
    if not config.stream_norm:
        raise UserError(
            f"stream_norm=False has no place in a {NAME} model, which normalises its latent and no weights "
            "can undo that; train one with stream_norm=True"
        )
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads="
            f"{config.num_attention_heads}, which a {NAME} model insists on"
        )
    _check_eps(config.rms_norm_eps)
    changes = {"attention": "mla", "kv_lora_rank": stream_width(config), "scaled_rope": _scaling(config)}
    if config.rope_pairs is not None:
        changes |= {"rope_pairs": None, "rope_theta": _theta_of_pairs(config)}
    return KeyshiftConfig(**{**config.to_dict(), **changes})


def settings(config: KeyshiftConfig) -> dict[str, Any]:
    """Fields of a DeepSeek configuration beside the sizes, from what `as_latent` gives."""
    return {
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.head_dim,
        "first_k_dense_replace": config.num_hidden_layers,
    }


def stream_width(config: KeyshiftConfig) -> int:
    """Channels of what a token caches for its content."""
    return config.kv_lora_rank if config.attention == "mla" else config.num_key_value_heads * config.head_dim


def _check_eps(eps: float) -> None:
    if eps != LATENT_EPS:
        raise UserError(
            f"rms_norm_eps={eps}: the norm over DeepSeek's latent has {LATENT_EPS} in transformers and "
            f"rms_norm_eps elsewhere; only with rms_norm_eps={LATENT_EPS} they are the same"
        )


def _scaling(config: KeyshiftConfig) -> dict[str, Any] | None:
    """YaRN such that it says in transformers' way (``attention_factor``) and in DeepSeek's (``mscale``) what
    its queries and keys are multiplied by, and nothing else is scaled."""
    scaling = config.scaled_rope
    if scaling is None:
        return None
    if scaling["rope_type"] != "yarn":
        raise UserError(
            f"scaled_rope of kind {scaling['rope_type']!r} has no place in a {NAME} model: engines scale its "
            "RoPE as 'yarn' only"
        )
    own = ("attention_factor", "mscale", "mscale_all_dim")
    if all(scaling.get(name) is None for name in own):
        return dict(scaling)
    size, factor = scaled(torch.ones(1), config.rope_theta, scaling)[1], scaling["factor"]
    if size <= 1 or factor <= 1:
        raise UserError(
            f"scaled_rope with factor={factor} multiplies queries and keys by {size:.4g}, which has no place "
            f"in a {NAME} model: engines can be told of more than 1 only, and with a factor above 1"
        )
    kept = {name: value for name, value in scaling.items() if name not in own}
    return {**kept, "attention_factor": size, "mscale": (size - 1) / (0.1 * math.log(factor))}


def _theta_of_pairs(config: KeyshiftConfig) -> float:
    """The base of the ordinary RoPE as wide as the rotary key that turns as the chosen pairs do: there is one
    if they are 0, n, 2n, … for some n."""
    pairs, width = sorted(config.rope_pairs or ()), config.qk_rope_head_dim
    step = pairs[1] - pairs[0] if len(pairs) > 1 else 1
    theta = config.rope_theta ** (step * width / config.head_dim)

    def speeds(of_width: int, base: float) -> Tensor:
        ordinary = base ** (-torch.arange(0, of_width, 2, dtype=torch.float64) / of_width)
        return ordinary if config.scaled_rope is None else scaled(ordinary, base, config.scaled_rope)[0]

    if step == 0 or not torch.allclose(
        speeds(config.head_dim, config.rope_theta)[pairs], speeds(width, theta), rtol=1e-9, atol=0
    ):
        raise UserError(
            f"rope_pairs={config.rope_pairs} has no place in a {NAME} model: no ordinary RoPE of "
            f"{width} channels turns as these pairs do; train one without rope_pairs"
        )
    return theta


def _order(config: KeyshiftConfig) -> Tensor:
    """Where each rotary channel of DeepSeek's comes from in ours: neighbours instead of halves, the fastest
    pair first."""
    half = config.qk_rope_head_dim // 2
    pairs = torch.tensor(range(half) if config.rope_pairs is None else config.rope_pairs)
    first = pairs.argsort(stable=True)
    return torch.stack((first, first + half), 1).flatten()


def made_theirs(config: KeyshiftConfig) -> dict[str, Made]:
    """What every weight of attention in a DeepSeek model is made of, from a model of ours."""
    order, heads = _order(config), config.num_attention_heads
    down = "down_proj" if config.attention == "mla" else "v_proj"
    found: dict[str, Made] = {}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}.self_attn."
        norm = at + "source.norm.weight"
        found |= {
            at + "q_proj.weight": Made(
                (at + "q_proj.weight",), partial(_reordered, heads=heads, order=order)
            ),
            at + "kv_a_proj_with_mqa.weight": Made(
                (f"{at}source.{down}.weight", at + "rope_key.weight"), partial(_joined, order=order)
            ),
            at + "kv_a_layernorm.weight": Made((norm,)),
        }
        maps, make = _maps_of(config)
        sources = tuple(f"{at}source.{name}" for name in maps) or (norm,)
        found[at + "kv_b_proj.weight"] = Made(sources, make)
    return found


def _maps_of(config: KeyshiftConfig) -> tuple[tuple[str, ...], Callable[..., Tensor]]:
    """The maps from the stream to keys and values, by name, and what makes DeepSeek's one map of them."""
    heads = config.num_attention_heads
    if config.attention == "mla":
        return ("key_up.weight", "value_up.weight"), partial(_interleaved, heads=heads)
    sparse = partial(_sparse, heads=heads, groups=config.num_key_value_heads, width=config.head_dim)
    return (("key_map",), sparse) if config.attention == "gva" else ((), lambda norm: sparse(None, like=norm))


def _reordered(queries: Tensor, *, heads: int, order: Tensor) -> Tensor:
    """Queries [H d_qk, E] whose last channels of every head come from others of them."""
    content, rotary = queries.unflatten(0, (heads, -1)).tensor_split([-len(order)], 1)
    return torch.cat((content, rotary[:, order.to(queries.device)]), 1).flatten(0, 1)


def _joined(down: Tensor, rope_key: Tensor, *, order: Tensor) -> Tensor:
    return torch.cat((down, rope_key[order.to(down.device)]))


def _interleaved(key_up: Tensor, value_up: Tensor, *, heads: int) -> Tensor:
    """Keys and values of one head after those of another."""
    return torch.cat([up.unflatten(0, (heads, -1)) for up in (key_up, value_up)], 1).flatten(0, 1)


def _sparse(
    key_map: Tensor | None, *, heads: int, groups: int, width: int, like: Tensor | None = None
) -> Tensor:
    """GVA's maps [H, d_h, d_n] (None: identities) as maps from all groups' values, [H (d_n + d_h), G d_h]."""
    exact = key_map if key_map is not None else like
    assert exact is not None
    identity = torch.eye(width, dtype=exact.dtype, device=exact.device).expand(heads, -1, -1)
    own = torch.cat((identity if key_map is None else key_map.mT, identity), 1)  # [H, d_n + d_h, d_h]
    maps = own.new_zeros(*own.shape[:2], groups, width)
    for group, members in enumerate(torch.arange(heads).chunk(groups)):
        maps[members, :, group] = own[members]
    return maps.flatten(2).flatten(0, 1)


def made_ours(config: KeyshiftConfig) -> dict[str, Made]:
    """What every weight of attention in an MLA model of ours is made of, from a DeepSeek model."""
    heads, rank, keys = config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim
    order = _order(config).argsort()
    found: dict[str, Made] = {}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}.self_attn."
        joined, maps = (at + "kv_a_proj_with_mqa.weight",), (at + "kv_b_proj.weight",)
        found |= {
            at + "q_proj.weight": Made(
                (at + "q_proj.weight",), partial(_reordered, heads=heads, order=order)
            ),
            at + "rope_key.weight": Made(joined, lambda both: both[rank:][order.to(both.device)]),
            at + "source.down_proj.weight": Made(joined, lambda both: both[:rank]),
            at + "source.norm.weight": Made((at + "kv_a_layernorm.weight",)),
            at + "source.key_up.weight": Made(
                maps, lambda both: both.unflatten(0, (heads, -1))[:, :keys].flatten(0, 1)
            ),
            at + "source.value_up.weight": Made(
                maps, lambda both: both.unflatten(0, (heads, -1))[:, keys:].flatten(0, 1)
            ),
        }
    return found
