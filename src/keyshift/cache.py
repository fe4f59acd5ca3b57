"""What each mechanism stores per token: bytes predicted, bytes allocated, and the cache itself.

A layer keeps two flat streams of one head each, [B, 1, T, width], in the slots that transformers calls
``keys`` and ``values``. Projected keys (with the shared rotary key at their end, if there is one) and values
fill them in that order; a reconstructing mechanism puts its one stream first and the shared rotary key, or
nothing, second. They are
raw: the shift is applied to scores and weights when they are read, so that cropping, reordering and
    repeating need
no state. Only a shifted *query* has one: the last window - 1 raw queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from keyshift.attention import SOURCES
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError

GRANULE = 64
"""Buffers that grow do so by a quarter, and to a multiple of this many tokens."""


@dataclass(frozen=True)
class CacheWidths:
    """Scalars that one layer keeps: per token in each stream, and per sequence for a shifted query."""

    first: int
    second: int
    query_state: int = 0


def cache_widths(config: KeyshiftConfig) -> CacheWidths:
    """What one layer keeps (spec: "Scalars cached per token and layer"; GVA paper, section 3.4)."""
    keys, values = SOURCES[config.attention].stream_widths(config)
    rotary = config.decoupled_width
    state = (config.shift_window - 1) * config.num_attention_heads * config.qk_head_dim
    if not config.shifts("q"):
        state = 0
    return CacheWidths(keys + rotary, values, state) if keys else CacheWidths(values, rotary, state)


def cache_bytes_per_token(config: KeyshiftConfig, dtype: torch.dtype) -> int:
    """Bytes that one more token of one sequence adds to the cache, over all layers."""
    widths = cache_widths(config)
    return config.num_hidden_layers * (widths.first + widths.second) * dtype.itemsize


def cache_bytes(config: KeyshiftConfig, *, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of a cache with room for ``tokens`` tokens of ``batch`` sequences, query state included."""
    state = config.num_hidden_layers * cache_widths(config).query_state * dtype.itemsize
    return batch * (tokens * cache_bytes_per_token(config, dtype) + state)


class StreamLayer(CacheLayerMixin):
    """One layer's streams in buffers that are written in place.

    Args:
        max_length: tokens to allocate at once; None grows by a quarter when full, so that appending a token
            is amortised O(1).
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, max_length: int | None = None):
        self.max_length = max_length
        self.length = 0
        self.is_initialized = False
        self.query_state: Tensor | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> Tensor | None:
        """The first stream [B, 1, length, width], a view; None before the first token."""
        return None if self._buffers is None else self._buffers[0][:, :, : self.length]

    @property
    def values(self) -> Tensor | None:
        """The second stream [B, 1, length, width], a view; None before the first token."""
        return None if self._buffers is None else self._buffers[1][:, :, : self.length]

    @property
    def capacity(self) -> int:
        """Tokens that fit without another allocation."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage behind this layer, used or not."""
        held = [*(self._buffers or ()), *([] if self.query_state is None else [self.query_state])]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the streams' shapes, dtypes and device."""
        self.device = key_states.device
        self.is_initialized = True
        self._buffers = None
        self._allocate(key_states, value_states, max(self.max_length or 0, key_states.shape[2]))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens [B, 1, Q, S] and return both streams whole, as views."""
        batch = key_states.shape[0]
        if self._buffers is None or (self.length == 0 and self._buffers[0].shape[0] != batch):
            self.lazy_initialization(key_states, value_states)
        assert self._buffers is not None
        if self._buffers[0].shape[0] != batch:
            raise UserError(
                f"the cache holds {self._buffers[0].shape[0]} sequences and was given {batch} to continue; "
                "use a new cache, or batch_select_indices() or batch_repeat_interleave()"
            )
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            grown = -(-max(end, self.capacity * 5 // 4) // GRANULE) * GRANULE
            self._allocate(*self._buffers, grown)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]

    def _allocate(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        """New buffers shaped like these tensors, with room for ``capacity`` tokens, keeping what is
        stored."""
        old = (self.keys, self.values)
        fresh = [like.new_empty(like.shape[0], 1, capacity, like.shape[3]) for like in (keys, values)]
        for buffer, stored in zip(fresh, old, strict=True):
            if stored is not None:
                buffer[:, :, : self.length] = stored
        self._buffers = (fresh[0], fresh[1])

    def _select(self, index: Tensor) -> None:
        """Keep the sequences that ``index`` names, in that order, in buffers of the same capacity."""
        if self._buffers is None:
            return
        index = index.to(self.device)
        fresh = [buffer.new_empty(len(index), *buffer.shape[1:]) for buffer in self._buffers]
        for new, old in zip(fresh, self._buffers, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length].index_select(0, index)
        self._buffers = (fresh[0], fresh[1])
        if self.query_state is not None:
            self.query_state = self.query_state.index_select(0, index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens after the next ``query_length``, offset), as transformers' masks want them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.length

    def get_max_length(self) -> int:
        """-1: the layer grows when it must."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; a positive number is the length to keep (older
        callers).

        Raises:
            UserError: the layer holds raw queries of a shifted query, which cannot be had back.
        """
        keep = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if keep >= self.length:
            return
        if self.query_state is not None and keep > 0:
            raise UserError(
                "shift='qkv' keeps the last raw queries, which a rollback cannot restore: reset() the cache "
                "and prefill again, or use shift='kv', which needs no state"
            )
        self.length = max(keep, 0)
        if self.length == 0:
            self.query_state = None

    def reset(self) -> None:
        """Forget every token; keep the buffers."""
        self.length = 0
        self.query_state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: sequence b becomes what sequence ``beam_idx[b]`` was."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times in a row."""
        if self._buffers is not None:
            batch = self._buffers[0].shape[0]
            self._select(torch.arange(batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences that ``indices`` (integers or a boolean mask) names."""
        self._select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Refused: this layer stays where it is."""
        raise UserError(
            "KeyshiftCache cannot be offloaded; pass a transformers DynamicCache(offloading=True)"
        )


class KeyshiftCache(Cache):
    """The cache of a keyshift model: raw streams, written in place. For inference (no gradients through it).

    Args:
        config: the model's.
        max_length: tokens to allocate at the first update; None grows as needed.
    """

    layers: list[StreamLayer]

    def __init__(self, config: KeyshiftConfig, max_length: int | None = None):
        super().__init__(layers=[StreamLayer(max_length) for _ in range(config.num_hidden_layers)])

    @property
    def capacity(self) -> int:
        """Tokens per sequence that fit without another allocation."""
        return self.layers[0].capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all storage behind the cache. Equals `cache_bytes` at ``tokens=capacity``."""
        return sum(layer.allocated_bytes for layer in self.layers)
