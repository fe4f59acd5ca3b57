"""Where the tokens of one forward call sit: slots in the cache, positions, documents.

A document (or a left-padded sequence) is contiguous, so one number per token says everything about
boundaries: the slot at which its document starts. A query sees the slots from there to its own, and the
    shift never looks
further back. Cached tokens need no such record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from keyshift.attention.rotary import Rotation, alibi_slopes, rotation
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError


@dataclass(frozen=True)
class Frame:
    """The new tokens of one call, B sequences of T tokens.

    Attributes:
        first_slot: slot of the first new token = tokens cached before; None where every sequence has its own
            (a serving engine's batch, whose cache knows them).
        positions_BT: positions in tokens, for RoPE and learned embeddings.
        starts_BT: the slot at which each token's document starts; None if every one starts at slot 0.
        rotations: RoPE's angles at the positions, then at each one step further back, as many as are needed.
        mask: what transformers' attention functions take, for a call without cached tokens; with ALiBi a
            float bias [B or 1, H, T, T].
        slopes_H: ALiBi's slopes, or None.
    """

    first_slot: int | None
    positions_BT: Tensor
    starts_BT: Tensor | None
    rotations: tuple[Rotation, ...] = ()
    mask: object = None
    slopes_H: Tensor | None = None


def build_frame(
    config: KeyshiftConfig,
    x_BTE: Tensor,
    *,
    first_slot: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
) -> Frame:
    """The frame of one call on ``x_BTE``, from what the caller gave: see `locate`.

    Raises:
        UserError: what `locate` refuses; vLLM's wrapper of transformers' models, whose cache would hold keys
            and values that were expanded, and shifted within one chunk only.
    """
    if config._attn_implementation == "vllm":
        raise UserError(
            "attn_implementation='vllm' (vLLM's --model-impl transformers) is not supported: it caches "
            "expanded keys and shifts them within a chunk only; leave --model-impl out, keyshift's plugin "
            "serves the model"
        )
    positions, starts = locate(
        x_BTE.shape[0],
        x_BTE.shape[1],
        first_slot,
        device=x_BTE.device,
        attention_mask=attention_mask,
        position_ids=position_ids,
        document_ids=document_ids,
    )
    rotations = _rotations(config, positions, x_BTE.dtype, cached=first_slot > 0)
    slopes = alibi_slopes(config.num_attention_heads).to(x_BTE.device) if config.position == "alibi" else None
    mask = None if first_slot else _mask(config, x_BTE, starts, slopes)
    return Frame(first_slot, positions, starts, rotations, mask, slopes)


def paged_frame(
    config: KeyshiftConfig, x_BTE: Tensor, positions_BT: Tensor, slopes_H: Tensor | None
) -> Frame:
    """The frame of tokens of several sequences in a row, all of them over a cache that knows whose they are.

    Args:
        slopes_H: ALiBi's, of the heads that this process has.
    """
    return Frame(
        None, positions_BT, None, _rotations(config, positions_BT, x_BTE.dtype, cached=True), None, slopes_H
    )


def _rotations(
    config: KeyshiftConfig, positions_BT: Tensor, dtype: torch.dtype, *, cached: bool
) -> tuple[Rotation, ...]:
    """See `Frame.rotations`; shifted keys that carry a rotation are met by queries turned further back."""
    turned = cached and config.position == "rope" and config.shifts("k")
    steps = 0 if not config.rotary_width else config.shift_window if turned else 1
    return tuple(
        rotation(
            positions_BT - back,
            config.rotary_width if config.rope_pairs is None else config.head_dim,
            config.rope_theta,
            dtype,
            config.scaled_rope,
            config.rope_pairs,
        )
        for back in range(steps)
    )


def _mask(config: KeyshiftConfig, x_BTE: Tensor, starts_BT: Tensor | None, slopes_H: Tensor | None) -> object:
    """The mask of a call without cached tokens, in the form that the attention function wants."""
    implementation = config._attn_implementation
    if slopes_H is not None:
        if implementation not in ("eager", "sdpa"):
            raise UserError(
                f"position='alibi' with attn_implementation={implementation!r} is not supported; "
                "use 'sdpa' or 'eager'"
            )
        return _alibi_mask(x_BTE, starts_BT, slopes_H)
    if starts_BT is None:
        return create_causal_mask(config, x_BTE, None, None)
    if implementation not in ("eager", "sdpa", "flex_attention"):
        raise UserError(
            f"padding or packed documents with attn_implementation={implementation!r} are not supported; "
            "use 'sdpa', 'eager' or 'flex_attention'"
        )
    return create_causal_mask(
        config, x_BTE, None, None, and_mask_function=lambda b, h, q, k: k >= starts_BT[b, q]
    )


def _alibi_mask(x_BTE: Tensor, starts_BT: Tensor | None, slopes_H: Tensor) -> Tensor:
    """ALiBi's bias where a token may look, the lowest number elsewhere: [B or 1, H, T, T]."""
    slots = torch.arange(x_BTE.shape[1], device=x_BTE.device)
    distance = slots[:, None] - slots
    hidden = distance[None] < 0
    if starts_BT is not None:
        hidden = hidden | (slots < starts_BT[:, :, None])
    bias = (-slopes_H[:, None, None] * distance).to(x_BTE.dtype)
    return bias.masked_fill(hidden[:, None], torch.finfo(x_BTE.dtype).min)


def locate(
    batch: int,
    tokens: int,
    first_slot: int,
    *,
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Positions [B, T] and document starts [B, T] (None if all 0) from whatever the caller gave.

    Args:
        attention_mask: [B, first_slot + T], 0 for padding on either side, 1 elsewhere.
        position_ids: [B or 1, T]; a step other than +1 starts a document, and the first token's position
            tells how far back its document began.
        document_ids: [B, first_slot + T] (the cached tokens' too); a change starts a document.

    Raises:
        UserError: a shape that does not fit, or an attention mask with padding between real tokens.
    """
    slots = torch.arange(first_slot, first_slot + tokens, device=device)
    if attention_mask is None and position_ids is None and document_ids is None:
        return slots.expand(batch, -1), None
    starts = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    if attention_mask is not None:
        starts = torch.maximum(starts, _first_real_slot(attention_mask, batch, first_slot + tokens)[:, None])
    if document_ids is not None:
        _check_shape("document_ids", document_ids, (batch, first_slot + tokens))
        starts = torch.maximum(starts, _run_starts(document_ids)[:, first_slot:])
    if position_ids is not None:
        starts = torch.maximum(starts, _starts_of_positions(position_ids, batch, slots))
    starts = torch.minimum(starts, slots)
    positions = slots - starts if position_ids is None else position_ids.expand(batch, -1)
    return positions, starts if bool((starts > 0).any()) else None


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{name} has shape {tuple(tensor.shape)}, expected {shape}: the cached tokens and the new ones"
        )


def _first_real_slot(attention_mask: Tensor, batch: int, total: int) -> Tensor:
    """The first 1 of each row, [B]; padding on the right is harmless under a causal mask."""
    _check_shape("attention_mask", attention_mask, (batch, total))
    real = attention_mask.bool()
    # A row's mask may rise from 0 to 1 once: padding, tokens, padding.
    if bool(((real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1).any()):
        raise UserError(
            "attention_mask has zeros between ones; pad on the left or on the right only (for packed "
            "documents pass document_ids or position_ids that restart)"
        )
    return real.long().argmax(-1)


def _run_starts(ids_BT: Tensor) -> Tensor:
    """For every token, the index at which its run of equal ids began."""
    index = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    begins = torch.zeros_like(index)
    begins[:, 1:] = torch.where(ids_BT[:, 1:] != ids_BT[:, :-1], index[:, 1:], 0)
    return begins.cummax(dim=1).values


def _starts_of_positions(position_ids: Tensor, batch: int, slots: Tensor) -> Tensor:
    if (
        position_ids.dim() != 2
        or position_ids.shape[1] != len(slots)
        or position_ids.shape[0] not in (1, batch)
    ):
        raise UserError(
            f"position_ids has shape {tuple(position_ids.shape)}, expected {(batch, len(slots))}: "
            "the new tokens"
        )
    begins = torch.where(position_ids[:, 1:] != position_ids[:, :-1] + 1, slots[1:], 0)
    first = (slots[0] - position_ids[:, :1]).clamp(min=0)
    return torch.cat((first, begins), dim=1).cummax(dim=1).values.expand(batch, -1)
