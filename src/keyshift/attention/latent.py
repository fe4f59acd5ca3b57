"""Keys and values from one latent: MLA (DeepSeek-V2). c = norm(X W_DKV), K_h = c W_UK,h, V_h = c W_UV,h.

The norm can be left out (``stream_norm``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init

from keyshift.attention.source import KeySource, query_rms, stream_norm, stream_rms
from keyshift.configuration import KeyshiftConfig


class LatentKeys(KeySource):
    """Caches the latent only; W_UK moves into the query at decode and W_UV behind the output."""

    def __init__(self, config: KeyshiftConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.key_heads = self.value_heads = self.heads
        self.stream_heads = self.stream_groups(config)
        rank = config.kv_lora_rank
        self.down_proj = nn.Linear(config.hidden_size, rank, bias=config.projection_bias != "none")
        self.norm = stream_norm(config, rank)
        self.key_up = nn.Linear(rank, self.heads * config.qk_nope_head_dim, bias=False)
        self.value_up = nn.Linear(rank, self.heads * config.head_dim, bias=False)

    @staticmethod
    def stream_widths(config: KeyshiftConfig) -> tuple[int, int]:
        return 0, config.kv_lora_rank

    @staticmethod
    def stream_groups(config: KeyshiftConfig) -> int:
        return 1

    def project(self, x_BTE: Tensor) -> tuple[Tensor | None, Tensor]:
        latent = self.down_proj(x_BTE)
        return None, latent if self.norm is None else self.norm(latent)

    def match_keys(self, config: KeyshiftConfig) -> None:
        init.normal_(
            self.key_up.weight, std=query_rms(config) / (stream_rms(config) * config.kv_lora_rank**0.5)
        )

    def scale_keys_(self, factor: Tensor) -> None:
        self.key_up.weight.mul_(factor)

    def expand(self, key_BTS: Tensor | None, value_BTS: Tensor) -> tuple[Tensor, Tensor]:
        heads = (self.heads, -1)
        return self.key_up(value_BTS).unflatten(-1, heads), self.value_up(value_BTS).unflatten(-1, heads)

    def absorb(self, q_BTHD: Tensor) -> Tensor:
        return torch.einsum("bthn,hns->bths", q_BTHD, self.key_up.weight.unflatten(0, (self.heads, -1)))

    def output(self, o_BTHS: Tensor) -> Tensor:
        return torch.einsum("bths,hds->bthd", o_BTHS, self.value_up.weight.unflatten(0, (self.heads, -1)))
