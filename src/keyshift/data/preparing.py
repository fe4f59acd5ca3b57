"""Making a store: documents in blocks, a shard for each, perhaps in several processes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from keyshift.data.encoding import Encoder, in_validation
from keyshift.data.shards import SIDES, write_shard
from keyshift.data.sources import Reading, Source
from keyshift.data.staging import Record, Staging
from keyshift.data.tokenizer import load_tokenizer, separator_id, tokenizer_fingerprint, train_tokenizer
from keyshift.data.workers import write_shards

STORE_FORMAT = 2  # part of the fingerprint: raise it when what is stored changes
TOKENIZER_BYTES = 256 * 1024 * 1024  # of the training side, from the start, that a tokenizer is trained on
_PROGRESS_BYTES = 1024 * 1024  # a report comes after so much of the source, or so long
_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """What a store is made of, as ``prepare`` takes it. All but ``workers`` decide on the content."""

    source: Source
    tokenizer: str | None
    vocab_size: int
    validation_fraction: float
    end_token: bool
    shard_bytes: int
    workers: int
    fingerprint: str


def write_store(directory: Path, plan: Plan, progress: Callable[[int, int], None] | None) -> None:
    """Writes the store beside ``directory`` and, when complete, moves it there in place of an older one.

    Finished shards wait in a ``Staging``: after an interruption, the next call with the same plan goes on
    behind them. Raises ``UserError`` if another process is at it, ``OSError`` where ``directory`` cannot be
    written, ``RunError`` if a worker died.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Staging.beside(directory)
    reported = _Reported(plan, progress)
    with staging.claimed(plan.fingerprint):
        tokenizer = staging.store / "tokenizer"
        if not tokenizer.exists():
            _save_tokenizer(tokenizer, plan, reported)
        encoder = Encoder.load(tokenizer, plan.end_token, plan.validation_fraction)
        _write_missing(staging, plan, encoder, reported.tokenising)
        reported.complete()
        description = json.dumps(_description(staging, plan, encoder), indent=1)
        (staging.store / "meta.json").write_text(f"{description}\n", encoding="utf-8")
        if directory.exists():
            directory.rename(staging.folder / "replaced")
        staging.store.rename(directory)
        shutil.rmtree(staging.folder)


def _save_tokenizer(folder: Path, plan: Plan, reported: _Reported) -> None:
    if plan.tokenizer:
        tokenizer = load_tokenizer(plan.tokenizer)
        separator_id(tokenizer)  # an error now names what was passed, and no copy
    else:
        tokenizer = train_tokenizer(_training_side(plan, reported), plan.vocab_size)
    temporary = folder.parent.with_name("tokenizer")
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


def _training_side(plan: Plan, reported: _Reported) -> Iterator[str]:
    """The training side's documents from the first on, ``TOKENIZER_BYTES`` of them."""
    reading = plan.source.read()
    left = TOKENIZER_BYTES
    for document in reading:
        if left <= 0:
            break
        reported.training(reading.bytes_read)
        if not in_validation(document, plan.validation_fraction):
            left -= len(document.encode())
            yield document
    reported.training(TOKENIZER_BYTES)


def _write_missing(staging: Staging, plan: Plan, encoder: Encoder, progress: Callable[[int], None]) -> None:
    """Every shard that is not finished yet."""
    first = staging.next()
    last = staging.finished.get(first - 1)
    reading = plan.source.read(last.position if last else None)
    blocks = _blocks(reading, first, plan.shard_bytes)
    if plan.workers > 1 and not 0 < plan.source.size <= plan.shard_bytes:  # for one shard none is started
        write_shards(staging, reading, blocks, encoder, plan.workers, progress)
        return
    for number, block in blocks:
        documents = _watched(block, reading, progress)
        if number in staging.finished:
            for _ in documents:
                pass
        else:
            sides = write_shard(staging.store, number, documents, encoder)
            staging.record(number, Record(sides, reading.position, reading.bytes_read))


def _blocks(reading: Reading, first: int, shard_bytes: int) -> Iterator[tuple[int, Iterator[str]]]:
    """The documents in blocks of ``shard_bytes`` or just over, numbered; each to be used up before the next.

    Where a block ends depends on its documents alone. Between two blocks, ``reading`` stands at the end of
    the first of them.
    """
    documents = iter(reading)
    for begun in documents:
        yield first, _until_full(chain((begun,), documents), shard_bytes)
        first += 1


def _until_full(documents: Iterator[str], shard_bytes: int) -> Iterator[str]:
    for document in documents:
        yield document
        shard_bytes -= len(document.encode())
        if shard_bytes <= 0:
            return


def _watched(documents: Iterator[str], reading: Reading, progress: Callable[[int], None]) -> Iterator[str]:
    for document in documents:
        yield document
        progress(reading.bytes_read)
    progress(reading.bytes_read)


def _description(staging: Staging, plan: Plan, encoder: Encoder) -> dict[str, Any]:
    """What ``meta.json`` says: of the store, and of every shard."""
    shards = [staging.finished[number].sides for number in sorted(staging.finished)]
    totals = {
        side: {what: sum(shard[side][what] for shard in shards) for what in ("tokens", "documents", "bytes")}
        for side in SIDES
    }
    return {
        "format": STORE_FORMAT,
        "fingerprint": plan.fingerprint,
        "tokenizer": plan.tokenizer or "trained here",
        "tokenizer_fingerprint": tokenizer_fingerprint(staging.store / "tokenizer"),
        "vocab_size": encoder.vocab_size,
        "dtype": encoder.dtype.name,
        "separator": encoder.separator,
        "end": encoder.end,
        "validation_fraction": plan.validation_fraction,
        "sides": totals,
        "shards": shards,
    }


class _Reported:
    """Progress over the bytes of the source, which is begun twice if a tokenizer is trained."""

    def __init__(self, plan: Plan, progress: Callable[[int, int], None] | None):
        self._progress = progress
        size = plan.source.size if progress else 0
        self._before = 0 if plan.tokenizer else min(size, TOKENIZER_BYTES)
        self._total = self._before + size
        self._last = 0
        self._spoke = time.monotonic()

    def training(self, bytes_read: int) -> None:
        self._report(min(bytes_read, self._before), self._before)

    def tokenising(self, bytes_read: int) -> None:
        self._report(self._before + bytes_read, self._total)

    def complete(self) -> None:
        """A data set's size is not exactly what is read of it."""
        if self._last != self._total:
            self.tokenising(self._total - self._before)

    def _report(self, done: int, end: int) -> None:
        done = max(done, self._last)  # of what several workers did, it is an estimate
        if self._progress is None:
            return
        now = time.monotonic()
        waited = now - self._spoke >= _PROGRESS_SECONDS  # the caller may use it to stop the work
        if done - self._last >= _PROGRESS_BYTES or (done == end and done != self._last) or waited:
            self._last, self._spoke = done, now
            self._progress(done, self._total)
