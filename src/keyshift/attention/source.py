"""The first axis: where keys come from. One subclass per answer, in ``projected``, ``latent`` and ``value``.

Shapes: B batch, T tokens, E hidden size, S width of what is cached per token, H query heads, D width of a
    head.
"""

from __future__ import annotations

from torch import Tensor, nn

from keyshift.configuration import KeyshiftConfig


def query_rms(config: KeyshiftConfig) -> float:
    """The RMS of queries at init: 1 after a query norm, else that of a normalised input through
    ``q_proj``."""
    return 1.0 if config.query_norm else config.initializer_range * config.hidden_size**0.5


def stream_rms(config: KeyshiftConfig) -> float:
    """The RMS of the stream that keys are computed from at init: 1 after its norm, else that of a normalised
    input through its projection."""
    return 1.0 if config.stream_norm else config.initializer_range * config.hidden_size**0.5


def stream_norm(config: KeyshiftConfig, width: int) -> nn.RMSNorm | None:
    """The norm over a token's whole stream, where the configuration has one."""
    return nn.RMSNorm(width, eps=config.rms_norm_eps) if config.stream_norm else None


class KeySource(nn.Module):
    """What a token leaves behind (its streams) and how keys and values are had from it.

    Attributes:
        projects_keys: whether keys have a projection, and a cached stream, of their own.
        key_heads, value_heads: heads of the keys and values that `expand` returns.
        stream_heads: heads of the cached value stream (G; 1 for a latent).
    """

    projects_keys = False
    key_heads: int
    value_heads: int
    stream_heads: int

    @staticmethod
    def stream_widths(config: KeyshiftConfig) -> tuple[int, int]:
        """Scalars cached per token and layer for content: of keys (0 where they have no stream) and of
        values."""
        raise NotImplementedError

    @staticmethod
    def stream_groups(config: KeyshiftConfig) -> int:
        """Heads of each cached stream (G)."""
        return config.num_key_value_heads

    def project(self, x_BTE: Tensor) -> tuple[Tensor | None, Tensor]:
        """The cached streams of new tokens: keys [B, T, S_k] where they are projected (else None), values
        [B, T, S_v]."""
        raise NotImplementedError

    def draw_maps(self, config: KeyshiftConfig) -> None:
        """Draw parameters that are not layers of torch's, which are drawn already."""

    def match_keys(self, config: KeyshiftConfig) -> None:
        """Draw the map to keys, where there is one, so that they start at the queries' RMS."""

    def scale_keys_(self, factor: Tensor) -> None:
        """Multiply the map to content keys, where there is one, by this number."""

    def expand(self, key_BTS: Tensor | None, value_BTS: Tensor) -> tuple[Tensor, Tensor]:
        """Content keys [B, T, key_heads, d_n] and values [B, T, heads, d_h] from the streams, neither
        rotated nor shifted."""
        raise NotImplementedError

    def absorb(self, q_BTHD: Tensor) -> Tensor:
        """Queries [B, T, H, d_n] moved to where they meet the cached stream as it is: [B, T, H, d_s]."""
        raise NotImplementedError

    def output(self, o_BTHS: Tensor) -> Tensor:
        """Head outputs [B, T, H, d_h] from attention over the cached stream [B, T, H, d_s]."""
        raise NotImplementedError
