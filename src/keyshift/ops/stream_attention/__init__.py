"""Attention of a few new queries over cached streams, shift included."""

from keyshift.ops.stream_attention.api import stream_attention

__all__ = ["stream_attention"]
