"""Documents to token ids: what stands before and after a document, and which documents are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keyshift.data.tokenizer import end_id, load_tokenizer, separator_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_DOCUMENTS = 256  # a batch for the tokenizer ends with either
_BATCH_CHARACTERS = 1024 * 1024


def in_validation(document: str, validation_fraction: float) -> bool:
    """Whether ``document`` is held out. Depends on its content alone, so duplicates share a side."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < validation_fraction * 2**64


@dataclass(frozen=True)
class Encoder:
    """How documents become tokens: the separator, their tokens and, if there is one, the end token.

    vocab_size: how many rows an embedding needs.
    """

    tokenizer: PreTrainedTokenizerBase
    separator: int
    end: int | None
    vocab_size: int
    validation_fraction: float

    @property
    def settings(self) -> tuple[bool, float]:
        """What ``load`` takes besides the tokenizer."""
        return self.end is not None, self.validation_fraction

    @classmethod
    def load(cls, tokenizer: Path, end_token: bool, validation_fraction: float) -> Encoder:
        """Of the tokenizer in a folder. Raises ``UserError`` if it has no token to separate documents."""
        loaded = load_tokenizer(tokenizer)
        # Ids can have gaps, so that the largest one, not their number, decides how many rows there are.
        vocab_size = max(len(loaded), max(loaded.get_vocab().values()) + 1)
        end = end_id(loaded) if end_token else None
        return cls(loaded, separator_id(loaded), end, vocab_size, validation_fraction)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def held_out(self, document: str) -> bool:
        return in_validation(document, self.validation_fraction)

    def encoded(self, documents: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
        """Every document with its tokens."""
        after = [] if self.end is None else [self.end]
        for batch in _batches(documents):
            # split_special_tokens: a "<|endoftext|>" written in a document is text, not the end of it.
            encoded = self.tokenizer(
                batch,
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                verbose=False,
            )
            for document, ids in zip(batch, encoded["input_ids"], strict=True):
                yield document, [self.separator, *ids, *after]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups large enough for the tokenizer's threads and small enough for memory."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
