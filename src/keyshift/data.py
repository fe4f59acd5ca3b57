"""Real text for language modelling: files in, tokenised and packed streams out, document boundaries kept.

``prepare`` tokenises text files into a memory-mapped store and returns a ``TextData``; its two
``TokenStream``s hand out batches. Every step streams: memory is bounded by the longest single document (and,
while a tokenizer is trained, by the number of distinct words), not by the size of the corpus.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keyshift.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKEN = "<|endoftext|>"
IGNORED_LABEL = -100  # what Hugging Face's and PyTorch's cross entropy leave out

_DOCUMENT_BYTES = 16 * 1024  # plain text longer than this is cut into several documents
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1024 * 1024
_PROGRESS_BYTES = 1024 * 1024
_STORE_FORMAT = 1  # part of the fingerprint: raise it when what is stored changes
_STORE_FILES = {
    "meta.json",
    "tokenizer",
    *(f"{side}.{part}" for side in ("train", "validation") for part in ("tokens", "documents")),
}


# Files to documents


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The text files that ``paths`` name: absolute, sorted, each file once (whatever links lead to it).

    Each path is a file, a folder (searched recursively, links to folders not followed) or a glob (``**``
    included; a folder it matches is searched). Folders and globs yield the supported suffixes, in either
    case, and skip hidden files and folders; what is named outright is taken even if hidden.

    Raises ``UserError`` for a missing path, a path without any supported file, a file named outright with
    another suffix, and a file or folder that may not be read.
    """
    if not paths:
        raise UserError(f"PATH: none given; pass files ({_suffixes()}), folders or globs")
    found = sorted({Path(os.path.abspath(file)) for path in paths for file in _expand(os.fspath(path))})
    unique: dict[Path, Path] = {}
    for file in found:
        _check_readable(file)
        unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _expand(path: str) -> list[str]:
    """The supported files that one argument names."""
    if os.path.isfile(path):
        if not _supported(path):
            raise UserError(f"PATH {path!r}: unsupported suffix; text is read from {_suffixes()}")
        return [path]
    if os.path.isdir(path):
        files = list(_walk(path))
    elif any(character in path for character in "*?["):
        files = []
        for match in glob.glob(path, recursive=True):
            if os.path.isdir(match):
                files += _walk(match)
            elif _supported(match):
                files.append(match)
    else:
        raise UserError(
            f"PATH {path!r}: no such file or folder; pass a file ({_suffixes()}), a folder or a glob"
        )
    if not files:
        raise UserError(
            f"PATH {path!r}: no text files there; {_suffixes()} are read, hidden files are skipped"
        )
    return files


def _walk(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise UserError(
            f"PATH {error.filename!r}: cannot be searched ({error.strerror}); change its permissions"
        )

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = os.path.join(parent, name)
            if not name.startswith(".") and _supported(file):
                yield file


def _supported(path: str | Path) -> bool:
    return Path(path).suffix.lower() in _READERS and os.path.isfile(path)


def _suffixes() -> str:
    return ", ".join(_READERS)


def _check_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        reason = error.strerror
        raise UserError(f"PATH {str(file)!r}: cannot be read ({reason}); change its permissions") from error


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """The documents of ``files`` (as ``find_files`` returns them), streamed in order; blank ones skipped.

    - ``.txt``, ``.md``: UTF-8, byte order mark accepted. A file of up to 16 KiB is one document. A longer
      one is cut after the first blank line past each 16 KiB; where the 16 KiB after that hold none, after
      their first newline; where they hold no newline, at 32 KiB. Nothing is dropped and line ends are left
      as they are.
    - ``.jsonl``: one JSON object per line, the document is its string ``"text"``; blank lines are skipped.
    - ``.parquet``: the column ``text``, nulls skipped.

    Raises ``UserError`` for a binary or wrongly encoded text file (with the byte offset), a malformed line
    (with its number), a corrupt parquet file or one without the column, a file that cannot be read, and
    when there is no document at all.
    """
    return (document for document, _ in _read(files))


def _read(files: Iterable[Path]) -> Iterator[tuple[str, int]]:
    """Documents, each with the bytes of input read so far: over all files, for progress."""
    empty = True
    earlier = 0
    for file in files:
        try:
            for document, position in _READERS[file.suffix.lower()](file):
                if document and not document.isspace():
                    empty = False
                    yield document, earlier + position
            earlier += file.stat().st_size
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error
    if empty:
        raise UserError("PATH: the files hold no text, every document is empty; pass files with text")


def _read_text(path: Path) -> Iterator[tuple[str, int]]:
    # Cutting bytes and decoding each piece keeps the offsets in error messages exact. Newlines never fall
    # inside a UTF-8 sequence; after a hard cut the decoder leaves a split character to the next piece.
    with path.open("rb") as handle:
        offset = 0
        buffer = b""
        while True:
            buffer += handle.read(2 * _DOCUMENT_BYTES - len(buffer))
            if not buffer:
                return
            at_end = len(buffer) < 2 * _DOCUMENT_BYTES
            piece = buffer[: _cut(buffer)]
            if (nul := piece.find(0)) >= 0:
                raise UserError(f"{path}: binary file, NUL at byte {offset + nul}; pass UTF-8 text")
            try:
                document, used = codecs.utf_8_decode(piece, "strict", at_end)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: not UTF-8 at byte {offset + error.start} ({error.reason}); pass UTF-8 text"
                ) from error
            yield document.removeprefix("\ufeff") if offset == 0 else document, offset + used
            offset += used
            buffer = buffer[used:]


