"""One run of a comparison: a variant trained with a seed, where it lives, what is kept of it."""

from __future__ import annotations

import json
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import filelock
import torch
import transformers

from keyshift.configuration import KeyshiftConfig
from keyshift.corpus import Corpus
from keyshift.data import StreamedText
from keyshift.errors import NonFiniteLoss, RunError, UserError, first_line
from keyshift.measure import learned_shifts
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.provenance import environment
from keyshift.recipe import VARIANT, Recipe, Variant, build_task
from keyshift.results import Point, RunResult, Status
from keyshift.start import configuration_at, starting_model
from keyshift.teacher import check_teacher
from keyshift.training import (
    BatchSource,
    MixedSource,
    Outcome,
    Progress,
    StreamSource,
    TaskSource,
    TextSource,
    is_first,
    newest_checkpoint,
    step_of,
    train,
)

DONE = ("finished", "diverged")
"""How a run ends that is not to be repeated."""

WIDE = 1024
"""An ``intermediate_size`` from here on is kept a multiple of 8, as products on GPUs want it: what is lost of
equality is less than a thousandth."""

PATIENCE = 60.0
"""Seconds to wait for another process to let a run's folder go: a worker without parent saves and ends."""


@dataclass(frozen=True, eq=False)
class Run:
    """One variant with one seed.

    Attributes:
        directory: holds its checkpoints and, once it is finished, ``result.json``.
        tokens_per_step: of its batches.
    """

    variant: Variant
    config: KeyshiftConfig
    seed: int
    directory: Path
    tokens_per_step: int

    @property
    def name(self) -> str:
        """As it is called in messages."""
        return f"{self.variant.name}, seed {self.seed}"


class Sources:
    """What the variants of a recipe train on; those with the same data share a source."""

    def __init__(self, recipe: Recipe, text: Corpus | None):
        self.recipe, self.text = recipe, text
        self.made: dict[str, BatchSource] = {}

    def of(self, variant: Variant) -> BatchSource:
        """The data of a variant.

        Raises:
            UserError: task settings that contradict each other or the text.
        """
        key = json.dumps([variant.task, variant.sequence_length])
        if key not in self.made:
            self.made[key] = self._make(variant)
        return self.made[key]

    def _make(self, variant: Variant) -> BatchSource:
        if self.text is None or self.recipe.data is None:
            assert variant.task is not None
            return TaskSource(build_task(variant.task))
        assert variant.sequence_length is not None
        streamed = isinstance(self.text, StreamedText)
        text = (StreamSource if streamed else TextSource)(self.text, variant.sequence_length)
        if self.recipe.data.task_share is None:
            return text
        assert variant.task is not None
        sizes = {"vocab_size": text.vocab_size, "sequence_length": text.sequence_length}
        return MixedSource(text, TaskSource(build_task(variant.task, **sizes)), self.recipe.data.task_share)


def plan(recipe: Recipe, sources: Sources, out: Path) -> list[Run]:
    """Every run, seed by seed, so that an early stop leaves the variants comparable.

    Raises:
        UserError: variants whose settings contradict each other, or names too alike to make folders of.
    """
    models, grid = models_of(recipe, sources.of), recipe.grid()
    return [
        run_of(grid[name], config, seed, sources, out)
        for seed in range(recipe.seeds)
        for name, config in models.items()
    ]


def run_of(variant: Variant, config: KeyshiftConfig, seed: int, sources: Sources, out: Path) -> Run:
    """One variant with one seed, and its place in ``out``; ``config`` is what `models_of` gave for it."""
    tokens = variant.training.batch_size * sources.of(variant).sequence_length
    return Run(variant, config, seed, out / "runs" / slug(variant.name) / f"seed-{seed}", tokens)


