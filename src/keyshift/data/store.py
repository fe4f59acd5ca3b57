"""The prepared store: made once by ``prepare``, reused while its inputs stay as they are, then opened."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyshift.data.documents import find_files
from keyshift.data.stream import TokenStream
from keyshift.data.writing import write_store
from keyshift.errors import UserError

_STORE_FORMAT = 1  # part of the fingerprint: raise it when what is stored changes
_STORE_FILES = {
    "meta.json",
    "tokenizer",
    *(f"{side}.{part}" for side in ("train", "validation") for part in ("tokens", "documents")),
}


@dataclass(frozen=True, eq=False)
class TextData:
    """A prepared corpus; its arrays are memory-mapped. vocab_size: how many rows an embedding needs."""

    tokenizer_path: Path
    vocab_size: int
    train: TokenStream
    validation: TokenStream

    @classmethod
    def open(cls, directory: str | Path) -> TextData:
        """The store that ``prepare`` wrote in ``directory``. Reads no more than ``meta.json``."""
        directory = Path(directory)
        meta = _read_meta(directory)

        def stream(side: str) -> TokenStream:
            def mapped(part: str, dtype: str) -> NDArray[Any]:
                return np.asarray(np.memmap(directory / f"{side}.{part}", dtype, mode="r"))

            return TokenStream(
                mapped("tokens", meta["dtype"]), mapped("documents", "int64"), meta["sides"][side]["bytes"]
            )

        return cls(directory / "tokenizer", meta["vocab_size"], stream("train"), stream("validation"))

    def summary(self) -> dict[str, Any]:
        """Facts for a report. ``tokens`` counts separators; ``tokens_per_byte`` (validation) does not."""
        sides = {"train": self.train, "validation": self.validation}
        counts = {
            name: {
                "tokens": len(side.tokens),
                "bytes": side.text_bytes,
                "documents": len(side.document_starts),
            }
            for name, side in sides.items()
        }
        tokens_per_byte = self.validation.text_tokens / self.validation.text_bytes
        return {**counts, "vocab_size": self.vocab_size, "tokens_per_byte": tokens_per_byte}

    def bits_per_byte(self, loss_nats_per_token: float) -> float:
        """Validation loss in bits per UTF-8 byte, comparable across tokenizers.

        loss × (validation tokens without separators ÷ validation bytes) ÷ ln 2, with the mean loss in nats
        per predicted token. Tokens that evaluation did not predict (a window's first) count at the mean
        loss.
        """
        return loss_nats_per_token * self.validation.text_tokens / self.validation.text_bytes / math.log(2)


def prepare(
    paths: Sequence[str | Path],
    directory: str | Path,
    *,
    tokenizer: str | None,
    vocab_size: int,
    sequence_length: int,
    batch_size: int,
    validation_fraction: float = 0.05,
    progress: Callable[[int, int], None] | None = None,
    keep: bool = False,
) -> TextData:
    """Text files, tokenised into a store in ``directory``; an up-to-date store is reused without work.

    A document is held out iff a hash of its content falls below ``validation_fraction``. ``tokenizer`` is a
    folder or a hub name; None trains one of ``vocab_size`` tokens (else unused) on the training side.
    ``sequence_length`` and ``batch_size`` only serve to check that each side fills a batch. ``progress`` is
    called with bytes done and bytes to do: the size of the files, twice that when a tokenizer is trained,
    which reads them once more. With ``keep`` a store of other texts is not replaced but an error.

    The store appears in one piece: an interrupted run leaves ``directory`` as it was.

    Raises ``UserError`` for what ``find_files``, ``read_documents`` and the tokenizer functions reject, for
    numbers out of range, a side too small for a batch, and a ``directory`` that holds other files or cannot
    be written.
    """
    for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name} is {value}; it should be at least 1")
    if not 0 < validation_fraction < 1:
        raise UserError(
            f"validation_fraction is {validation_fraction}; it should be between 0 and 1, like 0.05"
        )
    files = find_files(paths)
    directory = Path(os.path.abspath(directory))
    fingerprint = _fingerprint(files, tokenizer, vocab_size, validation_fraction)
    if not _reusable(directory, fingerprint):
        if keep and directory.exists():
            raise UserError(
                f"directory {str(directory)!r} was made from other text (its files' names, sizes or times "
                "differ, or the store is damaged): results would not fit together; pass another --out"
            )
        try:
            write_store(directory, files, tokenizer, vocab_size, validation_fraction, fingerprint, progress)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"directory {str(directory)!r}: cannot be written ({reason}); choose another"
            ) from error
    _check_sizes(_read_meta(directory), batch_size, sequence_length, validation_fraction)
    return TextData.open(directory)


def _fingerprint(
    files: list[Path], tokenizer: str | None, vocab_size: int, validation_fraction: float
) -> str:
    """A hash of all the store depends on; of files, where they are, their size and when they changed."""

    def facts(file: Path) -> tuple[str, int, int]:
        status = file.stat()
        return str(file.resolve()), status.st_size, status.st_mtime_ns

    # A tokenizer on disk can be trained again under its old name, so its files count as inputs too.
    entries = sorted(Path(tokenizer).glob("*")) if tokenizer else []
    tokenizer_files = [entry for entry in entries if entry.is_file()]
    settings = [_STORE_FORMAT, tokenizer or vocab_size, validation_fraction]
    content = json.dumps(
        [settings, [facts(file) for file in files], [facts(file) for file in tokenizer_files]]
    )
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _read_meta(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "meta.json").read_text(encoding="utf-8"))


def _reusable(directory: Path, fingerprint: str) -> bool:
    """Whether ``directory`` holds this very store. Raises ``UserError`` if it holds what is not ours."""
    if not directory.exists():
        return False
    names = set(os.listdir(directory)) if directory.is_dir() else {directory.name}
    if names >= _STORE_FILES and fingerprint in (directory / "meta.json").read_text(errors="replace"):
        return _whole(directory)
    if other := sorted(names - _STORE_FILES):
        raise UserError(
            f"directory {str(directory)!r}: holds {other[0]!r}, which is not part of a prepared store and "
            "would be lost; choose a new or empty directory"
        )
    return False


def _whole(directory: Path) -> bool:
    """Whether the files of a store hold what its description says."""
    meta = _read_meta(directory)
    width = np.dtype(meta["dtype"]).itemsize
    return all(
        (directory / f"{side}.tokens").stat().st_size == counts["tokens"] * width
        and (directory / f"{side}.documents").stat().st_size == counts["documents"] * 8
        for side, counts in meta["sides"].items()
    )


def _check_sizes(
    meta: dict[str, Any], batch_size: int, sequence_length: int, validation_fraction: float
) -> None:
    needed = batch_size * sequence_length
    sides = meta["sides"]
    if short := [side for side, counts in sides.items() if counts["tokens"] < needed]:
        sizes = " and ".join(
            f"{side} holds {counts['tokens']} tokens in {counts['documents']} documents"
            for side, counts in sides.items()
        )
        raise UserError(
            f"too little text for {' and '.join(short)}: {sizes}, a batch takes batch_size {batch_size} x "
            f"sequence_length {sequence_length} = {needed} tokens; lower one of these or pass more text "
            f"(validation_fraction is {validation_fraction})"
        )
