"""Runs in processes of their own, several at a time. A worker that dies takes one run with it, no more.

A worker shares one connection with its parent and nothing else: no lock, no queue that a killed process
could leave locked for the others. The parent sends runs and, to stop, anything; the worker sends where it
stands and results. When the parent is gone the connection ends, which a worker takes as a wish to stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from keyshift.data import TextData
from keyshift.errors import RunError
from keyshift.recipe import Recipe
from keyshift.results import RunResult
from keyshift.runs import Run, Sources, attempt, failed
from keyshift.training import Progress

POLL = 0.2
"""Seconds between two looks at whether to stop, and between two reports of where a run stands."""

PATIENCE = 10.0
"""Seconds that a worker without work has to end by itself."""

SERVE = "import sys; sys.path[:] = {path!r}; from keyshift.parallel import serve; serve({descriptor})"

READY = "ready"
STOP = "stop"


@dataclass(eq=False)
class _Worker:
    """A worker process. ``run`` is what it trains: None while it starts, and once it has nothing to do."""

    slot: int
    process: subprocess.Popen[bytes]
    connection: Connection
    run: Run | None = None


def execute_parallel(
    runs: Sequence[Run],
    recipe: Recipe,
    text: Path | None,
    *,
    jobs: int,
    resume: bool,
    stop: Callable[[], bool],
    on_progress: Callable[[Run, Progress], None],
    on_result: Callable[[Run, RunResult], None],
) -> None:
    """Train ``runs`` in up to ``jobs`` processes, each with its share of the cores.

    A run that cannot go on, or whose worker is killed, has the status ``failed``; the others go on. Once
    ``stop`` is true, running ones save a checkpoint and end; no more are begun. No worker outlives this call.

    Args:
        text: the folder of the prepared text, if the recipe reads text.

    Raises:
        RunError: a worker process ended before it could train anything.
    """
    pool = _Pool(deque(runs), (recipe, text, resume), min(jobs, len(runs)), on_progress, on_result)
    try:
        pool.start()
        while pool.workers:
            if stop():
                pool.stop()
            pool.listen()
    finally:
        pool.kill()


class _Pool:
    """The workers of one call, and what is left for them to do."""

    def __init__(
        self,
        waiting: deque[Run],
        settings: tuple[Recipe, Path | None, bool],
        size: int,
        on_progress: Callable[[Run, Progress], None],
        on_result: Callable[[Run, RunResult], None],
    ):
        self.waiting, self.settings, self.size = waiting, settings, size
        self.on_progress, self.on_result = on_progress, on_result
        self.workers: list[_Worker] = []
        self.stopping = False

    def start(self) -> None:
        for slot in range(self.size):
            self._begin(slot)

    def _begin(self, slot: int) -> None:
        """A new worker, in a process group of its own: Ctrl-C in the terminal is the parent's to handle."""
        ours, theirs = Pipe()
        with theirs:
            code = SERVE.format(path=[str(each) for each in sys.path], descriptor=theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=_environment(slot, self.size),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output may be the table as JSON
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        worker = _Worker(slot, process, ours)
        self.workers.append(worker)
        with contextlib.suppress(OSError):  # it is dead already: listen() finds out
            ours.send(self.settings)

    def listen(self) -> None:
        """Take what workers say within `POLL` seconds, one message of each."""
        said = wait([worker.connection for worker in self.workers], POLL)
        for worker in [worker for worker in self.workers if worker.connection in said]:
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._died(worker)
                continue
            if isinstance(message, Progress):
                assert worker.run is not None
                self.on_progress(worker.run, message)
                continue
            if isinstance(message, RunResult):
                assert worker.run is not None
                self.on_result(worker.run, message)
            self._next(worker)

    def _next(self, worker: _Worker) -> None:
        """Give a worker the next run, or let it go."""
        worker.run = None
        if not self.waiting:
            self._end(worker)
            return
        worker.run = self.waiting.popleft()
        with contextlib.suppress(OSError):
            worker.connection.send(worker.run)

    def _died(self, worker: _Worker) -> None:
        how = _how(self._end(worker))
        if worker.run is None:
            raise RunError(f"a worker process {how} before it could train; what it printed says why")
        message = f"its process {how}; --resume goes on from its newest checkpoint"
        self.on_result(worker.run, failed(worker.run, message))
        if self.waiting:
            self._begin(worker.slot)

    def _end(self, worker: _Worker) -> int:
        """Close a worker's connection, which ends it; its exit code."""
        self.workers.remove(worker)
        worker.connection.close()
        try:
            return worker.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return _killed([worker])

    def stop(self) -> None:
        """Ask running workers to save and end; those that have not begun have nothing to save."""
        if self.stopping:
            return
        self.stopping = True
        self.waiting.clear()
        for worker in self.workers:
            if worker.run is not None:
                with contextlib.suppress(OSError):
                    worker.connection.send(STOP)
        idle = [worker for worker in self.workers if worker.run is None]
        self.workers = [worker for worker in self.workers if worker.run is not None]
        _killed(idle)

    def kill(self) -> None:
        _killed(self.workers)


def _killed(workers: Iterable[_Worker]) -> int:
    """End workers at once; the last one's exit code."""
    for worker in workers:
        worker.process.kill()
    return [worker.process.wait() for worker in workers][-1] if workers else 0


def _environment(slot: int, workers: int) -> dict[str, str]:
    """A worker's environment: its share of the cores, and its GPU where there are several.

    The cores are those that torch uses here. ``OMP_NUM_THREADS`` stays as it is: each process gets as many.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // workers)))
    devices = torch.cuda.device_count()
    if devices > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % devices]
    return environment


def _how(code: int) -> str:
    """How a process came to its end."""
    if code == -signal.SIGKILL:
        return "was killed (out of memory?)"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def serve(descriptor: int) -> None:
    """What a worker process does: train what the connection says, until there is no more."""
    connection = Connection(descriptor)
    recipe, text, resume = connection.recv()
    sources = Sources(recipe, None if text is None else TextData.open(text))
    with contextlib.suppress(EOFError, OSError):  # of the connection: there is no more, or no parent
        connection.send(READY)
        while isinstance(run := connection.recv(), Run):
            reporting = _Reporting(connection)
            result = attempt(run, sources, resume=resume, stop=connection.poll, on_progress=reporting)
            connection.send(result)


@dataclass
class _Reporting:
    """Sends where a run stands, at once and then every `POLL` seconds."""

    connection: Connection
    last: float = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.last >= POLL:
            self.last = now
            with contextlib.suppress(OSError):  # the parent is gone: the next look at `stop` says so
                self.connection.send(progress)
