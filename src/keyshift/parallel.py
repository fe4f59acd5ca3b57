"""Runs in processes of their own, several at a time. A worker that dies takes one run with it, no more."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

from keyshift.data import TextData
from keyshift.recipe import Recipe
from keyshift.results import RunResult
from keyshift.runs import Run, Sources, execute
from keyshift.training import Progress

POLL = 0.2
"""Seconds between two looks at whether to stop."""


@dataclass(frozen=True)
class Event:
    """What a worker reports: a run's standing, or (``outcome``) its result, or what it raised."""

    run: Run
    progress: Progress | None = None
    outcome: RunResult | Exception | None = None


def execute_parallel(
    runs: Sequence[Run],
    recipe: Recipe,
    text: Path | None,
    *,
    jobs: int,
    resume: bool,
    stop: Callable[[], bool],
) -> Iterator[Event]:
    """Train ``runs`` in ``jobs`` processes and report what happens, as it happens, in the caller's thread.

    Every process gets its share of the cores. A run whose worker is killed has the status ``failed``, and
    the others go on. Once ``stop`` is true, running ones save a checkpoint and end; no more are begun.

    Args:
        text: the folder of the prepared text, if the recipe reads text.
    """
    context = multiprocessing.get_context("spawn")
    stopping, standings = context.Event(), context.Queue()
    events: queue.Queue[Event | None] = queue.Queue()
    waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    starting = (recipe, text, threads, stopping, standings)
    slots = [
        threading.Thread(target=_slot, args=(waiting, events, context, starting, resume), daemon=True)
        for _ in range(min(jobs, len(runs)))
    ]
    with _threads_of_children(threads):
        for slot in slots:
            slot.start()
        by_place = {run.directory: run for run in runs}
        while slots:
            if stop():
                stopping.set()
            yield from _drained(standings, by_place)
            try:
                event = events.get(timeout=POLL)
            except queue.Empty:
                continue
            if event is None:
                slots.pop()
            else:
                yield event
                if isinstance(event.outcome, Exception):
                    stopping.set()


@contextmanager
def _threads_of_children(threads: int) -> Iterator[None]:
    """OpenMP reads its number of threads when a process begins, so it has to be in the environment."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _drained(standings: Any, by_place: dict[Path, Run]) -> Iterator[Event]:
    """The newest standing of every run that has reported since the last look."""
    newest: dict[Path, Progress] = {}
    while True:
        try:
            place, progress = standings.get_nowait()
        except queue.Empty:
            break
        newest[place] = progress
    for place, progress in newest.items():
        yield Event(by_place[place], progress=progress)


def _slot(
    waiting: queue.SimpleQueue[Run],
    events: queue.Queue[Event | None],
    context: SpawnContext,
    starting: tuple[Any, ...],
    resume: bool,
) -> None:
    """Keep one worker busy; begin another when it dies. A pool of its own, since a broken pool loses all."""
    pool = _pool(context, starting)
    try:
        while not starting[3].is_set():
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                outcome: RunResult | Exception = pool.submit(_work, run, resume).result()
            except BrokenProcessPool:
                pool.shutdown()
                pool = _pool(context, starting)
                outcome = RunResult(
                    seed=run.seed,
                    status="failed",
                    message="its process was killed (out of memory?); --resume goes on from its checkpoint",
                )
            except Exception as error:
                outcome = error
            events.put(Event(run, outcome=outcome))
    finally:
        pool.shutdown()
        events.put(None)


def _pool(context: SpawnContext, starting: tuple[Any, ...]) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=starting)


class _Worker:
    """What a worker process keeps from one run to the next."""

    sources: Sources
    stopping: Any
    standings: Any


def _begin(recipe: Recipe, text: Path | None, threads: int, stopping: Any, standings: Any) -> None:
    import torch
    from transformers.utils import logging

    for each in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole group: the parent decides
        signal.signal(each, signal.SIG_IGN)
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    _Worker.sources = Sources(recipe, None if text is None else TextData.open(text))
    _Worker.stopping, _Worker.standings = stopping, standings


def _work(run: Run, resume: bool) -> RunResult:
    return execute(
        run,
        _Worker.sources.of(run.variant),
        resume=resume,
        stop=_Worker.stopping.is_set,
        on_progress=lambda progress: _Worker.standings.put((run.directory, progress)),
    )
