"""The attention backend: what a token leaves behind lies in vLLM's pages as it is, unshifted and unexpanded.

A page holds N tokens of one layer, for each a row with its streams: keys (of mechanisms that project them),
values or latent, rotary key. The shift acts on scores and weights, so there is no state beside the pages:
prefix caching, chunked prefill, preemption and speculative decoding see ordinary pages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from keyshift.cache import Streams
from keyshift.ops.stream_attention import stream_attention


@dataclass(frozen=True)
class Alike:
    """Requests with as many new tokens each, B of T: one call of the operator.

    Attributes:
        tokens_BT: where their new tokens are in the batch.
        tables_BP: their pages.
        lengths_B: tokens stored for each, the new ones included.
    """

    tokens_BT: Tensor
    tables_BP: Tensor
    lengths_B: Tensor


@dataclass(frozen=True)
class Batch(AttentionMetadata):
    """One step of the engine: the slot of each new token, and whose they are."""

    slots_N: Tensor
    requests: tuple[Alike, ...]


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Sorts the requests of a step by how many new tokens they have: decoding ones are one group."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_tokens = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        common = common_attn_metadata
        device = common.block_table_tensor.device
        starts = common.query_start_loc_cpu.tolist()
        alike: dict[int, list[int]] = defaultdict(list)
        for request in range(common.num_reqs):
            alike[starts[request + 1] - starts[request]].append(request)
        pages = -(-common.max_seq_len // self.page_tokens)
        groups = []
        for new, requests in alike.items():
            if new:
                rows = torch.tensor(requests, device=device)
                first = torch.tensor([starts[request] for request in requests], device=device)
                tokens = first[:, None] + torch.arange(new, device=device)
                tables = common.block_table_tensor[rows, :pages]
                groups.append(Alike(tokens, tables, common.seq_lens[rows]))
        return Batch(common.slot_mapping[: common.num_actual_tokens], tuple(groups))


class StreamBackend(AttentionBackend):
    """Tells vLLM what these pages need, which is little: any page size, no expanded keys."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        raise NotImplementedError("layers of keyshift attend by themselves")

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder


@dataclass(frozen=True)
class PagedStreams(Streams):
    """Streams whose first axis is the page; None for a batch is vLLM's trial run, which has none."""

    batch: Batch | None = None

    def attend(self, queries: Tensor, **options: Any) -> Tensor:
        """Attention of every token of the batch, [1, H, N, V]; queries are [1, H, (W,) N, S]."""
        width = self.values_BLGS.shape[-1]
        out = queries.new_zeros(1, queries.shape[1], queries.shape[-2], width)
        if self.batch is None:
            return out
        rope = options.pop("rope_queries_BHQR")
        streams = self.for_attention()
        for group in self.batch.requests:
            found = stream_attention(
                _of(queries, group.tokens_BT),
                **streams,
                **options,
                rope_queries_BHQR=None if rope is None else _of(rope, group.tokens_BT),
                lengths_B=group.lengths_B,
                block_tables_BP=group.tables_BP,
            )
            out[0, :, group.tokens_BT] = found.transpose(0, 1)
        return out


def _of(x: Tensor, tokens_BT: Tensor) -> Tensor:
    """These tokens of [1, H, …, N, D], as [B, H, …, T, D]."""
    return x[0][..., tokens_BT, :].movedim(-3, 0)


class PagedCache:
    """One layer's pages in the place of a keyshift cache.

    Args:
        first, second: widths of the two streams that a keyshift cache keeps.

    Attributes:
        pages_PNR: P pages of N tokens, a row of R = first + second for each; vLLM's, or empty in a trial run.
        batch: what the step is about; None in a trial run.
    """

    def __init__(self, first: int, second: int):
        self.widths = (first, second)
        self.pages_PNR = torch.empty(0, 1, self.width)
        self.batch: Batch | None = None

    @property
    def width(self) -> int:
        """Numbers that a token leaves."""
        return sum(self.widths)

    def update(self, first: Tensor, second: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Put the step's rows [1, 1, N, width] where they belong; return the pages' two streams."""
        if self.batch is not None:
            slots, tokens = self.batch.slots_N, self.pages_PNR.shape[1]
            rows = torch.cat((first, second), dim=-1)[0, 0, : len(slots)]
            self.pages_PNR[slots // tokens, slots % tokens] = rows
        first, second = self.pages_PNR.split(self.widths, dim=-1)
        return first, second

    def paged(self, stored: Streams) -> PagedStreams:
        """What the pages hold, with the batch that reads them."""
        return PagedStreams(**vars(stored), batch=self.batch)
