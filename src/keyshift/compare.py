"""Several variants side by side, several seeds each, one report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keyshift.attention.shift import shift_parameters
from keyshift.cache import cache_bytes_per_token
from keyshift.cluster import Cluster, execute_on_cluster
from keyshift.corpus import Corpus, text_of
from keyshift.errors import UserError
from keyshift.folder import RECIPE_FILE, check_folder, claimed, keep_recipe
from keyshift.measure import decode_seconds, measured_bytes_per_token
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.parallel import execute_parallel
from keyshift.provenance import command_line, environment, moment
from keyshift.recipe import Recipe
from keyshift.report import write_report
from keyshift.results import Report, RunResult, VariantResult
from keyshift.runs import DONE, Run, Sources, execute, known, plan, written
from keyshift.training import Progress, TaskSource


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
    with claimed(out):
        check_folder(recipe, out, resume=resume)
        sources = Sources(recipe, _text(recipe, out, hooks))
        runs = plan(recipe, sources, out)
        keep_recipe(recipe, out)
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
    if way.cluster is not None:
        execute_on_cluster(
            runs,
            sources.recipe,
            way.out,
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
            way.out,
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
        hooks.finished(run, execute(run, sources, resume=way.resume, stop=hooks.stop, on_progress=told))


def _text(recipe: Recipe, out: Path, hooks: Hooks) -> Corpus | None:
    """The recipe's text; None for a recipe of a task alone."""

    def preparing(done: int, total: int) -> None:
        if hooks.stop():
            raise KeyboardInterrupt  # what is prepared so far is kept
        hooks.preparing(done, total)

    if recipe.data is not None and recipe.data.stream:
        raise UserError(
            "data.stream is for one run: use keyshift train, or prepare the text and name its folder"
        )
    return text_of(recipe, out, keep=(out / RECIPE_FILE).exists(), progress=preparing)


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
    return VariantResult(
        name=run.variant.name,
        labels=run.variant.labels,
        config=run.variant.model,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shift_parameters=sum(weight.numel() for weight in shift_parameters(model)),
        cache_bytes_per_token=cache_bytes_per_token(run.config, model.dtype),
        cache_bytes_per_token_measured=measured_bytes_per_token(model),
    )