def _cut(buffer: bytes) -> int:
    """Where the document at the start of ``buffer`` (up to 128 KiB) ends; see ``read_documents``."""
    if blank := _BLANK_LINE.search(buffer, _DOCUMENT_BYTES):
        return blank.end()
    return buffer.find(b"\n", _DOCUMENT_BYTES) + 1 or len(buffer)


def _read_jsonl(path: Path) -> Iterator[tuple[str, int]]:
    with path.open("rb") as handle:
        position = 0
        for number, line in enumerate(handle, start=1):
            position += len(line)
            if not line.strip():
                continue
            try:
                document = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))["text"]
                document.encode()  # a string, and one without the lone surrogates that JSON can spell
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(
                    f'{path}:{number}: not a JSON object with a string "text" '
                    f'({type(error).__name__}: {error}); each line should be like {{"text": "..."}}'
                ) from error
            yield document, position


def _read_parquet(path: Path) -> Iterator[tuple[str, int]]:
    import pyarrow
    from pyarrow import parquet

    size = path.stat().st_size
    rows = 0
    try:
        # With a buffer pyarrow streams the pages of a row group; without, it reads the column chunk at once.
        with parquet.ParquetFile(path, buffer_size=1024 * 1024) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise UserError(f'{path}: no column "text"; its columns: {", ".join(columns)}')
            for batch in file.iter_batches(batch_size=_BATCH_DOCUMENTS, columns=["text"]):
                for document in batch.column(0).to_pylist():
                    rows += 1
                    if document is None:
                        continue
                    if not isinstance(document, str):
                        kind = type(document).__name__
                        raise UserError(f'{path}: column "text" holds {kind} values; it should hold strings')
                    yield document, size * rows // file.metadata.num_rows
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path}: corrupt parquet file after row {rows} ({_first_line(error)}); write it again"
        ) from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, int]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def in_validation(document: str, validation_fraction: float) -> bool:
    """Whether ``document`` is held out. Depends on its content alone, so duplicates share a side."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < validation_fraction * 2**64


# Tokenizers


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``documents``, which are streamed. Deterministic.

    It has the 256 bytes, so that any text round-trips, and ``<|endoftext|>`` (id 0) as bos, eos and pad
    token. A small corpus can run out of pairs to merge before ``vocab_size`` tokens. Raises ``UserError``
    if ``vocab_size`` is below the 257 tokens that are always there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 257:
        raise UserError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SPECIAL_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL_TOKEN, eos_token=SPECIAL_TOKEN, pad_token=SPECIAL_TOKEN
    )


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the Hugging Face hub. Raises ``UserError`` if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # transformers lets through whatever went wrong, of any type
        raise UserError(
            f"tokenizer {str(name_or_path)!r} cannot be loaded ({_first_line(error)}); "
            "pass a folder with tokenizer files, a model name on the hub, or none to train one"
        ) from error


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token put before each document: bos, else eos. Raises ``UserError`` if there is neither."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise UserError(
        f"tokenizer {tokenizer.name_or_path!r} has neither a bos nor an eos token to separate documents; "
        "pass one that has, or none to train one"
    )


# Batches


@lru_cache(maxsize=2)  # a batch can straddle two epochs
def _order(windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(windows)


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The documents of one side, end to end. Each is stored as the separator token followed by its tokens.

    tokens: [N] uint16 or uint32. document_starts: [D] int64, ascending, index of each document's separator.
    text_bytes: UTF-8 bytes of the documents.
    """

    tokens: NDArray[np.unsignedinteger]
    document_starts: NDArray[np.int64]
    text_bytes: int

    @property
    def text_tokens(self) -> int:
        """Tokens without the separators."""
        return len(self.tokens) - len(self.document_starts)

    def batch(self, step: int, batch_size: int, sequence_length: int, seed: int) -> dict[str, torch.Tensor]:
        """Batch ``step`` of endless shuffled training; a pure function of its arguments.

        The stream is cut into windows of ``sequence_length`` tokens (an incomplete last one is left out).
        Each epoch visits every window once, in an order drawn from (seed, epoch); epochs follow each other
        without a gap.

        Returns int64 tensors [batch_size, sequence_length]: ``input_ids``; ``position_ids``, which restart
        at 0 at the window's start and at each document's start; ``labels``, equal to ``input_ids`` but -100
        at those starts, because such a token is not predicted from its own document. The model shifts the
        labels.

        The stream must hold at least one window, which ``prepare`` checks.
        """
        windows = len(self.tokens) // sequence_length
        epochs, places = np.divmod(step * batch_size + np.arange(batch_size), windows)
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            chosen[now] = _order(windows, seed, int(epoch))[places[now]]
        return self._windows(chosen, sequence_length)

    def sequential(
        self, batch_size: int, sequence_length: int, max_batches: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Up to ``max_batches`` batches for evaluation, the same ones every time.

        Distinct windows in the order of the stream, spread evenly over it; the last batch can be smaller.
        Each batch is as ``batch`` returns it.
        """
        windows = len(self.tokens) // sequence_length
        count = min(windows, batch_size * max_batches)
        chosen = np.arange(count) * windows // max(count, 1)
        for first in range(0, count, batch_size):
            yield self._windows(chosen[first : first + batch_size], sequence_length)

    def _windows(self, windows: NDArray[np.int64], sequence_length: int) -> dict[str, torch.Tensor]:
        """The windows with these numbers [B], as tensors."""
        import torch

        first_B1 = windows[:, None] * sequence_length
        index_BT = first_B1 + np.arange(sequence_length)
        input_ids = self.tokens[index_BT].astype(np.int64)
        document_BT = np.searchsorted(self.document_starts, index_BT, side="right") - 1
        position_ids = index_BT - np.maximum(self.document_starts[document_BT], first_B1)
        labels = np.where(position_ids == 0, IGNORED_LABEL, input_ids)
        arrays = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


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


# The prepared store


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
) -> TextData:
    """Text files, tokenised into a store in ``directory``; an up-to-date store is reused without work.

    A document is held out iff a hash of its content falls below ``validation_fraction``. ``tokenizer`` is a
    folder or a hub name; None trains one of ``vocab_size`` tokens (else unused) on the training side.
    ``sequence_length`` and ``batch_size`` only serve to check that each side fills a batch. ``progress`` is
    called with bytes done and bytes to do: the size of the files, twice that when a tokenizer is trained,
    which reads them once more.

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
        try:
            _build(directory, files, tokenizer, vocab_size, validation_fraction, fingerprint, progress)
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
        return True
    if other := sorted(names - _STORE_FILES):
        raise UserError(
            f"directory {str(directory)!r}: holds {other[0]!r}, which is not part of a prepared store and "
            "would be lost; choose a new or empty directory"
        )
    return False


def _build(
    directory: Path,
    files: list[Path],
    tokenizer_name: str | None,
    vocab_size: int,
    validation_fraction: float,
    fingerprint: str,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Writes the store beside ``directory`` and, when complete, moves it there in place of an older one."""
    size = sum(file.stat().st_size for file in files)
    total = size if tokenizer_name else 2 * size

    def documents(earlier: int) -> Iterator[str]:
        reported = earlier
        for document, position in _read(files):
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
