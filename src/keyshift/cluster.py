"""Runs as jobs of a cluster, through submitit: submitted, awaited, gathered here; SLURM schedules them."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from keyshift.corpus import reopen
from keyshift.errors import UserError, first_line, nearest
from keyshift.recipe import Recipe
from keyshift.results import RunResult
from keyshift.runs import DONE, Run, Sources, attempt, failed, known, write_json, written
from keyshift.training import Progress

CLUSTERS = ("slurm", "local")
"""Where jobs can go. local is submitit's own stand-in: all at once on this machine, to try things."""

DEFAULTS = {"name": "keyshift", "timeout_min": 240}
"""Parameters of submitit's that are not left to it: it would give a job five minutes."""

POLL = 2.0
"""Seconds between two looks at what jobs have written."""

ACCOUNTING = 30.0
"""Seconds between two questions to SLURM whether jobs have ended without a result."""

REPORTING = 5.0
"""Seconds between two times that a job writes where it stands."""

STANDING = "progress.json"


@dataclass(frozen=True)
class Cluster:
    """Where jobs go and what they ask for.

    Attributes:
        name: one of `CLUSTERS`.
        parameters: of submitit's ``AutoExecutor.update_parameters``, such as ``timeout_min``,
            ``cpus_per_task``, ``gpus_per_node``, ``slurm_partition``.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)

    def check(self, jobs: int, folder: Path) -> None:
        """Raises `UserError` for what cannot work, before anything is prepared."""
        if self.name not in CLUSTERS:
            raise UserError(f"cluster={self.name!r} is not known; {nearest(self.name, CLUSTERS)}")
        if jobs > 1:
            raise UserError(
                f"jobs={jobs} is for this machine; with cluster={self.name!r} set slurm_array_parallelism"
            )
        for name in ("nodes", "tasks_per_node"):
            if self.parameters.get(name, 1) != 1:
                raise UserError(f"{name}={self.parameters[name]} must be 1: a run is one process")
        self.executor(folder)

    def executor(self, folder: Path) -> Any:
        """submitit's executor, which writes into ``folder``. Raises `UserError` for wrong parameters."""
        try:
            import submitit
        except ImportError as error:
            raise UserError(
                f"cluster={self.name!r} needs submitit: pip install 'keyshift[cluster]'"
            ) from error
        try:
            executor = submitit.AutoExecutor(folder, cluster=self.name)
            executor.update_parameters(**{**DEFAULTS, **self.parameters})
        except (AssertionError, NameError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"cluster={self.name!r} cannot be used: {first_line(error)}") from error
        return executor


def execute_on_cluster(
    runs: Sequence[Run],
    recipe: Recipe,
    out: Path,
    cluster: Cluster,
    *,
    resume: bool,
    stop: Callable[[], bool],
    on_progress: Callable[[Run, Progress], None],
    on_result: Callable[[Run, RunResult], None],
) -> None:
    """Train every run in a job of its own, and wait for them.

    A job that ends without a result makes its run ``failed``. One that is preempted or out of time is
    requeued by submitit and goes on from a checkpoint. Once ``stop`` is true, running jobs save and end, and
    jobs that have not begun are cancelled; whatever else ends this call cancels all.

    Args:
        out: the folder of the comparison, which the cluster's nodes share: what submitit writes goes to
            ``jobs`` in it, logs among it.

    Raises:
        UserError: the cluster refuses the parameters or the jobs.
    """
    if not runs:
        return
    folder = (out / "jobs").resolve()
    halt = folder / "stop"
    halt.unlink(missing_ok=True)
    for run in runs:
        (run.directory / STANDING).unlink(missing_ok=True)
    work = [Work(_absolute(run), recipe, out.resolve(), halt, resume) for run in runs]
    jobs = dict(zip(runs, _submitted(work, cluster.executor(folder)), strict=True))
    asked = time.monotonic()
    try:
        while jobs:
            if stop():
                halt.touch()
                for run in [run for run, job in jobs.items() if not _begun(run, job)]:
                    jobs.pop(run).cancel(check=False)
            due = time.monotonic() - asked > ACCOUNTING
            asked = time.monotonic() if due else asked
            _gather(jobs, due, on_progress, on_result)
            time.sleep(POLL if jobs else 0)
    finally:
        for job in jobs.values():
            job.cancel(check=False)