class Sized(Protocol):
    """What a model has to know of its data."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def special_tokens(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Sizes:
    """Data that nobody has read yet, as far as a model has to know it."""

    vocab_size: int
    sequence_length: int
    special_tokens: dict[str, int] = field(default_factory=dict)


def models_of(recipe: Recipe, data_of: Callable[[Variant], Sized]) -> dict[str, KeyshiftConfig]:
    """The model of every variant, by name.

    Raises:
        UserError: as `plan`.
    """
    grid = recipe.grid()
    if len({slug(name) for name in grid}) < len(grid):
        raise UserError(f"variants {list(grid)} have names too alike to make folders of; rename some")
    models = {name: config_of(variant, data_of(variant)) for name, variant in grid.items()}
    if recipe.equal_parameters is None:
        return models
    return {name: _as_large(name, grid, models, recipe.equal_parameters) for name in grid}


def _as_large(
    name: str, grid: dict[str, Variant], models: dict[str, KeyshiftConfig], reference: str
) -> KeyshiftConfig:
    """The model of a variant with the ``intermediate_size`` that brings it nearest to the reference's size.

    The reference is the variant of that label with the same labels on all other axes.
    """
    labels = {**grid[name].labels, VARIANT: reference}
    target = next(models[other] for other, variant in grid.items() if variant.labels == labels)
    config = models[name]
    if grid[name].training.start_from is not None:
        raise UserError(
            f"equal_parameters={reference!r} cannot change variant {name!r}, which starts from a checkpoint; "
            "leave it out"
        )
    per_channel = 3 * config.hidden_size * config.num_hidden_layers
    channels = config.intermediate_size + round((parameters(target) - parameters(config)) / per_channel)
    if channels >= WIDE:
        channels = round(channels / 8) * 8
    if config.mlp == "none" or channels < 1:
        raise UserError(
            f"variant {name!r} cannot be made as large as equal_parameters={reference!r} by its "
            "intermediate_size; use fewer layers, or leave equal_parameters out"
        )
    return KeyshiftConfig.from_dict({**config.to_dict(), "intermediate_size": channels})


def parameters(config: KeyshiftConfig) -> int:
    """Trainable parameters of a model, tied ones once; no memory is taken."""
    with torch.device("meta"):
        return KeyshiftForCausalLM(config).num_parameters()


def config_of(variant: Variant, source: Sized) -> KeyshiftConfig:
    """The model of a variant. Raises `UserError`, naming the variant, for settings that contradict."""
    length, training = source.sequence_length, variant.training
    sizes = {"max_position_embeddings": length, **source.special_tokens, **variant.model}
    try:
        if training.start_from is None:
            config = KeyshiftConfig(vocab_size=source.vocab_size, **sizes)
        else:
            config = configuration_at(training.start_from, variant.model, source.vocab_size)
        if training.trained == "shift" and config.shift == "none":
            raise UserError("training.trained='shift', but the model has no shift; use 'all'")
        check_teacher(training, config, length)
    except UserError as error:
        raise UserError(f"variant {variant.name!r}: {error}") from error
    if config.max_position_embeddings < length:
        raise UserError(
            f"variant {variant.name!r}: max_position_embeddings={config.max_position_embeddings} is below "
            f"sequence_length={length}; raise it or leave it out"
        )
    return config


def slug(name: str) -> str:
    """A name as a folder's: letters and digits of any script, in lower case, and hyphens."""
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-") or "variant"


def known(run: Run) -> RunResult:
    """What is known of a run before it starts: its result, if an earlier call finished it."""
    kept = run.directory / "result.json"
    if kept.exists():
        try:
            return RunResult.model_validate_json(kept.read_text())
        except ValueError as error:
            raise UserError(f"{kept} is damaged; delete it to train this run again") from error
    return RunResult(seed=run.seed, status="pending")


def failed(run: Run, message: str) -> RunResult:
    """The result of a run that something went wrong with; its steps are those of its newest checkpoint."""
    kept = newest_checkpoint(run.directory)
    steps = 0 if kept is None else step_of(kept)
    return RunResult(seed=run.seed, status="failed", message=message, steps=steps)


def attempt(
    run: Run,
    sources: Sources,
    *,
    resume: bool,
    stop: Callable[[], bool],
    on_progress: Callable[[Progress], None],
) -> RunResult:
    """As `execute`, but an error is the run's own: its status is ``failed``, and the message says why.

    What nobody foresaw is in the run's folder, in ``error.txt``.
    """
    transformers.utils.logging.disable_progress_bar()  # one for every checkpoint, where nobody looks
    try:
        return execute(run, sources, resume=resume, stop=stop, on_progress=on_progress)
    except (UserError, RunError) as error:
        return failed(run, str(error))
    except Exception as error:
        report = run.directory / "error.txt"
        with suppress(OSError):
            report.write_text(traceback.format_exc())
        return failed(run, f"{type(error).__name__}: {first_line(error)}; see {report}")


