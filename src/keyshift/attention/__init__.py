"""Attention: where keys come from (this table), position (``rotary``), shift (``shift``), put together
(``module``)."""

from keyshift.attention.latent import LatentKeys
from keyshift.attention.projected import ProjectedKeys
from keyshift.attention.source import KeySource
from keyshift.attention.value import MappedKeys, SharedKeys

SOURCES: dict[str, type[KeySource]] = {
    "mha": ProjectedKeys,
    "mqa": ProjectedKeys,
    "gqa": ProjectedKeys,
    "mla": LatentKeys,
    "shared_kv": SharedKeys,
    "gva": MappedKeys,
}
"""``KeyshiftConfig.attention`` -> the answer to "where do keys come from?"."""
