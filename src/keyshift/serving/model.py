"""The decoder on vLLM's layers; attention is the very module that trains and generates.

Only attention, its cache and its positions are keyshift's; embeddings, feed-forward layers, norms and the
head are vLLM's, which share themselves out over processes. Shapes: N tokens of all requests of a step, E
hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from keyshift.attention.frame import Frame, paged_frame
from keyshift.attention.module import Attention
from keyshift.attention.rotary import alibi_slopes
from keyshift.cache import cache_widths
from keyshift.serving.pages import PagedCache, StreamBackend
from keyshift.serving.refusals import check_servable
from keyshift.serving.shares import share_of, take_shares_, whole_shapes


class PagedAttention(Attention, AttentionLayerBase):
    """One layer's attention, of this process's heads, over vLLM's pages."""

    def __init__(self, vllm_config: VllmConfig, layer_idx: int, name: str):
        processes, config = get_tensor_model_parallel_world_size(), vllm_config.model_config.hf_config
        share = share_of(config, processes)
        super().__init__(share, layer_idx)
        shapes = whole_shapes(lambda: Attention(config, layer_idx))
        take_shares_(self, shapes, get_tensor_model_parallel_rank(), processes)
        widths = cache_widths(share)
        first, second = (widths.values, widths.rotary)
        if self.source.projects_keys:
            first, second = (widths.keys + widths.rotary, widths.values)
        self.cache = PagedCache(first, second)
        self.num_heads = self.heads  # vLLM asks for it
        self.name = name
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StreamBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """A row of all streams per token, without heads."""
        dtype = vllm_config.model_config.dtype
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.cache.width,
            dtype=dtype,
            num_head_slots=1,
            state_content_bytes=self.cache.width * dtype.itemsize,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages [pages, 1, tokens, row] that vLLM allocated."""
        super().bind_kv_cache(kv_cache)
        self.cache.pages_PNR = kv_cache[:, 0]

    def attend(self, x_NE: Tensor, frame: Frame) -> Tensor:
        """Attention of the step's tokens [N, E], each over its own sequence; all processes' outputs added
        up."""
        batch = get_forward_context().attn_metadata
        self.cache.batch = None if batch is None else batch[self.name]
        output, _ = self(x_NE[None], frame, self.cache)
        return tensor_model_parallel_all_reduce(output[0])


class Layer(nn.Module):
    """Attention and feed-forward layer, each on a normalised input and added to the stream."""

    def __init__(self, vllm_config: VllmConfig, layer_idx: int, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = PagedAttention(vllm_config, layer_idx, f"{prefix}.self_attn")
        self.mlp = None
        if config.mlp == "swiglu":
            self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.mlp = LlamaMLP(
                config.hidden_size, config.intermediate_size, config.hidden_act, prefix=f"{prefix}.mlp"
            )

    def forward(self, x_NE: Tensor, frame: Frame) -> Tensor:
        x_NE = x_NE + self.self_attn.attend(self.input_layernorm(x_NE), frame)
        if self.mlp is not None:
            x_NE = x_NE + self.mlp(self.post_attention_layernorm(x_NE))
        return x_NE


class Decoder(nn.Module):
    """The decoder without its head."""

    def __init__(self, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(vllm_config, index, f"{prefix}.layers.{index}") for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor | None, positions_N: Tensor, x_NE: Tensor | None) -> Tensor:
        if x_NE is None:
            x_NE = self.embed_tokens(input_ids)
        frame = paged_frame(self.config, x_NE, positions_N[None], self._slopes(x_NE.device))
        if self.embed_positions is not None:
            x_NE = x_NE + self.embed_positions(positions_N)
        for layer in self.layers:
            x_NE = layer(x_NE, frame)
        return self.norm(x_NE)

    def _slopes(self, device: torch.device) -> Tensor | None:
        """ALiBi's, of this process's heads."""
        if self.config.position != "alibi":
            return None
        slopes = alibi_slopes(self.config.num_attention_heads).to(device)
        return slopes.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]


class KeyshiftForCausalLM(nn.Module):
    """The language model as vLLM wants it; reads the checkpoints of `keyshift.KeyshiftForCausalLM`.

    Raises:
        UserError: what cannot be served, see `check_servable`.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        check_servable(vllm_config)
        self.config = config = vllm_config.model_config.hf_config
        self.model = Decoder(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [N, E] of the step's tokens."""
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take a checkpoint's tensors; vLLM refuses those without a place here and weights left without
        one."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
