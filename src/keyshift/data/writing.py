"""Writing the store: documents tokenised, split into training and validation, and appended to files."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keyshift.data.documents import read_with_positions
from keyshift.data.tokenizer import load_tokenizer, separator_id, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_DOCUMENTS = 256  # a batch for the tokenizer ends with either
_BATCH_CHARACTERS = 1024 * 1024
_PROGRESS_BYTES = 1024 * 1024


def in_validation(document: str, validation_fraction: float) -> bool:
    """Whether ``document`` is held out. Depends on its content alone, so duplicates share a side."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < validation_fraction * 2**64


def write_store(
    directory: Path,
    files: list[Path],
    tokenizer_name: str | None,
    vocab_size: int,
    validation_fraction: float,
    fingerprint: str,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Writes the store beside ``directory`` and, when complete, moves it there in place of an older one.

    directory: absolute. files: as ``find_files`` returns them. fingerprint: kept in ``meta.json``. The others
    are as ``prepare`` takes them. Raises ``OSError`` where ``directory`` cannot be written.
    """
    size = sum(file.stat().st_size for file in files)
    total = size if tokenizer_name else 2 * size

    def documents(earlier: int) -> Iterator[str]:
        reported = earlier
        for document, position in read_with_positions(files):
            yield document
            if progress and earlier + position - reported >= _PROGRESS_BYTES:
                reported = earlier + position
                progress(reported, total)
        if progress:
            progress(earlier + size, total)

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as workspace:
        store = Path(workspace, "store")
        store.mkdir()
        if tokenizer_name:
            tokenizer = load_tokenizer(tokenizer_name)
        else:
            training = (text for text in documents(0) if not in_validation(text, validation_fraction))
            tokenizer = train_tokenizer(training, vocab_size)
        tokenizer.save_pretrained(store / "tokenizer")
        meta = _write_streams(store, documents(total - size), tokenizer, validation_fraction)
        meta |= {"tokenizer": tokenizer_name or "trained here", "fingerprint": fingerprint}
        (store / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        if directory.exists():
            directory.rename(Path(workspace, "replaced"))
        store.rename(directory)


def _write_streams(
    store: Path, documents: Iterator[str], tokenizer: PreTrainedTokenizerBase, validation_fraction: float
) -> dict[str, Any]:
    """Tokenises ``documents`` into the files of both sides; returns what ``meta.json`` says of them."""
    separator = separator_id(tokenizer)
    # Ids can have gaps, so that the largest one, not their number, decides how many rows an embedding needs.
    vocab_size = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    with ExitStack() as stack:
        train, validation = (_StreamWriter(stack, store, side, dtype) for side in ("train", "validation"))
        for batch in _batches(documents):
            # split_special_tokens: a "<|endoftext|>" written in a document is text, not the end of it.
            encoded = tokenizer(
                batch,
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                verbose=False,
            )
            for document, ids in zip(batch, encoded["input_ids"], strict=True):
                side = validation if in_validation(document, validation_fraction) else train
                side.append([separator, *ids], len(document.encode()))
    sides = {"train": train.counts, "validation": validation.counts}
    return {"sides": sides, "dtype": dtype.name, "vocab_size": vocab_size}


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


class _StreamWriter:
    """The files of one side while they are written; ``stack`` closes them."""

    def __init__(self, stack: ExitStack, store: Path, side: str, dtype: np.dtype[Any]):
        self.counts = {"tokens": 0, "bytes": 0, "documents": 0}
        self._dtype = dtype
        self._tokens = stack.enter_context((store / f"{side}.tokens").open("wb"))
        self._starts = stack.enter_context((store / f"{side}.documents").open("wb"))

    def append(self, tokens: list[int], text_bytes: int) -> None:
        self._starts.write(np.int64(self.counts["tokens"]).tobytes())
        self._tokens.write(np.array(tokens, self._dtype).tobytes())
        self.counts["tokens"] += len(tokens)
        self.counts["bytes"] += text_bytes
        self.counts["documents"] += 1
