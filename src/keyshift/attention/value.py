"""Keys from the values: shared KV (K = V) and grouped value attention, GVA (K_h = V_g(h) M_h).

GVA here is that of arXiv 2609.13285, which caches values only; some linear-attention libraries use the same
words for a layer with more value heads than key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init

from keyshift.attention.source import KeySource, query_rms, stream_norm, stream_rms
from keyshift.configuration import KeyshiftConfig


class SharedKeys(KeySource):
    """K = V: the value is its own key, and the only thing cached. GVA with M = I.

    With ``stream_norm`` the groups' values are normalised together, as DeepSeek's latent is.
    """

    def __init__(self, config: KeyshiftConfig):
        super().__init__()
        self.groups = config.num_key_value_heads
        self.key_heads = self.value_heads = self.stream_heads = self.groups
        bias = config.projection_bias != "none"
        self.v_proj = nn.Linear(config.hidden_size, self.groups * config.head_dim, bias=bias)
        self.norm = stream_norm(config, self.groups * config.head_dim)

    @staticmethod
    def stream_widths(config: KeyshiftConfig) -> tuple[int, int]:
        return 0, config.num_key_value_heads * config.head_dim

    def project(self, x_BTE: Tensor) -> tuple[Tensor | None, Tensor]:
        values = self.v_proj(x_BTE)
        return None, values if self.norm is None else self.norm(values)

    def expand(self, key_BTS: Tensor | None, value_BTS: Tensor) -> tuple[Tensor, Tensor]:
        values = value_BTS.unflatten(-1, (self.groups, -1))
        return values, values

    def absorb(self, q_BTHD: Tensor) -> Tensor:
        return q_BTHD

    def output(self, o_BTHS: Tensor) -> Tensor:
        return o_BTHS


class MappedKeys(SharedKeys):
    """K_h = V_g(h) M_h, one map per query head (GVA paper, eq. 6); M_h moves into the query at decode (eq.
    7)."""

    def __init__(self, config: KeyshiftConfig):
        super().__init__(config)
        self.key_heads = config.num_attention_heads
        self.key_map = nn.Parameter(
            torch.empty(config.num_attention_heads, config.head_dim, config.qk_nope_head_dim)
        )

    def draw_maps(self, config: KeyshiftConfig) -> None:
        init.normal_(self.key_map, std=config.initializer_range)

    def match_keys(self, config: KeyshiftConfig) -> None:
        init.normal_(self.key_map, std=query_rms(config) / (stream_rms(config) * config.head_dim**0.5))

    def scale_keys_(self, factor: Tensor) -> None:
        self.key_map.mul_(factor)

    def expand(self, key_BTS: Tensor | None, value_BTS: Tensor) -> tuple[Tensor, Tensor]:
        values = value_BTS.unflatten(-1, (self.groups, -1))
        maps = self.key_map.unflatten(0, (self.groups, -1))
        keys = torch.einsum("btgd,grdn->btgrn", values, maps)
        return keys.flatten(2, 3), values

    def absorb(self, q_BTHD: Tensor) -> Tensor:
        return torch.einsum("bthn,hdn->bthd", q_BTHD, self.key_map)
