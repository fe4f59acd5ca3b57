"""What each mechanism stores per token: bytes predicted, bytes allocated, and the cache itself.

A layer keeps two flat streams of one head each, [B, 1, T, width], in the slots that transformers calls
``keys`` and ``values``. Projected keys (with the shared rotary key at their end, if there is one) and values
fill them in that order; a reconstructing mechanism puts its one stream first and the shared rotary key, or
nothing, second. They are
raw: the shift is applied to scores and weights when they are read, so that cropping, reordering and repeating
need no state. Only a shifted *query* has one: the last window - 1 raw queries.

With ``cache_dtype`` content is rounded to 8 or 4 bits, with one bfloat16 scale per token and stream head, or
per block of 32 channels; the rotary key keeps 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from keyshift.attention import SOURCES
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError, nearest
from keyshift.ops.stream_attention import stream_attention
from keyshift.ops.stream_attention.quantised import quantise

CACHE_DTYPES = {"int8": torch.int8, "int4": torch.uint8}
"""What content may be rounded to; two 4-bit numbers share a byte."""

SCALE_DTYPE = torch.bfloat16
"""Of the scales: float16 has no room below 1e-7, where a stream of small numbers would end."""

BLOCK = 32
"""Channels that share a scale in four bits. In eight bits a whole head of a stream does."""

GRANULE = 64
"""Buffers that grow do so by a quarter, and to a multiple of this many tokens."""


@dataclass(frozen=True)
class CacheWidths:
    """What one layer keeps: numbers per token of each kind, and per sequence for a shifted query.

    Attributes:
        keys, values: content; no keys where they are computed from the values.
        rotary: the shared rotated key of decoupled RoPE.
        groups: heads of each content stream.
        query_state: raw queries, per sequence.
    """

    keys: int
    values: int
    rotary: int
    groups: int
    query_state: int


def cache_widths(config: KeyshiftConfig) -> CacheWidths:
    """What one layer keeps (docs/caches.md; GVA paper, section 3.4)."""
    source = SOURCES[config.attention]
    keys, values = source.stream_widths(config)
    state = (config.shift_window - 1) * config.num_attention_heads * config.qk_head_dim
    if not config.shifts("q"):
        state = 0
    return CacheWidths(keys, values, config.decoupled_width, source.stream_groups(config), state)


def scale_blocks(cache_dtype: str, head_width: int) -> int:
    """How many scales a token has per stream head of that width."""
    return head_width // BLOCK if cache_dtype == "int4" and head_width % BLOCK == 0 else 1


def rotary_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the rotary key is kept beside rounded content: 16 bits, the model's own where it has them."""
    return dtype if dtype.itemsize == 2 else torch.float16


