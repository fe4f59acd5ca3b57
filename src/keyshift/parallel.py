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
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

import torch

from keyshift.corpus import reopen
from keyshift.errors import RunError
from keyshift.recipe import Recipe
from keyshift.results import RunResult
from keyshift.runs import Run, Sources, attempt, failed
from keyshift.training import Progress

POLL = 0.2
"""Seconds between two looks at whether to stop, and between two reports of where a run stands."""

PATIENCE = 10.0
"""Seconds that a worker without work has to end by itself."""

EARLY_DEATHS = 2
"""Workers in a row that are replaced though they died before they could train, with no run ended between."""

SERVE = "import sys; sys.path[:] = {path!r}; from keyshift.parallel import serve; serve({talk}, {screen})"

READY = "ready"
STOP = "stop"


@dataclass(eq=False)
class _Worker:
    """A worker process. ``run`` is what it trains: None while it starts, and once it has nothing to do.

    ``log`` holds what it prints while it starts, should that be the reason why it does not.
    """

    slot: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]
    run: Run | None = None

    def printed(self) -> str:
        """What it printed while it started, passed on to where it would have gone."""
        with self.log:
            self.log.seek(0)
            text = self.log.read().decode(errors="replace")
        sys.stderr.write(text)
        return text


def execute_parallel(
    runs: Sequence[Run],
    recipe: Recipe,
    out: Path,
    *,
    jobs: int,
    resume: bool,
    stop: Callable[[], bool],
    on_progress: Callable[[Run, Progress], None],
    on_result: Callable[[Run, RunResult], None],
) -> None:
    """Train ``runs`` in up to ``jobs`` processes, each with its share of the cores.

    A run that cannot go on, or whose worker is killed, has the status ``failed``; the others go on. A worker
    that dies before it can train is replaced, or after a few of them in a row done without. Once ``stop`` is
    true, running ones save a checkpoint and end; no more are begun. No worker outlives this call.

    Args:
        out: the folder of the comparison, which holds the prepared text.

    Raises:
        RunError: no worker process is left and no more of them begin.
    """
    pool = _Pool(deque(runs), (recipe, out, resume), min(jobs, len(runs)), on_progress, on_result)
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
        settings: tuple[Recipe, Path, bool],
        size: int,
        on_progress: Callable[[Run, Progress], None],
        on_result: Callable[[Run, RunResult], None],
    ):
        self.waiting, self.settings, self.size = waiting, settings, size
        self.on_progress, self.on_result = on_progress, on_result
        self.workers: list[_Worker] = []
        self.early_deaths = 0
        self.stopping = False

    def start(self) -> None:
        for slot in range(self.size):
            self._begin(slot)

    def _begin(self, slot: int) -> None:
        """A new worker, in a process group of its own: Ctrl-C in the terminal is the parent's to handle."""
        ours, theirs = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        with theirs, os.fdopen(os.dup(2), "wb") as screen:
            passed = {"talk": theirs.fileno(), "screen": screen.fileno()}
            code = SERVE.format(path=[str(each) for each in sys.path], **passed)
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=_environment(slot, self.size),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=list(passed.values()),
                process_group=0,
            )
        worker = _Worker(slot, process, ours, log)
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
                self.early_deaths = 0
                self.on_result(worker.run, message)
            else:
                worker.printed()
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
            self._died_early(worker, how)
            return
        message = f"its process {how}; --resume goes on from its newest checkpoint"
        self.on_result(worker.run, failed(worker.run, message))
        if self.waiting:
            self._begin(worker.slot)

    def _died_early(self, worker: _Worker, how: str) -> None:
        """Replace a worker that could not begin, unless others could not either: those that can go on."""
        words = worker.printed().split("\n")
        self.early_deaths += 1
        if self.waiting and self.early_deaths <= EARLY_DEATHS:
            self._begin(worker.slot)
        elif self.waiting and not self.workers:
            last = next((line.strip() for line in reversed(words) if line.strip()), "it printed nothing")
            raise RunError(
                f"a worker process {how} before it could train, and so did others: {last[:200]}; "
                "--resume tries again"
            )

    def _end(self, worker: _Worker) -> int:
        """Close a worker's connection, which ends it; its exit code."""
        self.workers.remove(worker)
        worker.connection.close()
        try:
            return worker.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            return worker.process.wait()

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


def _killed(workers: Sequence[_Worker]) -> None:
    """End workers at once."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        worker.log.close()


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


def serve(descriptor: int, screen: int) -> None:
    """What a worker process does: train what the connection says, until there is no more.

    Once it has begun, what it prints goes to ``screen``: standard output may be the parent's table as JSON.
    """
    connection = Connection(descriptor)
    recipe, out, resume = connection.recv()
    sources = Sources(recipe, reopen(recipe, out))
    with contextlib.suppress(EOFError, OSError):  # of the connection: there is no more, or no parent
        for standard in (1, 2):
            os.dup2(screen, standard)
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
