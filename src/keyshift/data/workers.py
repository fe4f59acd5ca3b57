"""Shards written by processes of their own; the documents are read in this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyshift.data.encoding import Encoder
from keyshift.data.shards import write_shard
from keyshift.data.sources import Reading
from keyshift.data.staging import Record, Staging
from keyshift.errors import RunError

_WAITING = 2  # blocks read ahead, beyond those that workers are at
_POLL_SECONDS = 0.5


def write_shards(
    staging: Staging,
    reading: Reading,
    blocks: Iterator[tuple[int, Iterator[str]]],
    encoder: Encoder,
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Writes the ``blocks`` of ``reading`` that are not finished, each as soon as a worker is free.

    Memory: the text of ``workers`` + 2 blocks. ``progress`` is called with the bytes of the source that are
    tokenised. Raises ``RunError`` if a worker died; whatever else goes wrong in one is raised here.
    """
    context = multiprocessing.get_context("spawn")
    # Without locks, which a worker that is killed could leave locked for the others.
    stop, counts = context.RawValue("b"), context.RawArray("q", workers + _WAITING)
    pool = ProcessPoolExecutor(workers, context, _start, (stop, counts, staging.store, encoder.settings))
    pending: dict[Future[dict[str, Any]], _Block] = {}
    skipped = begun = reading.bytes_read
    given = finished = 0  # documents, with the bytes of the source from ``skipped`` to ``begun``

    def collect(limit: int) -> None:
        """Waits until no more than ``limit`` blocks are under way."""
        nonlocal finished
        while len(pending) > limit:
            for future in wait(pending, _POLL_SECONDS, FIRST_COMPLETED).done:
                block = pending.pop(future)
                staging.record(block.number, Record(future.result(), block.position, block.bytes_read))
                finished += block.documents
            tokenised = finished + sum(counts[block.slot] for block in pending.values())
            progress(skipped + (begun - skipped) * tokenised // max(given, 1))

    try:
        for number, texts in blocks:
            documents = list(texts)
            if number in staging.finished:
                skipped += reading.bytes_read - begun
            else:
                given += len(documents)
                slot = min(set(range(len(counts))) - {block.slot for block in pending.values()})
                counts[slot] = 0
                block = _Block(number, slot, len(documents), reading.position, reading.bytes_read)
                pending[pool.submit(_write, number, slot, documents)] = block
            begun = reading.bytes_read
            del documents
            collect(workers + _WAITING - 1)
        collect(0)
    except BrokenProcessPool as error:
        raise RunError(
            f"a process that wrote shards died, perhaps for lack of memory (workers={workers}); the same "
            "command goes on from the last finished shard, also with fewer workers"
        ) from error
    finally:
        stop.value = 1  # cuts short what is under way after an error
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Block:
    """A block under way: where its worker counts documents, and where the source stands after it."""

    number: int
    slot: int
    documents: int
    position: Any
    bytes_read: int


class _Stopped(Exception):
    """The parent wants no more of it."""


_stop: Any  # a flag and counts in memory that all processes share
_counts: Any
_folder: Path
_encoder: Encoder


def _start(stop: Any, counts: Any, folder: Path, settings: tuple[Any, ...]) -> None:
    """The beginning of a worker. Ctrl-C in the terminal is for the parent; without a parent it ends."""
    global _stop, _counts, _folder, _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _stop, _counts, _folder = stop, counts, folder
    _encoder = Encoder.load(folder / "tokenizer", *settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write(number: int, slot: int, documents: list[str]) -> dict[str, Any]:
    return write_shard(_folder, number, _counted(documents, slot), _encoder)


def _counted(documents: list[str], slot: int) -> Iterator[str]:
    for count, document in enumerate(documents, start=1):
        if _stop.value:
            raise _Stopped
        yield document
        _counts[slot] = count