def execute(
    run: Run,
    sources: Sources,
    *,
    resume: bool,
    trackers: Sequence[str] = (),
    stop: Callable[[], bool],
    on_progress: Callable[[Progress], None],
) -> RunResult:
    """Train a run from its newest checkpoint (``resume``) or its beginning, and keep what came of it.

    A result is written if the run finished or diverged: neither is repeated. Processes that torchrun started
    all call this and train it together; the first one holds the folder and writes.

    Raises:
        RunError: a checkpoint or the result could not be written, or another process trains this run.
    """
    with _claimed(run) if is_first() else nullcontext():
        result = known(run)  # anew: another process may have finished it while this one waited for the folder
        if result.status not in DONE:
            check_fresh(run, resume)  # as well: it may have stopped half-way
            result = _trained(run, sources, resume, trackers, stop, on_progress)
        if result.status in DONE and is_first():
            with written(run.directory):
                write_json(run.directory / "result.json", result.model_dump(mode="json"))
    return result


def check_fresh(run: Run, resume: bool) -> None:
    """Raises `UserError` for a run that was begun and is not to be gone on with."""
    if not resume and (known(run).status != "pending" or newest_checkpoint(run.directory) is not None):
        raise UserError(f"{run.directory} holds this run already; pass --resume auto, or another --out")


@contextmanager
def _claimed(run: Run) -> Iterator[None]:
    """Hold the run's folder for this process."""
    lock = filelock.FileLock(run.directory / ".lock", timeout=PATIENCE)
    with written(run.directory):
        run.directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise RunError(
                f"{run.directory} is in use by another process; wait for it to end and resume"
            ) from error
    try:
        yield
    finally:
        lock.release()


def _trained(
    run: Run,
    sources: Sources,
    resume: bool,
    trackers: Sequence[str],
    stop: Callable[[], bool],
    on_progress: Callable[[Progress], None],
) -> RunResult:
    transformers.set_seed(run.seed)
    source = sources.of(run.variant)
    model = starting_model(run.config, run.variant.training, source.tokenizer_path)
    try:
        outcome = train(
            model,
            source,
            run.variant.training,
            run.directory,
            seed=run.seed,
            engine=sources.recipe.engine,
            resume=resume,
            trackers=trackers,
            stop=stop,
            on_progress=on_progress,
        )
    except NonFiniteLoss as error:
        return RunResult(
            seed=run.seed,
            status="diverged",
            message=str(error),
            steps=error.step,
            curve=_curve(error.history, run),
            environment=environment(),
        )
    return _result(run, model, outcome, source)


def _result(run: Run, model: KeyshiftForCausalLM, outcome: Outcome, source: BatchSource) -> RunResult:
    curve = _curve(outcome.history, run)
    status: Status = "interrupted" if outcome.interrupted else "finished"
    message = f"stopped at step {outcome.steps}" if outcome.interrupted else None
    if status == "finished" and curve and not math.isfinite(curve[-1].loss):  # steps were left out to the end
        status, message = "diverged", f"held-out loss is {curve[-1].loss} at step {curve[-1].step}"
    return RunResult(
        seed=run.seed,
        status=status,
        message=message,
        steps=outcome.steps,
        curve=curve,
        skipped=outcome.skipped,
        induction=[(int(e["step"]), e["probe_induction"]) for e in outcome.history if "probe_induction" in e],
        train_loss=[(int(entry["step"]), entry["loss"]) for entry in outcome.history if "loss" in entry],
        train_tokens_per_second=run.tokens_per_step / outcome.step_seconds if outcome.step_seconds else None,
        shift_weights=learned_shifts(model),
        scores={} if outcome.interrupted else source.examine(model),
        environment=environment(),
    )


def _curve(history: list[dict[str, float]], run: Run) -> list[Point]:
    return [
        Point(
            step=int(entry["step"]),
            tokens=int(entry["step"]) * run.tokens_per_step,
            loss=entry["eval_loss"],
            accuracy=entry.get("eval_accuracy"),
            bits_per_byte=entry.get("eval_bits_per_byte"),
        )
        for entry in history
        if "eval_loss" in entry
    ]


@contextmanager
def written(out: Path) -> Iterator[None]:
    """Writing of results, which may find the disk full."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write results in {out} ({error.strerror}); free some space and resume"
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2))
    os.replace(temporary, path)
