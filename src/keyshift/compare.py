"""Several variants side by side, several seeds each, one report."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock
import torch
import transformers

from keyshift.attention.shift import Shift
from keyshift.cache import cache_bytes_per_token
from keyshift.configuration import KeyshiftConfig
from keyshift.data import prepare
from keyshift.errors import NonFiniteLoss, RunError, UserError, first_line
from keyshift.measure import decode_seconds, measured_bytes_per_token
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.provenance import command_line, environment, moment
from keyshift.recipe import Recipe, TextData, build_task
from keyshift.report import write_report
from keyshift.results import Point, Report, RunResult, ShiftWeights, VariantResult
from keyshift.training import BatchSource, MixedSource, Outcome, Progress, TaskSource, TextSource, train

RECIPE_FILE = "recipe.json"
OWN_FILES = {RECIPE_FILE, ".lock", "data", "runs", "figures", "report.json", "report.html"}
ROLES: dict[str, Literal["query", "key", "value"]] = {
    "query_shift": "query",
    "key_shift": "key",
    "value_shift": "value",
}


@dataclass(frozen=True)
class Run:
    """One variant with one seed, and where it lives."""

    variant: str
    config: KeyshiftConfig
    seed: int
    directory: Path


@dataclass(frozen=True)
class Hooks:
    """How `compare` speaks to its caller.

    Attributes:
        stop: asked after every step; True ends the comparison with what there is.
        preparing: bytes of text read so far, and in all.
        planned: how many runs are to be trained.
        progress: a run and where it stands.
        finished: a run and its result.
    """

    stop: Callable[[], bool] = lambda: False
    preparing: Callable[[int, int], None] = lambda done, total: None
    planned: Callable[[int], None] = lambda runs: None
    progress: Callable[[Run, Progress], None] = lambda run, progress: None
    finished: Callable[[Run, RunResult], None] = lambda run, result: None


def compare(recipe: Recipe, out: Path, *, resume: bool = False, hooks: Hooks | None = None) -> Report:
    """Train every variant of a recipe with every seed, measure, and write the report into ``out``.

    Runs that ``out`` holds already are not repeated with ``resume``; an interrupted one goes on from its
    newest checkpoint. The report is written at the end, after an interruption, and when something fails.

    Raises:
        UserError: settings that do not fit, ``out`` in use or holding something else.
        RunError: a checkpoint could not be written.
    """
    hooks = hooks or Hooks()
    with _claimed(out):
        _check_folder(recipe, out, resume)
        source, facts = _source(recipe, out, hooks)
        runs = _runs(recipe, source, out)
        with _written(out):
            _write_json(out / RECIPE_FILE, recipe.model_dump(mode="json"))
        results = {_key(run): _known(run) for run in runs}
        left = [run for run in runs if results[_key(run)].status != "finished"]
        hooks.planned(len(left))
        try:
            for run in left:
                if hooks.stop():
                    break
                results[_key(run)] = _execute(run, source, recipe, resume, hooks)
        except BaseException:
            with _written(out):
                write_report(_report(recipe, facts, runs, results), out)
            raise
        report = _report(recipe, facts, runs, results)
        if not left:
            _keep_decode_times(report, out)
        elif not hooks.stop():
            _measure_decoding(report, runs, source)
        with _written(out):
            write_report(report, out)
    return report


def configs(recipe: Recipe, vocab_size: int, sequence_length: int) -> dict[str, KeyshiftConfig]:
    """The model of every variant. Raises `UserError`, naming the variant, for settings that contradict."""
    built = {}
    for name, fields in recipe.variants.items():
        sizes = {"max_position_embeddings": sequence_length, **recipe.model, **fields}
        try:
            built[name] = KeyshiftConfig(vocab_size=vocab_size, **sizes)
        except UserError as error:
            raise UserError(f"variant {name!r}: {error}") from error
        if built[name].max_position_embeddings < sequence_length:
            raise UserError(
                f"variant {name!r}: max_position_embeddings={built[name].max_position_embeddings} is below "
                f"sequence_length={sequence_length}; raise it or leave it out"
            )
    return built


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


@contextmanager
def _written(out: Path) -> Iterator[None]:
    """Writing of results, which may find the disk full."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write results in {out} ({error.strerror}); free some space and pass --resume"
        ) from error


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
    changed = [key for key in now if now[key] != before.get(key)]
    if changed:
        raise UserError(
            f"out={out} was made with a different recipe (changed: {', '.join(changed)}); pass another --out"
        )


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2))
    os.replace(temporary, path)


def _source(recipe: Recipe, out: Path, hooks: Hooks) -> tuple[BatchSource, dict[str, Any]]:
    """What the recipe trains on, and facts about it for the report."""
    if recipe.data is None:
        return _task_source(recipe)
    text, facts = _text_source(recipe.data, recipe.training.batch_size, out, hooks)
    if recipe.data.task_share is None:
        return text, facts
    task, task_facts = _task_source(recipe, vocab_size=text.vocab_size, sequence_length=text.sequence_length)
    return MixedSource(text, task, recipe.data.task_share), {**facts, **task_facts}


def _task_source(recipe: Recipe, **sizes: int) -> tuple[TaskSource, dict[str, Any]]:
    assert recipe.task is not None
    task = build_task(recipe.task, **sizes)
    return TaskSource(task), {"chance_level": task.chance_level(), "guessing": task.guessing}


