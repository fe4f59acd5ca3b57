"""A trained model with another mechanism: calibrated, measured before and after, written as a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from keyshift.attention.frame import build_frame
from keyshift.attention.module import Attention, attentions
from keyshift.cache import cache_bytes_per_token
from keyshift.configuration import KeyshiftConfig
from keyshift.convert.across import average_turns, choose_pairs, collect, directions, fill_
from keyshift.convert.conversion import Plan
from keyshift.convert.files import appearing, copy_others, tensors_of
from keyshift.errors import UserError
from keyshift.evaluation.text import pieces
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.opened import Opened, load_tokenizer, positions_of, start_token

MEASURED = 0.25
"""Share of the rows of text that nothing is fitted on."""
LENGTH, SHORTEST = 512, 64
"""Tokens of a row, or as many as the model has positions for; shorter, down to 64, where documents are."""
FEWEST_ROWS = 8
BATCH = 8

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Adapted:
    """A model with another mechanism, and how near it is to where it came from.

    Attributes:
        layer_errors: of every layer's attention, given the source's inputs: the norm of the difference of
            outputs over the norm of the source's.
        loss_before, loss_after: nats per token of held-out text.
        bytes_before, bytes_after: of the cache per token, in bfloat16.
        tokens: how many were fitted to.
    """

    model: KeyshiftForCausalLM
    layer_errors: list[float]
    loss_before: float
    loss_after: float
    bytes_before: int
    bytes_after: int
    tokens: int

    def numbers(self) -> dict[str, Any]:
        """All but the model, and perplexities."""
        found = {name: value for name, value in vars(self).items() if name != "model"}
        perplexities = {f"perplexity_{when}": math.exp(found[f"loss_{when}"]) for when in ("before", "after")}
        return {**found, **perplexities}


def target_of(
    config: KeyshiftConfig,
    rope_width: int | None,
    shift: str,
    *,
    attention: str = "gva",
    latent_width: int | None = None,
) -> KeyshiftConfig:
    """The configuration of the GVA or MLA model of the same sizes, its rotary pairs still to be chosen.

    Args:
        rope_width: d_r, up to G d_h, which holds all keys; None is half of a head.
        attention: ``gva`` or ``mla``.
        latent_width: d_c of ``mla``; None is G d_h, which caches as much as ``gva``.

    Raises:
        UserError: a source that is no plain GQA with RoPE, or a width that does not fit.
    """
    if config.attention not in ("mha", "gqa", "mqa") or config.position != "rope" or config.shift != "none":
        raise UserError(
            f"--attention {attention} converts MHA, GQA or MQA with RoPE and without a shift, not attention="
            f"{config.attention!r}, position={config.position!r}, shift={config.shift!r}"
        )
    if config.query_norm or config.key_norm:
        raise UserError(
            f"--attention {attention}: norms of queries and keys stand between the projection and the map; "
            "models that have them (Qwen3) cannot be converted"
        )
    width = config.head_dim // 2 if rope_width is None else rope_width
    content = config.num_key_value_heads * config.head_dim
    if width % 2 or not 0 < width <= content:
        raise UserError(
            f"--rope-width={width} must be even, above 0 and at most {content}, the width of all groups' keys"
        )
    latent = content if latent_width is None else latent_width
    if not 0 < latent <= 2 * content:
        raise UserError(
            f"--latent-width={latent} must be above 0 and at most {2 * content}, all groups' keys and "
            "values together"
        )
    changes = {
        "attention": attention,
        "kv_lora_rank": latent,
        "stream_norm": False,
        "position": "decoupled_rope",
        "rope_allocation": "additive",
        "qk_rope_head_dim": width,
        "rope_pairs": [number % (config.head_dim // 2) for number in range(width // 2)],
        "shift": shift,
        "shift_init": "identity",
        "shift_heads": None,
        "key_map_init": None,
    }
    return KeyshiftConfig(**{**config.to_dict(), **changes})


def needs(planned: Plan, target: KeyshiftConfig) -> dict[str, Any]:
    """Parameters of the result; bytes of disk for it, and of memory for `adapt`: both models in float32, the
    second moments of all layers in float64, logits of a row of text and what their loss takes."""
    with torch.device("meta"):
        parameters = KeyshiftForCausalLM(target).num_parameters()
    config = planned.target
    inputs, width = config.hidden_size + 1, config.head_dim
    moments = (
        inputs * (inputs + 2 * config.num_key_value_heads * width) + config.num_attention_heads * width**2
    )
    length = min(LENGTH, config.max_position_embeddings)
    return {
        "from": planned.source.model_type,
        "to": target.model_type,
        "parameters": parameters,
        "disk_bytes": parameters * planned.dtype.itemsize,
        "memory_bytes": 4 * (planned.parameters + parameters + 3 * length * config.vocab_size)
        + 8 * config.num_hidden_layers * moments,
    }


def adapt(
    planned: Plan,
    text: Path,
    *,
    tokens: int = 65_536,
    attention: str = "gva",
    rope_width: int | None = None,
    latent_width: int | None = None,
    shift: str = "none",
    progress: Progress = lambda what, done, total: None,
) -> Adapted:
    """The model of ``planned``, a plain conversion, as GVA or MLA; calibrated and measured on ``text``.

    Args:
        attention, rope_width, latent_width, shift: see `target_of`.
        tokens: of text, a quarter of which is measured on and not fitted to.

    Raises:
        UserError: what `target_of` refuses, no tokenizer, too little text.
    """
    assert isinstance(planned.target, KeyshiftConfig)
    target = target_of(planned.target, rope_width, shift, attention=attention, latent_width=latent_width)
    source = loaded(planned)
    fitted, held_out = _rows(planned, source, text, tokens)
    moments = collect(source, fitted, progress)
    turns = average_turns(source.config, fitted[0].shape[1])
    found = [directions(each, each.maps()) for each in moments]
    target.rope_pairs = choose_pairs(found, turns, target.qk_rope_head_dim // 2)
    model = KeyshiftForCausalLM(target).eval()
    others = {name: weight for name, weight in source.state_dict().items() if ".self_attn." not in name}
    model.load_state_dict(others, strict=False)
    for new, old in zip(attentions(model), attentions(source), strict=True):
        fill_(new, old, moments[new.layer_idx], turns)
        progress("layers", new.layer_idx + 1, len(moments))
    dtype = torch.bfloat16
    return Adapted(
        model,
        layer_errors(source, model, held_out[0]),
        _loss(source, held_out, progress, "source on held-out text"),
        _loss(model, held_out, progress, "result on held-out text"),
        cache_bytes_per_token(source.config, dtype),
        cache_bytes_per_token(target, dtype),
        sum(rows.numel() for rows in fitted),
    )


def write(adapted: Adapted, planned: Plan, destination: Path) -> None:
    """Write the checkpoint in the source's dtype; it appears in ``destination`` in one piece.

    Raises:
        RunError: it could not be written; nothing is left of it.
    """
    logging.disable_progress_bar()  # transformers draws one for every checkpoint
    with appearing(destination) as unfinished:
        copy_others(planned.weights.folder, unfinished)
        adapted.model.to(planned.dtype).save_pretrained(unfinished)


def loaded(planned: Plan) -> KeyshiftForCausalLM:
    """The model of a plan to a keyshift model, float32, in memory."""
    assert isinstance(planned.target, KeyshiftConfig)
    model = KeyshiftForCausalLM(planned.target).eval()
    weights = {**tensors_of(planned.weights, planned.made), **planned.added}
    model.load_state_dict(weights, strict=not planned.target.tie_word_embeddings)
    return model


def _rows(
    planned: Plan, source: KeyshiftForCausalLM, text: Path, tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Batches of rows of text to fit on, and others to measure on."""
    name = str(planned.weights.folder)
    tokenizer = load_tokenizer(name)
    opened = Opened(
        name, source, tokenizer, start_token(tokenizer, source.config), positions_of(source.config)
    )
    length = min(LENGTH, opened.positions)
    rows = pieces(opened, text, length, max(FEWEST_ROWS, tokens // length))
    while 2 * rows.numel() < tokens and length >= 2 * SHORTEST:
        length //= 2
        shorter = pieces(opened, text, length, max(FEWEST_ROWS, tokens // length))
        if len(rows) < FEWEST_ROWS or shorter.numel() > 1.5 * rows.numel():
            rows = shorter
    if len(rows) < FEWEST_ROWS:
        raise UserError(
            f"--text={text} has {len(rows)} rows of {length} tokens within documents and calibration needs "
            f"{FEWEST_ROWS} at least; pass more or longer text"
        )
    held_out = math.ceil(MEASURED * len(rows))
    return list(rows[:-held_out].split(BATCH)), list(rows[-held_out:].split(BATCH))


@torch.inference_mode()
def layer_errors(source: KeyshiftForCausalLM, model: KeyshiftForCausalLM, ids: Tensor) -> list[float]:
    """See `Adapted`; over the tokens ``ids`` [B, T]."""
    found: list[float] = []
    others = attentions(model)

    def compare(layer: Attention, args: tuple[Any, ...], result: tuple[Tensor, Any]) -> None:
        other = others[layer.layer_idx]
        frame = build_frame(
            other.config, args[0], first_slot=0, attention_mask=None, position_ids=None, document_ids=None
        )
        difference = other(args[0], frame)[0] - result[0]
        found.append(float(difference.norm() / result[0].norm()))

    hooks = [layer.register_forward_hook(compare) for layer in attentions(source)]
    try:
        source.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.inference_mode()
def _loss(model: KeyshiftForCausalLM, batches: list[Tensor], progress: Progress, what: str) -> float:
    """Nats per token."""
    losses: list[float] = []
    for done, ids in enumerate(
        batches, 1
    ):  # row by row: logits of a whole batch can be larger than the model
        losses += [float(model(row, labels=row, use_cache=False).loss) for row in ids.split(1)]
        progress(what, done, len(batches))
    return fmean(losses)
