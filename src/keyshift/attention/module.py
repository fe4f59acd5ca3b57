"""Attention, written once for every mechanism, position and shift.

Shapes: B batch, T new tokens, L cached tokens in all, E hidden size, H query heads, G stream heads, D width
    of a
head, S width of a stream, W shift window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from keyshift.attention import SOURCES
from keyshift.attention.frame import Frame
from keyshift.attention.rotary import rotate, rotation
from keyshift.attention.shift import Shift
from keyshift.cache import KeyshiftCache, QuantisedLayer, Streams
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError
from keyshift.ops.stream_attention.quantised import dequantise


class Attention(nn.Module):
    """Causal self-attention.

    Without cached tokens the keys and values are shifted as sequences and go through transformers' attention
    interface (SDPA by default). With cached tokens the raw streams are read by `stream_attention`: the map to
    keys is absorbed into the query and the shift acts on scores and weights. One case cannot absorb:
    whole-head RoPE on reconstructed keys, whose rotation sits between the query and the map; it rebuilds
    them at every step.
    """

    is_causal = True

    def __init__(self, config: KeyshiftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.heads = config.num_attention_heads
        self.content_width = config.qk_nope_head_dim
        self.rope_width = config.decoupled_width
        self.rotates_heads = config.position == "rope"
        self.scaling = config.qk_head_dim**-0.5
        self.source = SOURCES[config.attention](config)
        self.rebuilds = self.rotates_heads and not self.source.projects_keys
        bias = config.projection_bias
        self.q_proj = nn.Linear(config.hidden_size, self.heads * config.qk_head_dim, bias=bias != "none")
        self.q_norm = nn.RMSNorm(config.qk_head_dim, eps=config.rms_norm_eps) if config.query_norm else None
        self.rope_key = (
            nn.Linear(config.hidden_size, self.rope_width, bias=bias != "none") if self.rope_width else None
        )
        self.o_proj = nn.Linear(self.heads * config.head_dim, config.hidden_size, bias=bias == "all")
        shift_heads = self.heads if config.shift_heads == "query" else self.source.stream_heads
        self.query_shift = self._shift("query", self.heads)
        self.key_shift = self._shift("key", shift_heads)
        self.value_shift = self._shift("value", shift_heads)
        key_heads = max(self.source.key_heads, shift_heads if self.key_shift else 1)
        value_heads = max(self.source.value_heads, shift_heads if self.value_shift else 1)
        self.dense_heads = max(key_heads, value_heads)
        self.num_key_value_groups = self.heads // self.dense_heads

    def _shift(self, role: str, heads: int) -> Shift | None:
        config = self.config
        if not config.shifts(role[0]):
            return None
        return Shift(
            heads, config.shift_window, config.shift_weights, config.shift_init, role, self.layer_idx
        )

    def forward(
        self, x_BTE: Tensor, frame: Frame, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x_BTE: the normalised hidden states of the new tokens.
            frame: where they sit.
            cache: written to, and read where it already holds tokens; None attends among the new tokens only.
            kwargs: passed on to the attention function.

        Returns:
            The output [B, T, E], and the weights [B, H, T, T] where the attention function returns them.
        """
        queries = self._queries(x_BTE, frame, cache)
        key_stream, value_stream = self.source.project(x_BTE)
        rope_key = self._rope_key(x_BTE, frame)
        streams = None
        if cache is not None:
            streams = self._append(cache, key_stream, value_stream, rope_key, frame)
        if streams is None or frame.first_slot == 0:
            heads, weights = self._dense(queries, key_stream, value_stream, rope_key, frame, **kwargs)
        else:
            heads, weights = self._cached(queries, streams, frame), None
        return self.o_proj(heads.flatten(2)), weights

    @torch.no_grad()
    def match_keys_(self, x_BTE: Tensor) -> None:
        """Rescale the maps to keys so that on this input keys have the queries' RMS, content and rotary
        each."""
        content, rotary = self._raw_queries(x_BTE).split((self.content_width, self.rope_width), dim=-1)
        keys, _ = self.source.expand(*self.source.project(x_BTE))
        self.source.scale_keys_(rms(content) / rms(keys))
        if self.rope_key is not None:
            factor = rms(rotary) / rms(self.rope_key(x_BTE))
            for parameter in self.rope_key.parameters():
                parameter.mul_(factor)

    def _raw_queries(self, x_BTE: Tensor) -> Tensor:
        """Queries [B, T, H, d_qk], normalised, neither shifted nor rotated."""
        queries = self.q_proj(x_BTE).unflatten(-1, (self.heads, -1))
        return queries if self.q_norm is None else self.q_norm(queries)

    def _queries(self, x_BTE: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Queries [B, T, H, d_qk], normalised and shifted, not rotated."""
        queries = self._raw_queries(x_BTE)
        if self.query_shift is None:
            return queries
        if cache is None:
            return self.query_shift(queries, frame.starts_BT)
        return self._shift_with_state(queries, self.query_shift, frame, cache)

    def _shift_with_state(self, queries: Tensor, shift: Shift, frame: Frame, cache: Cache) -> Tensor:
        """Shift queries with the raw ones that the cache kept from the last call, and keep the newest
        there."""
        if not isinstance(cache, KeyshiftCache):
            raise UserError(
                f"shift='qkv' keeps raw queries, for which {type(cache).__name__} has no place; "
                "use keyshift.KeyshiftCache (the default of generate())"
            )
        layer = cache.layers[self.layer_idx]
        kept = shift.window - 1
        state = layer.query_state
        if state is None:
            state = queries.new_zeros(queries.shape[0], kept, *queries.shape[2:])
        extended = torch.cat((state, queries), dim=1)
        layer.query_state = extended[:, -kept:].clone()
        starts = None if frame.starts_BT is None else pad(frame.starts_BT, (kept, 0))
        assert frame.first_slot is not None
        return shift(extended, starts, frame.first_slot - kept)[:, kept:]

    def _rope_key(self, x_BTE: Tensor, frame: Frame) -> Tensor | None:
        """The one rotated key of decoupled RoPE, [B, T, d_r]."""
        if self.rope_key is None:
            return None
        return rotate(self.rope_key(x_BTE)[:, :, None], frame.rotations[0])[:, :, 0]

    def _append(
        self,
        cache: Cache,
        key_stream: Tensor | None,
        value_stream: Tensor,
        rope_key: Tensor | None,
        frame: Frame,
    ) -> Streams:
        """Write the new tokens' raw streams; all that is cached."""
        side = value_stream[..., :0] if rope_key is None else rope_key
        if key_stream is None:
            first, second = value_stream, side
        else:
            if self.rotates_heads:
                keys, _ = self.source.expand(key_stream, value_stream)
                key_stream = rotate(keys, frame.rotations[0]).flatten(2)
            first, second = torch.cat((key_stream, side), dim=-1), value_stream
        first, second = cache.update(first[:, None], second[:, None], self.layer_idx)
        if frame.first_slot is None:
            return cache.paged(self._split(first, second))
        layer = cache.layers[self.layer_idx]
        if isinstance(layer, QuantisedLayer):
            return layer.streams()
        total = frame.first_slot + value_stream.shape[1]
        return self._split(first[:, 0, :total], second[:, 0, :total])

    def _split(self, first_BLS: Tensor, second_BLS: Tensor) -> Streams:
        groups = (self.source.stream_heads, -1)
        if not self.source.projects_keys:
            return Streams(None, first_BLS.unflatten(-1, groups), second_BLS if self.rope_width else None)
        keys, rope_keys = first_BLS.split((first_BLS.shape[-1] - self.rope_width, self.rope_width), dim=-1)
        keys, values = keys.unflatten(-1, groups), second_BLS.unflatten(-1, groups)
        return Streams(keys, values, rope_keys if self.rope_width else None)

    def _dense(
        self,
        queries: Tensor,
        key_stream: Tensor | None,
        value_stream: Tensor,
        rope_key: Tensor | None,
        frame: Frame,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention among the new tokens, [B, T, H, d_h]: shift, then rotate, then transformers'
        interface."""
        keys, values = self.source.expand(key_stream, value_stream)
        if self.key_shift is not None:
            keys = self.key_shift(keys, frame.starts_BT)
        if self.value_shift is not None:
            values = self.value_shift(values, frame.starts_BT)
        if self.rotates_heads:
            queries, keys = rotate(queries, frame.rotations[0]), rotate(keys, frame.rotations[0])
        if rope_key is not None:
            content, rotary = queries.split((self.content_width, self.rope_width), dim=-1)
            queries = torch.cat((content, rotate(rotary, frame.rotations[0])), dim=-1)
            keys = torch.cat((keys, rope_key[:, :, None].expand(*keys.shape[:3], -1)), dim=-1)
        width = values.shape[-1]
        # PyTorch's fused kernels want one width for keys and values; zeros cost less than the unfused
        # fallback.
        values = pad(values, (0, keys.shape[-1] - width))
        attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        keys, values = (
            repeat_kv(heads.transpose(1, 2), self.dense_heads // heads.shape[2]) for heads in (keys, values)
        )
        heads, weights = attend(
            self, queries.transpose(1, 2), keys, values, frame.mask, scaling=self.scaling, **kwargs
        )
        return heads[..., :width], weights

    def _cached(self, queries: Tensor, streams: Streams, frame: Frame) -> Tensor:
        """Attention of the new tokens over the cached streams, [B, T, H, d_h]."""
        content, rotary = queries.split((self.content_width, self.rope_width), dim=-1)
        rope_queries = key_weights = None
        if self.rebuilds:
            streams = self._rebuilt(streams, frame, queries.dtype)
        if self.rotates_heads:
            new_queries = self._turned(content, frame)
        else:
            new_queries = self.source.absorb(content).transpose(1, 2)
            key_weights = self._per_query_head(self.key_shift)
            if self.rope_width:
                rope_queries = rotate(rotary, frame.rotations[0]).transpose(1, 2)
        heads = streams.attend(
            new_queries,
            scale=self.scaling,
            starts_BQ=frame.starts_BT,
            rope_queries_BHQR=rope_queries,
            key_weights_HW=key_weights,
            value_weights_HW=self._per_query_head(self.value_shift),
            slopes_H=frame.slopes_H,
        ).transpose(1, 2)
        return heads if self.rebuilds else self.source.output(heads)

    def _per_query_head(self, shift: Shift | None) -> Tensor | None:
        """A shift's weights, one row per query head, [H, W]."""
        if shift is None:
            return None
        weights = shift.weights()
        return weights.repeat_interleave(self.heads // weights.shape[0], dim=0)

    def _turned(self, queries: Tensor, frame: Frame) -> Tensor:
        """Rotated queries [B, H, T, D]; with a key shift one per window step m, turned m places back and
        weighted with α_m, [B, H, W, T, D]: R_j k_{j-m} meets R_i q as R_{j-m} k_{j-m}, which is cached,
        meets R_{i-m} q."""
        weights = self._per_query_head(self.key_shift)
        if weights is None:
            return rotate(queries, frame.rotations[0]).transpose(1, 2)
        steps = [
            rotate(queries, by) * weights[:, back, None].to(queries.dtype)
            for back, by in enumerate(frame.rotations)
        ]
        return torch.stack(steps, dim=3).permute(0, 2, 3, 1, 4)

    def _rebuilt(self, streams: Streams, frame: Frame, dtype: torch.dtype) -> Streams:
        """Rotated keys and values of every cached token and head, computed from the stream anew."""
        stored = streams.values_BLGS
        if streams.value_scales_BLGN is not None:
            stored = dequantise(stored, streams.value_scales_BLGN, dtype)
        keys, values = self.source.expand(None, stored.flatten(2))
        assert frame.first_slot is not None
        back = torch.arange(-frame.first_slot, 0, device=stored.device)
        positions = torch.cat((frame.positions_BT[:, :1] + back, frame.positions_BT), dim=1)
        theta, scaling = self.config.rope_theta, self.config.scaled_rope
        keys = rotate(keys, rotation(positions, keys.shape[-1], theta, keys.dtype, scaling))
        return Streams(keys, values.repeat_interleave(keys.shape[2] // values.shape[2], dim=2), None)


def attentions(model: nn.Module) -> list[Attention]:
    """The attention of every layer, in order."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def rms(x: Tensor) -> Tensor:
    """Root of the mean square, float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean().sqrt()


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention that also returns its weights (``attn_implementation="eager"``), like that of transformers.

    Args:
        query: [B, H, T, D]; key, value: [B, H / groups, T, D].
        attention_mask: additive, [B or 1, H or 1, T, T], or None.

    Returns:
        The output [B, T, H, D] and the weights [B, H, T, T].
    """
    key, value = (repeat_kv(heads, module.num_key_value_groups) for heads in (key, value))
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