def _text_source(
    settings: TextData, batch_size: int, out: Path, hooks: Hooks
) -> tuple[TextSource, dict[str, Any]]:
    def preparing(done: int, total: int) -> None:
        if hooks.stop():
            raise KeyboardInterrupt  # nothing to save yet
        hooks.preparing(done, total)

    data = prepare(
        settings.paths,
        out / "data",
        tokenizer=settings.tokenizer,
        vocab_size=settings.vocab_size,
        sequence_length=settings.sequence_length,
        batch_size=batch_size,
        validation_fraction=settings.validation_fraction,
        progress=preparing,
        keep=(out / RECIPE_FILE).exists(),
    )
    return TextSource(data, settings.sequence_length), data.summary()


def _runs(recipe: Recipe, source: BatchSource, out: Path) -> list[Run]:
    """Every run, seed by seed, so that an early stop leaves the variants comparable."""
    models = configs(recipe, source.vocab_size, source.sequence_length)
    folders = {name: _slug(name) for name in models}
    if len(set(folders.values())) < len(folders):
        raise UserError(f"variants {list(models)} have names too alike to make folders of; rename some")
    return [
        Run(name, config, seed, out / "runs" / folders[name] / f"seed-{seed}")
        for seed in range(recipe.seeds)
        for name, config in models.items()
    ]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "variant"


def _key(run: Run) -> tuple[str, int]:
    return run.variant, run.seed


def _known(run: Run) -> RunResult:
    """What is known of a run before it starts: its result, if an earlier call finished it."""
    kept = run.directory / "result.json"
    if kept.exists():
        try:
            return RunResult.model_validate_json(kept.read_text())
        except ValueError as error:
            raise UserError(f"{kept} is damaged; delete it to train this run again") from error
    return RunResult(seed=run.seed, status="pending")


def _execute(run: Run, source: BatchSource, recipe: Recipe, resume: bool, hooks: Hooks) -> RunResult:
    transformers.set_seed(run.seed)
    model = KeyshiftForCausalLM(run.config)
    run.directory.mkdir(parents=True, exist_ok=True)
    try:
        outcome = train(
            model,
            source,
            recipe.training,
            run.directory,
            seed=run.seed,
            resume=resume,
            stop=hooks.stop,
            on_progress=lambda progress: hooks.progress(run, progress),
        )
    except NonFiniteLoss as error:
        result = RunResult(seed=run.seed, status="diverged", message=str(error), steps=error.step)
    else:
        result = _result(run, model, outcome, recipe, source)
        if result.status == "finished":
            with _written(run.directory):
                _write_json(run.directory / "result.json", result.model_dump(mode="json"))
    hooks.finished(run, result)
    return result


def _result(
    run: Run, model: KeyshiftForCausalLM, outcome: Outcome, recipe: Recipe, source: BatchSource
) -> RunResult:
    tokens_per_step = recipe.training.batch_size * source.sequence_length
    curve = [
        Point(
            step=int(entry["step"]),
            tokens=int(entry["step"]) * tokens_per_step,
            loss=entry["eval_loss"],
            accuracy=entry.get("eval_accuracy"),
            bits_per_byte=entry.get("eval_bits_per_byte"),
        )
        for entry in outcome.history
        if "eval_loss" in entry
    ]
    return RunResult(
        seed=run.seed,
        status="interrupted" if outcome.interrupted else "finished",
        message=f"stopped at step {outcome.steps}" if outcome.interrupted else None,
        steps=outcome.steps,
        curve=curve,
        train_loss=[(int(entry["step"]), entry["loss"]) for entry in outcome.history if "loss" in entry],
        train_tokens_per_second=tokens_per_step / outcome.step_seconds if outcome.step_seconds else None,
        shift_weights=learned_shifts(model),
    )


def learned_shifts(model: KeyshiftForCausalLM) -> list[ShiftWeights]:
    """Every head's mixing weights: α of keys, β of values, γ of queries."""
    found = []
    for layer, block in enumerate(model.model.layers):
        for attribute, role in ROLES.items():
            shift: Shift | None = getattr(block.self_attn, attribute)
            if shift is not None:
                weights = shift.weights().detach().float().tolist()
                found.append(ShiftWeights(layer=layer, of=role, weights=weights))
    return found


def _report(
    recipe: Recipe,
    facts: dict[str, Any],
    runs: list[Run],
    results: dict[tuple[str, int], RunResult],
) -> Report:
    variants = {run.variant: _variant(run, recipe, _model(run)) for run in runs if run.seed == 0}
    for run in runs:
        variants[run.variant].runs.append(results[_key(run)])
    return Report(
        title=recipe.title,
        kind="text" if recipe.data else "task",
        command=command_line(leave_out="--resume"),
        created=moment(),
        environment=environment(),
        recipe=recipe.model_dump(mode="json"),
        data=facts,
        complete=all(result.status in ("finished", "diverged") for result in results.values()),
        variants=list(variants.values()),
    )


def _measure_decoding(report: Report, runs: list[Run], source: BatchSource) -> None:
    """Time a decoded token of every variant's first seed, all in one go."""
    models = [_model(run) for run in runs if run.seed == 0]
    seconds = decode_seconds(models, prompt_length=source.sequence_length // 2)
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


def _variant(run: Run, recipe: Recipe, model: KeyshiftForCausalLM) -> VariantResult:
    shift_parameters = sum(m.weight.numel() for m in model.modules() if isinstance(m, Shift))
    return VariantResult(
        name=run.variant,
        config={**recipe.model, **recipe.variants[run.variant]},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shift_parameters=shift_parameters,
        cache_bytes_per_token=cache_bytes_per_token(run.config, model.dtype),
        cache_bytes_per_token_measured=measured_bytes_per_token(model),
    )
