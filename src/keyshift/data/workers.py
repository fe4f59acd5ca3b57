"""Shards written by processes of their own; the documents are read in this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
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
    stop, tokenised = context.Event(), context.Value("q")
    pool = ProcessPoolExecutor(workers, context, _start, (stop, tokenised, staging.store, encoder.settings))
    pending: dict[Future[dict[str, Any]], tuple[int, Any, int]] = {}
    skipped = begun = reading.bytes_read
    given = 0  # documents to the workers, with the bytes of the source from ``skipped`` to ``begun``

    def collect(limit: int) -> None:
        """Waits until no more than ``limit`` blocks are under way."""
        while len(pending) > limit:
            finished, _ = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
            for future in finished:
                number, position, bytes_read = pending.pop(future)
                staging.record(number, Record(future.result(), position, bytes_read))
            progress(skipped + (begun - skipped) * tokenised.value // max(given, 1))

    try:
        for number, block in blocks:
            documents = list(block)
            if number in staging.finished:
                skipped += reading.bytes_read - begun
            else:
                given += len(documents)
                future = pool.submit(_write, number, documents)
                pending[future] = (number, reading.position, reading.bytes_read)
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
        stop.set()  # cuts short what is under way after an error
        pool.shutdown(cancel_futures=True)


class _Stopped(Exception):
    """The parent wants no more of it."""


_stop: Event
_tokenised: Synchronized[int]
_folder: Path
_encoder: Encoder


def _start(stop: Event, tokenised: Synchronized[int], folder: Path, settings: tuple[Any, ...]) -> None:
    """The beginning of a worker. Ctrl-C in the terminal is for the parent; without a parent it ends."""
    global _stop, _tokenised, _folder, _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _stop, _tokenised, _folder = stop, tokenised, folder
    _encoder = Encoder.load(folder / "tokenizer", *settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write(number: int, documents: list[str]) -> dict[str, Any]:
    return write_shard(_folder, number, _until_stopped(documents), _encoder)


def _until_stopped(documents: list[str]) -> Iterator[str]:
    for document in documents:
        if _stop.is_set():
            raise _Stopped
        yield document
        with _tokenised.get_lock():
            _tokenised.value += 1
