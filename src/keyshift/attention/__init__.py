"""The attention module: one source of keys, one position, one shift, put together."""

from keyshift.attention.module import Attention

__all__ = ["Attention"]
