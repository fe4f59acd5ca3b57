"""The prepared store: made once by ``prepare``, reused while its inputs stay as they are, then opened."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyshift.data.preparing import STORE_FORMAT, Plan, write_store
from keyshift.data.shards import SIDES, FileShard, missing_files, shard_file
from keyshift.data.sources import FileSource, Source, file_facts
from keyshift.data.stream import TokenStream
from keyshift.data.tokenizer import tokenizer_fingerprint
from keyshift.errors import UserError, first_line

SHARD_BYTES = 64 * 1024 * 1024  # of UTF-8: 10 billion tokens come to some 600 shards
_OURS = re.compile(
    r"meta\.json|tokenizer|(\d{5,}\.)?(train|validation)\.(tokens|documents)"
)  # also format 1's


@dataclass(frozen=True, eq=False)
class TextData:
    """A prepared corpus; its arrays are memory-mapped when first used.

    vocab_size: how many rows an embedding needs. end_token: what every document ends with, None for nothing.
    directory: where it was opened; None if it was put together in memory.
    """

    tokenizer_path: Path
    vocab_size: int
    train: TokenStream
    validation: TokenStream
    tokenizer_fingerprint: str = ""
    end_token: int | None = None
    directory: Path | None = None

    @classmethod
    def open(cls, directory: str | Path) -> TextData:
        """The store that ``prepare`` wrote in ``directory``. Reads no more than ``meta.json``.

        Raises ``UserError`` if there is none, if another version wrote it, and for a file that is missing or
        of another length than it was written; ``verify`` looks closer.
        """
        directory = Path(directory)
        meta = _read_meta(directory)
        for number, sides in enumerate(meta["shards"]):
            if missing := missing_files(directory, number, sides):
                raise UserError(f"{missing[0]}: missing or cut off; {_again(directory)}")

        def stream(side: str) -> TokenStream:
            shards = [
                FileShard.of(directory, number, side, sides[side], meta["dtype"])
                for number, sides in enumerate(meta["shards"])
            ]
            return TokenStream(shards, end_tokens=meta["end"] is not None)

        return cls(
            directory / "tokenizer",
            meta["vocab_size"],
            stream("train"),
            stream("validation"),
            meta["tokenizer_fingerprint"],
            meta["end"],
            directory,
        )

    @property
    def validations(self) -> dict[str, TokenStream]:
        """What is held out, by source; a ``Mixture`` has several."""
        return {"text": self.validation}

    @property
    def weights(self) -> dict[str, float]:
        """The share of each source."""
        return {"text": 1.0}

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads every file of the store and compares its checksum. ``progress``: bytes done, bytes to do.

        Raises ``UserError`` for the first file that is not what ``prepare`` wrote.
        """
        assert self.directory is not None
        meta = _read_meta(self.directory)
        files = {
            shard_file(self.directory, number, side, part): facts
            for number, sides in enumerate(meta["shards"])
            for side in SIDES
            for part, facts in sides[side]["files"].items()
        }
        if tokenizer_fingerprint(self.tokenizer_path) != meta["tokenizer_fingerprint"]:
            raise UserError(
                f"{self.tokenizer_path}: not the tokenizer of this store; {_again(self.directory)}"
            )
        total = sum(facts["size"] for facts in files.values())
        done = 0
        for path, facts in files.items():
            with path.open("rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != facts["sha256"]:
                    raise UserError(f"{path}: corrupt, its checksum differs; {_again(self.directory)}")
            done += facts["size"]
            if progress:
                progress(done, total)

    def summary(self) -> dict[str, Any]:
        """Facts for a report. ``tokens`` counts separators and end tokens; ``tokens_per_byte`` (validation)
        does not."""
        counts = {
            name: {"tokens": side.token_count, "bytes": side.text_bytes, "documents": side.document_count}
            for name, side in (("train", self.train), ("validation", self.validation))
        }
        tokens_per_byte = self.validation.text_tokens / max(1, self.validation.text_bytes)
        return {**counts, "vocab_size": self.vocab_size, "tokens_per_byte": tokens_per_byte}

    def bits_per_byte(self, loss_nats_per_token: float) -> float:
        """Validation loss in bits per UTF-8 byte, see ``TokenStream.bits_per_byte``."""
        return self.validation.bits_per_byte(loss_nats_per_token)


def prepare(
    source: Source | Sequence[str | Path],
    directory: str | Path,
    *,
    tokenizer: str | None,
    vocab_size: int = 32_768,
    sequence_length: int = 1,
    batch_size: int = 1,
    validation_fraction: float = 0.05,
    end_token: bool = False,
    workers: int = 1,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    keep: bool = False,
) -> TextData:
    """Documents, tokenised into a store in ``directory``; an up-to-date store is reused without work.

    A document is held out iff a hash of its content falls below ``validation_fraction``. The store has its
    documents in the order of the source, in shards of ``shard_bytes`` of text.

    Args:
        source: a ``FileSource`` or a ``DatasetSource``, or the paths of files.
        tokenizer: a folder, a ``tokenizer.json`` or a hub name; None trains one of ``vocab_size`` tokens
            (else unused) on the first 256 MiB of the training side.
        sequence_length, batch_size: only to check that each side fills a batch.
        end_token: whether an end token follows every document, which a model then learns to predict.
        workers: processes that tokenise. With more than one, a script needs the guard
            ``if __name__ == "__main__":``, and the text of ``workers`` + 2 shards is in memory. The result
            does not depend on it. One alone uses the tokenizer's own threads.
        progress: called with bytes done and bytes to do: the size of the source, and what of it is read once
            more to train a tokenizer. The latter is 0 where it is not known.
        keep: a store of other texts is not replaced but an error.

    The store appears in one piece. An interrupted call leaves ``directory`` as it was; the shards that it
    finished wait in ``.NAME.partial`` beside it, and the same call goes on behind them.

    Raises:
        UserError: what the source and the tokenizer functions reject, numbers out of range, a side too small
            for a batch, and a ``directory`` that holds other files, cannot be written or is being prepared.
        RunError: a worker died, or a data set broke off.
    """
    _check_numbers(
        sequence_length=sequence_length, batch_size=batch_size, workers=workers, shard_bytes=shard_bytes
    )
    if not 0 < validation_fraction < 1:
        raise UserError(
            f"validation_fraction is {validation_fraction}; it should be between 0 and 1, like 0.05"
        )
    if isinstance(source, Sequence):
        source = FileSource(source)
    directory = Path(os.path.abspath(directory))
    settings = [tokenizer or vocab_size, validation_fraction, end_token, shard_bytes]
    fingerprint = _fingerprint(source, tokenizer, settings)
    fresh = not _reusable(directory, fingerprint)
    if fresh:
        if keep and directory.exists():
            raise UserError(
                f"directory {str(directory)!r} was made from other text or with other settings (its files' "
                "names, sizes or times differ, or the store is damaged or of an earlier version): results "
                "would not fit together; pass another --out"
            )
        plan = Plan(
            source,
            tokenizer,
            vocab_size,
            validation_fraction,
            end_token,
            shard_bytes,
            workers,
            fingerprint,
        )
        try:
            write_store(directory, plan, progress)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"directory {str(directory)!r}: cannot be written ({reason}); choose another"
            ) from error
    meta = _read_meta(directory)
    if fresh and not all(side["tokens"] for side in meta["sides"].values()):
        shutil.rmtree(directory)  # of no use to anybody, and in the way of the next try
    _check_sizes(meta, batch_size, sequence_length, validation_fraction)
    return TextData.open(directory)


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it should be at least 1")


