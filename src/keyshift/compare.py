"""Several variants side by side, several seeds each, one report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import torch

from keyshift.attention.shift import Shift
from keyshift.cache import cache_bytes_per_token
from keyshift.cluster import Cluster, execute_on_cluster
from keyshift.data import TextData, prepare
from keyshift.errors import UserError, first_line
from keyshift.measure import decode_seconds, measured_bytes_per_token
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.parallel import execute_parallel
from keyshift.provenance import command_line, environment, moment
from keyshift.recipe import Recipe
from keyshift.report import write_report
from keyshift.results import Report, RunResult, VariantResult
from keyshift.runs import DONE, Run, Sources, execute, known, plan, write_json, written
from keyshift.training import Progress, TaskSource

RECIPE_FILE = "recipe.json"
WORDS = {"title", "paper", "verdict", "comparisons"}
"""What may change in a recipe without changing a run."""
OWN_FILES = {
    *(RECIPE_FILE, ".lock", "data", "jobs", "runs", "figures"),
    *("report.json", "report.html", "report.md"),
}


@dataclass(frozen=True)
class Hooks:
    """How `compare` speaks to its caller.

    Attributes:
        stop: asked after every step; True ends the comparison with what there is.
        preparing: bytes of text read so far, and in all.
        planned: the runs that are to be trained.
        progress: a run and where it stands.
        finished: a run and its result.
    """

    stop: Callable[[], bool] = lambda: False
    preparing: Callable[[int, int], None] = lambda done, total: None
    planned: Callable[[list[Run]], None] = lambda runs: None
    progress: Callable[[Run, Progress], None] = lambda run, progress: None
    finished: Callable[[Run, RunResult], None] = lambda run, result: None


@dataclass(frozen=True)
class _Way:
    """Where and how runs are trained: the arguments of `compare` that say so."""

    out: Path
    resume: bool
    jobs: int
    cluster: Cluster | None


def compare(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    jobs: int = 1,
    cluster: Cluster | None = None,
    hooks: Hooks | None = None,
) -> Report:
    """Train every variant of a recipe with every seed, measure, and write the report into ``out``.

    Runs that ``out`` holds already are not repeated with ``resume``; an interrupted one goes on from its
    newest checkpoint. The report is written at the end, after an interruption, and when something fails.

    Args:
        jobs: runs at a time; more than one run in processes of their own, with their share of the cores. A
            run that cannot go on is ``failed`` then, and the others go on.
        cluster: submit every run as a job there instead; ``out`` must be in a folder that its nodes share.

    Raises:
        UserError: settings that do not fit, ``out`` in use or holding something else, jobs refused.
        RunError: a checkpoint could not be written.
    """
    hooks = hooks or Hooks()
    if jobs < 1:
        raise UserError(f"jobs={jobs} must be at least 1")
    if cluster is not None:
        cluster.check(jobs, out / "jobs")
    with _claimed(out):
        _check_folder(recipe, out, resume)
        sources = Sources(recipe, _text(recipe, out, hooks))
        runs = plan(recipe, sources, out)
        with written(out):
            write_json(out / RECIPE_FILE, recipe.model_dump(mode="json"))
        results = {run: known(run) for run in runs}
        left = [run for run in runs if results[run].status not in DONE]
        hooks.planned(left)
        report = _trained(left, results, sources, _Way(out, resume, jobs, cluster), hooks)
        if not left:
            _keep_decode_times(report, out)
        elif cluster is None and not hooks.stop():
            _measure_decoding(report, runs)
        with written(out):
            write_report(report, out)
    return report


def _trained(
    left: list[Run], results: dict[Run, RunResult], sources: Sources, way: _Way, hooks: Hooks
) -> Report:
    """Train what is left of the runs; the report on all of them, written already if something goes wrong."""
    facts = _facts(list(results), sources)

    def keep(run: Run, result: RunResult) -> None:
        results[run] = result
        hooks.finished(run, result)

    try:
        _execute_all(left, sources, way, replace(hooks, finished=keep))
    except BaseException:
        with written(way.out):
            write_report(_report(sources.recipe, facts, results), way.out)
        raise
    return _report(sources.recipe, facts, results)


def _execute_all(runs: list[Run], sources: Sources, way: _Way, hooks: Hooks) -> None:
    """Train the runs: in this process one after the other, in several others, or on the cluster."""
    text = None if sources.text is None else way.out / "data"
    if way.cluster is not None:
        execute_on_cluster(
            runs,
            sources.recipe,
            text,
            way.out / "jobs",
            way.cluster,
            resume=way.resume,
            stop=hooks.stop,
            on_progress=hooks.progress,
            on_result=hooks.finished,
        )
        return
    if way.jobs > 1:
        execute_parallel(
            runs,
            sources.recipe,
            text,
            jobs=way.jobs,
            resume=way.resume,
            stop=hooks.stop,
            on_progress=hooks.progress,
            on_result=hooks.finished,
        )
        return
    for run in runs:
        if hooks.stop():
            return
        told = partial(hooks.progress, run)
        source = sources.of(run.variant)
        hooks.finished(run, execute(run, source, resume=way.resume, stop=hooks.stop, on_progress=told))


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Hold ``out`` for this process, and clear away what a killed one left half-written."""
    lock = filelock.FileLock(out / ".lock", timeout=0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise UserError(f"out={out} is in use by another run; wait for it or pass another --out") from error
    except OSError as error:
        raise UserError(
            f"out={out} cannot be used as a folder ({error.strerror}); pass another --out"
        ) from error
    try:
        for leftover in (*out.glob(".data-*"), *out.glob(".*.tmp")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield
    finally:
        lock.release()


def _check_folder(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a folder with other things in it, and to overwrite results or mix those of two recipes."""
    foreign = sorted(path.name for path in out.iterdir() if path.name not in OWN_FILES)
    if foreign:
        raise UserError(f"out={out} holds other files ({foreign[0]}); pass an empty or new --out")
    kept = out / RECIPE_FILE
    if not kept.exists():
        return
    if not resume:
        raise UserError(f"out={out} holds results already; pass --resume to go on, or another --out")
    now = recipe.model_dump(mode="json")
    try:
        before = json.loads(kept.read_text())
    except ValueError as error:
        raise UserError(f"{kept} is damaged ({first_line(error)}); pass another --out") from error
    changed = [key for key in now if key not in WORDS and now[key] != before.get(key)]
    if changed:
        raise UserError(
            f"out={out} was made with a different recipe (changed: {', '.join(changed)}); pass another --out"
        )


def _text(recipe: Recipe, out: Path, hooks: Hooks) -> TextData | None:
    """The recipe's text, prepared in ``out``; None for a recipe of a task alone."""
    settings = recipe.data
    if settings is None:
        return None

    def preparing(done: int, total: int) -> None:
        if hooks.stop():
            raise KeyboardInterrupt  # nothing to save yet
        hooks.preparing(done, total)

    largest = max(recipe.grid().values(), key=lambda v: v.training.batch_size * (v.sequence_length or 0))
    assert largest.sequence_length is not None
    return prepare(
        settings.paths,
        out / "data",
        tokenizer=settings.tokenizer,
        vocab_size=settings.vocab_size,
        sequence_length=largest.sequence_length,
        batch_size=largest.training.batch_size,
        validation_fraction=settings.validation_fraction,
        progress=preparing,
        keep=(out / RECIPE_FILE).exists(),
    )


def _facts(runs: list[Run], sources: Sources) -> dict[str, Any]:
    """What the report says of the data: of the text, and of the first variant's task."""
    facts = {} if sources.text is None else sources.text.summary()
    source = sources.of(runs[0].variant)
    task = getattr(source, "task", None)
    if isinstance(task, TaskSource):
        task = task.task
    return (
        facts if task is None else {**facts, "chance_level": task.chance_level(), "guessing": task.guessing}
    )


def _report(recipe: Recipe, facts: dict[str, Any], results: dict[Run, RunResult]) -> Report:
    variants = {run.variant.name: _variant(run) for run in results if run.seed == 0}
    for run, result in results.items():
        variants[run.variant.name].runs.append(result)
    trained = (result.environment for result in results.values() if result.environment)
    return Report(
        title=recipe.title,
        kind="text" if recipe.data else "task",
        command=command_line(leave_out="--resume"),
        created=moment(),
        environment=next(trained, None) or environment(),
        recipe=recipe.model_dump(mode="json"),
        data=facts,
        complete=all(result.status in DONE for result in results.values()),
        variants=list(variants.values()),
    )


def _measure_decoding(report: Report, runs: list[Run]) -> None:
    """Time a decoded token of every variant's first seed, all in one go."""
    first = [run for run in runs if run.seed == 0]
    shortest = min(run.config.max_position_embeddings for run in first)
    seconds = decode_seconds([_model(run) for run in first], prompt_length=shortest // 2)
    for variant, each in zip(report.variants, seconds, strict=True):
        variant.runs[0].decode_ms_per_token = each * 1e3


def _keep_decode_times(report: Report, out: Path) -> None:
    """Nothing was trained: keep the times of the report that is there, whatever the machine does now."""
    if (out / "report.json").exists():
        before = Report.model_validate_json((out / "report.json").read_text())
        for variant, old in zip(report.variants, before.variants, strict=True):
            variant.runs[0].decode_ms_per_token = old.runs[0].decode_ms_per_token


def _model(run: Run) -> KeyshiftForCausalLM:
    """A fresh model of the run's, where runs are trained: sizes and speeds do not depend on the weights."""
    return KeyshiftForCausalLM(run.config).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _variant(run: Run) -> VariantResult:
    model = _model(run)
    shift_parameters = sum(m.weight.numel() for m in model.modules() if isinstance(m, Shift))
    return VariantResult(
        name=run.variant.name,
        labels=run.variant.labels,
        config=run.variant.model,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shift_parameters=shift_parameters,
        cache_bytes_per_token=cache_bytes_per_token(run.config, model.dtype),
        cache_bytes_per_token_measured=measured_bytes_per_token(model),
    )