def check_cache_dtype(config: KeyshiftConfig, cache_dtype: str | None) -> None:
    """A model's content can be rounded so, or an error says why not.

    Raises:
        UserError: not one of `CACHE_DTYPES`, or content that cannot be packed so.
    """
    if cache_dtype is None:
        return
    if cache_dtype not in CACHE_DTYPES:
        raise UserError(
            f"cache_dtype={cache_dtype!r} is not known; {nearest(str(cache_dtype), CACHE_DTYPES)}"
        )
    widths = cache_widths(config)
    odd = [head for width in (widths.keys, widths.values) if (head := width // widths.groups) % 2]
    if cache_dtype == "int4" and odd:
        raise UserError(f"cache_dtype='int4' packs pairs of channels; a head of {odd[0]} is odd: use 'int8'")


def cache_bytes_per_token(config: KeyshiftConfig, dtype: torch.dtype, cache_dtype: str | None = None) -> int:
    """Bytes that one more token of one sequence adds to the cache, over all layers, scales included.

    Args:
        dtype: the model's.
        cache_dtype: ``"int8"``, ``"int4"``, or None: content is kept in ``dtype``.
    """
    check_cache_dtype(config, cache_dtype)
    widths = cache_widths(config)
    if cache_dtype is None:
        return config.num_hidden_layers * (widths.keys + widths.values + widths.rotary) * dtype.itemsize
    layer = widths.rotary * rotary_dtype(dtype).itemsize
    for width in filter(None, (widths.keys, widths.values)):
        scales = widths.groups * scale_blocks(cache_dtype, width // widths.groups)
        layer += width * (8 if cache_dtype == "int8" else 4) // 8 + scales * SCALE_DTYPE.itemsize
    return config.num_hidden_layers * layer


def cache_bytes(
    config: KeyshiftConfig, *, batch: int, tokens: int, dtype: torch.dtype, cache_dtype: str | None = None
) -> int:
    """Bytes of a cache with room for ``tokens`` tokens of ``batch`` sequences, query state included."""
    state = config.num_hidden_layers * cache_widths(config).query_state * dtype.itemsize
    return batch * (tokens * cache_bytes_per_token(config, dtype, cache_dtype) + state)


@dataclass(frozen=True)
class Streams:
    """Cached tokens as attention reads them: views, L tokens, G heads.

    Attributes:
        keys_BLGD: None where the values are the keys.
        values_BLGS: floats; or integers, with scales (`keyshift.ops.stream_attention.quantised`).
        rope_keys_BLR: the shared rotated key.
    """

    keys_BLGD: Tensor | None
    values_BLGS: Tensor
    rope_keys_BLR: Tensor | None
    key_scales_BLGN: Tensor | None = None
    value_scales_BLGN: Tensor | None = None

    def for_attention(self) -> dict[str, Any]:
        """The arguments of `stream_attention` that this is; a single stream goes in as the keys."""
        single = self.keys_BLGD is None
        heads = {
            "keys_BGTS": self.values_BLGS if single else self.keys_BLGD,
            "values_BGTV": None if single else self.values_BLGS,
            "key_scales_BGTN": self.value_scales_BLGN if single else self.key_scales_BLGN,
            "value_scales_BGTN": None if single else self.value_scales_BLGN,
        }
        moved = {name: None if each is None else each.transpose(1, 2) for name, each in heads.items()}
        return {**moved, "rope_keys_BTR": self.rope_keys_BLR}

    def attend(self, queries: Tensor, **options: Any) -> Tensor:
        """`stream_attention` of new queries over these streams; ``options`` are its arguments."""
        return stream_attention(queries, **self.for_attention(), **options)


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
        self._buffers: tuple[Tensor, ...] | None = None

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
        self._allocate(self._packed(key_states, value_states), max(self.max_length or 0, key_states.shape[2]))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens [B, 1, Q, S] and return the first two buffers whole, as views."""
        batch = key_states.shape[0]
        if self._buffers is None or (self.length == 0 and self._buffers[0].shape[0] != batch):
            self.lazy_initialization(key_states, value_states)
        assert self._buffers is not None
        if self._buffers[0].shape[0] != batch:
            raise UserError(
                f"the cache holds {self._buffers[0].shape[0]} sequences and was given {batch} to continue; "
                "use a new cache, or batch_select_indices() or batch_repeat_interleave()"
            )
        packed = self._packed(key_states, value_states)
        if packed[0].dtype != self._buffers[0].dtype:
            raise UserError(
                f"the cache holds {self._buffers[0].dtype} and was given {packed[0].dtype}; use a new cache"
            )
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            grown = -(-max(end, self.capacity * 5 // 4) // GRANULE) * GRANULE
            self._allocate(self._buffers, grown)
        for buffer, new in zip(self._buffers, packed, strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]

    def _packed(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        """New tokens of the two streams as they are stored, one tensor [B, 1, Q, width] per buffer."""
        return first, second

    def _allocate(self, like: tuple[Tensor, ...], capacity: int) -> None:
        """New buffers shaped like these tensors, with room for ``capacity`` tokens, keeping what is
        stored."""
        with torch.inference_mode(False):  # so that any later call may write to them
            fresh = tuple(each.new_empty(each.shape[0], 1, capacity, each.shape[3]) for each in like)
        if self._buffers is not None:
            for buffer, stored in zip(fresh, self._buffers, strict=True):
                buffer[:, :, : self.length] = stored[:, :, : self.length]
        self._buffers = fresh

    def _select(self, index: Tensor) -> None:
        """Keep the sequences that ``index`` names, in that order, in buffers of the same capacity."""
        if self._buffers is None:
            return
        index = index.to(self.device)
        with torch.inference_mode(False):
            fresh = tuple(buffer.new_empty(len(index), *buffer.shape[1:]) for buffer in self._buffers)
        for new, old in zip(fresh, self._buffers, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length].index_select(0, index)
        self._buffers = fresh
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


class QuantisedLayer(StreamLayer):
    """A layer that rounds content to 8 or 4 bits when it is written.

    Its buffers are the integers of each content stream, then the scales of each, then the rotary key.
    """

    def __init__(self, widths: CacheWidths, cache_dtype: str, max_length: int | None = None):
        super().__init__(max_length)
        self.widths = widths
        self.cache_dtype = cache_dtype

    def _packed(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
            raise UserError(
                f"cache_dtype={self.cache_dtype!r} has no gradients: decode under torch.no_grad()"
            )
        content, rotary = [first], second
        if self.widths.keys:
            keys, rotary = first.split((self.widths.keys, self.widths.rotary), dim=-1)
            content = [keys, second]
        rounded = []
        for stream in content:
            heads = stream.unflatten(-1, (self.widths.groups, -1))
            blocks = scale_blocks(self.cache_dtype, heads.shape[-1])
            rounded.append(quantise(heads, CACHE_DTYPES[self.cache_dtype], blocks, SCALE_DTYPE))
        integers, scales = zip(*rounded, strict=True)
        rotary = rotary.to(rotary_dtype(rotary.dtype))
        return (*(each.flatten(-2) for each in integers), *(each.flatten(-2) for each in scales), rotary)

    def streams(self) -> Streams:
        """What is stored, integers and scales apart."""
        assert self._buffers is not None
        *content, rotary = (buffer[:, 0, : self.length] for buffer in self._buffers)
        heads = [buffer.unflatten(-1, (self.widths.groups, -1)) for buffer in content]
        rope_keys = rotary if self.widths.rotary else None
        if self.widths.keys:
            keys, values, key_scales, value_scales = heads
            return Streams(keys, values, rope_keys, key_scales, value_scales)
        values, value_scales = heads
        return Streams(None, values, rope_keys, None, value_scales)


class KeyshiftCache(Cache):
    """The cache of a keyshift model: raw streams, written in place. For inference (no gradients through it).

    Args:
        config: the model's.
        max_length: tokens to allocate at the first update; None grows as needed.
        cache_dtype: ``"int8"`` or ``"int4"`` rounds content so; None keeps the model's dtype.

    Raises:
        UserError: an unknown ``cache_dtype``, or one in which this model's streams cannot be kept.
    """

    layers: list[StreamLayer]

    def __init__(self, config: KeyshiftConfig, max_length: int | None = None, cache_dtype: str | None = None):
        check_cache_dtype(config, cache_dtype)
        self.cache_dtype = cache_dtype
        widths = cache_widths(config)
        super().__init__(
            layers=[
                StreamLayer(max_length)
                if cache_dtype is None
                else QuantisedLayer(widths, cache_dtype, max_length)
                for _ in range(config.num_hidden_layers)
            ]
        )

    def reserve(self, max_length: int) -> None:
        """Allocate for so many tokens at the first update, unless there was one or a length was asked for."""
        for layer in self.layers:
            if layer.max_length is None and not layer.is_initialized:
                layer.max_length = max_length

    @property
    def capacity(self) -> int:
        """Tokens per sequence that fit without another allocation."""
        return self.layers[0].capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all storage behind the cache. Equals `cache_bytes` at ``tokens=capacity``."""
        return sum(layer.allocated_bytes for layer in self.layers)