def _fingerprint(source: Source, tokenizer: str | None, settings: list[Any]) -> str:
    """A hash of all the store depends on; of files, where they are, their size and when they changed."""
    # A tokenizer on disk can be trained again under its old name, so its files count as inputs too.
    path = Path(tokenizer) if tokenizer else None
    entries = [] if path is None else [path] if path.is_file() else sorted(path.glob("*"))
    tokenizer_files = [file_facts(entry) for entry in entries if entry.is_file()]
    content = json.dumps([STORE_FORMAT, settings, source.facts(), tokenizer_files])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / "meta.json"
    if not path.is_file():
        raise UserError(
            f"{directory}: not a prepared store (no meta.json); make one with keyshift data prepare"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        found = meta.get("format", 1)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({first_line(error)}); {_again(directory)}") from error
    if found != STORE_FORMAT:
        raise UserError(
            f"{path}: a store of format {found}, this version reads {STORE_FORMAT}; {_again(directory)}"
        )
    return meta


def _again(directory: Path) -> str:
    return f"remove {str(directory)!r} and prepare it again"


def _reusable(directory: Path, fingerprint: str) -> bool:
    """Whether ``directory`` holds this very store. Raises ``UserError`` if it holds what is not ours."""
    if not directory.exists():
        return False
    names = set(os.listdir(directory)) if directory.is_dir() else {directory.name}
    if names >= {"meta.json", "tokenizer"}:
        content = (directory / "meta.json").read_text(errors="replace")
        if fingerprint in content:
            return _whole(directory)
    if other := sorted(name for name in names if not _OURS.fullmatch(name)):
        raise UserError(
            f"directory {str(directory)!r}: holds {other[0]!r}, which is not part of a prepared store and "
            "would be lost; choose a new or empty directory"
        )
    return False


def _whole(directory: Path) -> bool:
    """Whether the files of a store are as long as its description says."""
    shards = _read_meta(directory)["shards"]
    return not any(missing_files(directory, number, sides) for number, sides in enumerate(shards))


def _check_sizes(
    meta: dict[str, Any], batch_size: int, sequence_length: int, validation_fraction: float
) -> None:
    needed = batch_size * sequence_length
    sides = meta["sides"]
    if empty := [side for side, counts in sides.items() if not counts["tokens"]]:
        count = sum(counts["documents"] for counts in sides.values())
        raise UserError(
            f"validation_fraction is {validation_fraction}, and of {count} documents it leaves none for "
            f"{' and '.join(empty)}; {'lower' if 'train' in empty else 'raise'} it, or pass more text"
        )
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
