"""Keys from a projection of their own: MHA (G = H), GQA (1 < G < H), MQA (G = 1)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import initialization as init

from keyshift.attention.source import KeySource, query_rms
from keyshift.configuration import KeyshiftConfig


class ProjectedKeys(KeySource):
    """K = X W_K, V = X W_V, the keys perhaps normalised; both are cached."""

    projects_keys = True

    def __init__(self, config: KeyshiftConfig):
        super().__init__()
        self.groups = config.num_key_value_heads
        self.key_heads = self.value_heads = self.stream_heads = self.groups
        bias = config.projection_bias != "none"
        self.k_proj = nn.Linear(config.hidden_size, self.groups * config.qk_nope_head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.groups * config.head_dim, bias=bias)
        self.k_norm = (
            nn.RMSNorm(config.qk_nope_head_dim, eps=config.rms_norm_eps) if config.key_norm else None
        )

    @staticmethod
    def stream_widths(config: KeyshiftConfig) -> tuple[int, int]:
        groups = config.num_key_value_heads
        return groups * config.qk_nope_head_dim, groups * config.head_dim

    def project(self, x_BTE: Tensor) -> tuple[Tensor | None, Tensor]:
        keys = self.k_proj(x_BTE)
        if self.k_norm is not None:
            keys = self.k_norm(keys.unflatten(-1, (self.groups, -1))).flatten(-2)
        return keys, self.v_proj(x_BTE)

    def match_keys(self, config: KeyshiftConfig) -> None:
        if self.k_norm is not None:
            init.constant_(self.k_norm.weight, query_rms(config))
        else:
            init.normal_(self.k_proj.weight, std=query_rms(config) / config.hidden_size**0.5)

    def scale_keys_(self, factor: Tensor) -> None:
        if self.k_norm is not None:
            self.k_norm.weight.mul_(factor)
            return
        self.k_proj.weight.mul_(factor)
        if self.k_proj.bias is not None:
            self.k_proj.bias.mul_(factor)

    def expand(self, key_BTS: Tensor | None, value_BTS: Tensor) -> tuple[Tensor, Tensor]:
        assert key_BTS is not None
        return key_BTS.unflatten(-1, (self.groups, -1)), value_BTS.unflatten(-1, (self.groups, -1))

    def absorb(self, q_BTHD: Tensor) -> Tensor:
        return q_BTHD

    def output(self, o_BTHS: Tensor) -> Tensor:
        return o_BTHS