def _gather(
    jobs: dict[Run, Any],
    due: bool,
    on_progress: Callable[[Run, Progress], None],
    on_result: Callable[[Run, RunResult], None],
) -> None:
    """Tell what is new of jobs, and drop those that have ended. ``due`` asks SLURM, once for all."""
    for index, (run, job) in enumerate(list(jobs.items())):
        if job.done(force_check=due and index == 0):
            result = _result(run, job)
            del jobs[run]
            on_result(run, result)
        elif (standing := _standing(run)) is not None:
            on_progress(run, standing)


def _submitted(work: list[Work], executor: Any) -> list[Any]:
    """submitit's jobs, one array of them on SLURM."""
    try:
        return executor.submit_array(work)
    except (RuntimeError, OSError) as error:  # sbatch's, whose error output submitit has printed
        raise UserError(f"sbatch refuses the jobs: {first_line(error)}; see --cluster-set") from error


def _result(run: Run, job: Any) -> RunResult:
    """What a job came to: what it wrote, what it returned, or why there is nothing."""
    if (result := known(run)).status in DONE:
        return result
    try:
        return job.result()
    except Exception as error:
        return failed(run, f"job {job.job_id}: {_reason(error, job)}; log: {job.paths.stderr}")


def _reason(error: Exception, job: Any) -> str:
    """The last line of the traceback that submitit quotes between lines of dashes; without one, the state."""
    quoted = str(error).split("-" * 22 + "\n")
    if len(quoted) == 3:
        return quoted[1].strip().rsplit("\n", 1)[-1]
    return f"it ended without a result (state {job.state})"


def _begun(run: Run, job: Any) -> bool:
    """Whether a job has something to save. A requeued one has saved it."""
    return _standing(run) is not None and job.state not in ("PENDING", "REQUEUED")


def _standing(run: Run) -> Progress | None:
    """Where a job has said that its run stands; None before it begins."""
    try:
        return Progress(**json.loads((run.directory / STANDING).read_text()))
    except FileNotFoundError:
        return None


def _absolute(run: Run) -> Run:
    return replace(run, directory=run.directory.resolve())


@dataclass
class Work:
    """What a job does: it trains one run. submitit pickles it, calls it, and asks it for a ``checkpoint``."""

    run: Run
    recipe: Recipe
    out: Path
    halt: Path
    resume: bool

    def __call__(self) -> RunResult:
        _use_allocated_cores()
        sources = Sources(self.recipe, reopen(self.recipe, self.out))
        notice = _Notice()
        reporting = _Reporting(self.run.directory / STANDING, self.halt)
        result = attempt(
            self.run,
            sources,
            resume=self.resume,
            stop=lambda: notice.given or reporting.halted,
            on_progress=reporting,
        )
        if notice.given and result.status == "interrupted":
            notice.passed_on()
        return result

    def checkpoint(self) -> Any:
        """What submitit requeues after a preemption or a timeout."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self, resume=True))


def _use_allocated_cores() -> None:
    """SLURM does not keep a job off the node's other cores everywhere; torch would take them all."""
    cores = os.environ.get("SLURM_CPUS_ON_NODE")
    if cores is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(int(cores))


class _Notice:
    """The signal before a preemption or a timeout: training saves first, and then submitit hears of it."""

    def __init__(self) -> None:
        name = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
        self.number = signal.Signals[f"SIG{name}"]
        self.given = False
        self.before = signal.signal(self.number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.given = True

    def passed_on(self) -> None:
        """Let submitit requeue this job, which ends the process."""
        assert callable(self.before)
        self.before(self.number, None)


@dataclass
class _Reporting:
    """Writes where a run stands every `REPORTING` seconds, and looks whether to stop."""

    path: Path
    halt: Path
    last: float = -math.inf
    halted: bool = False

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.last >= REPORTING:
            self.last = now
            self.halted = self.halt.exists()
            with written(self.path.parent):
                write_json(self.path, asdict(progress))
