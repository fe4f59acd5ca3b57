"""One run of a recipe by itself, on one process or on many: what ``keyshift train`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyshift.corpus import text_of, vocabulary_of
from keyshift.data import Mixture, TextData
from keyshift.errors import UserError, nearest
from keyshift.folder import check_folder, claimed, keep_recipe
from keyshift.recipe import Recipe, Variant, build_task
from keyshift.results import RunResult
from keyshift.runs import (
    DONE,
    Run,
    Sized,
    Sizes,
    Sources,
    check_fresh,
    execute,
    known,
    models_of,
    run_of,
)
from keyshift.teacher import teacher_config
from keyshift.training import (
    Progress,
    TaskSource,
    check_before,
    is_first,
    launched,
    newest_checkpoint,
    uses_bfloat16,
)
from keyshift.training.budget import budget
from keyshift.training.step_time import time_step

PATIENCE = 60.0
"""Seconds that runs which start at the same time wait for each other to look at the folder."""


@dataclass(frozen=True)
class Watching:
    """How `pretrain` speaks to its caller.

    Attributes:
        stop: asked after every step; True saves a checkpoint and ends the run, in all processes.
        preparing: bytes of text read so far, and in all.
        planned: the run that is to be trained.
        progress: where it stands.
    """

    stop: Callable[[], bool] = lambda: False
    preparing: Callable[[int, int], None] = lambda done, total: None
    planned: Callable[[Run], None] = lambda run: None
    progress: Callable[[Progress], None] = lambda progress: None


def choose(recipe: Recipe, variant: str | None) -> str:
    """The name of a variant, with one label of every axis; None is the only one there is.

    Raises:
        UserError: there are several, or none of that name.
    """
    names = list(recipe.grid())
    if variant is None and len(names) == 1:
        return names[0]
    if variant is None:
        listed = ", ".join(repr(name) for name in names[:6]) + (", …" if len(names) > 6 else "")
        raise UserError(f"the recipe has {len(names)} variants; choose one with --variant: {listed}")
    if variant not in names:
        raise UserError(f"variant {variant!r} is not in the recipe; {nearest(variant, names)}")
    return variant


def pretrain(
    recipe: Recipe,
    out: Path,
    *,
    variant: str | None = None,
    seed: int = 0,
    resume: bool = False,
    trackers: Sequence[str] = (),
    watching: Watching | None = None,
) -> tuple[Run, RunResult]:
    """Train one variant with one seed. Its place in ``out`` is that of the same run in `compare`, which then
    finds it done: several of these, on several machines, make one comparison.

    Processes that torchrun started all call this.

    Args:
        resume: go on where an earlier call stopped, if there was one.
        trackers: where metrics go as well, see `train`.

    Raises:
        UserError: no such variant, a folder of another recipe (with the differences), results that are there
            already without ``resume``, and what `text_of` and `train` refuse.
        RunError: something could not be written; the newest checkpoint is intact.
    """
    watching = watching or Watching()
    name = choose(recipe, variant)
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must be at least 0 and below 2^32")
    check_before(recipe.grid()[name].training, recipe.engine, trackers)
    with claimed(out, patience=PATIENCE):
        check_folder(recipe, out, resume=True)
    text = text_of(recipe, out, keep=(out / "runs").exists(), progress=watching.preparing)
    sources = Sources(recipe, text)
    config = models_of(recipe, sources.of)[name]
    run = run_of(recipe.grid()[name], config, seed, sources, out)
    check_fresh(run, resume)
    result = known(run)
    if result.status in DONE:
        return run, result
    if is_first() and newest_checkpoint(run.directory) is None and isinstance(text, TextData | Mixture):
        text.verify(watching.preparing)  # a corrupt shard is said now, not when its rows come
    with claimed(out, patience=PATIENCE):  # only now is it sure that the recipe can be trained
        check_folder(recipe, out, resume=True)
        if is_first():
            keep_recipe(recipe, out)
    watching.planned(run)
    result = execute(
        run, sources, resume=resume, trackers=trackers, stop=watching.stop, on_progress=watching.progress
    )
    return run, result


def dry_run(
    recipe: Recipe,
    variant: str | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """What training would take, for one variant or for all: see `keyshift.training.budget.budget`.

    Nothing is prepared or written; a step is timed, where one fits. ``progress`` hears what is done, how many
    variants are, and of how many.

    Raises:
        UserError: no such variant, or settings that contradict each other.
    """
    grid = recipe.grid()
    names = list(grid) if variant is None else [choose(recipe, variant)]
    models, half = models_of(recipe, lambda each: _sizes(recipe, each)), uses_bfloat16(recipe.engine)
    world = recipe.engine.processes or launched()
    rows: list[dict[str, Any]] = []
    for name in names:
        progress("looking at variants", len(rows), len(names))
        each, config = grid[name], models[name]
        asked: dict[str, Any] = {
            "sequence_length": _sizes(recipe, each).sequence_length,
            "world_size": world,
            "half": half,
            "teacher": teacher_config(each.training),
        }
        timed = time_step(config, each.training, recipe.engine, **asked)
        rows.append(budget(config, each.training, recipe.engine, name=name, timed=timed, **asked))
    return rows


def _sizes(recipe: Recipe, variant: Variant) -> Sized:
    """The sizes of a variant's data, which need not be there yet."""
    if recipe.data is None:
        assert variant.task is not None
        return TaskSource(build_task(variant.task))
    assert variant.sequence_length is not None
    return Sizes(vocabulary_of(recipe.data), variant.sequence_length)
