"""Whether there is something in what a recipe compares: two labels that exist, measured in the same."""

from __future__ import annotations

from keyshift.errors import UserError, nearest
from keyshift.recipe.schema import VARIANT, Comparison, Recipe, TextData, Variant, described
from keyshift.recipe.task_table import build_task
from keyshift.tasks import TASKS, Examined

METRICS = ("loss", "diverged")
"""What all runs can be compared in: the loss at the end, and the share of runs that diverged."""

ACCURACY_METRICS = ("accuracy", "steps_to_99")
"""What runs on a task can be compared in as well, beside the scores that some tasks give."""

ROOMY = 2**20
"""Stands in for the size of a tokenizer that is not loaded yet, where a task's sizes do not matter."""


def check_comparisons(recipe: Recipe, grid: dict[str, Variant], origin: str) -> None:
    """Raises `UserError` unless each compares two labels that exist, in what both are measured in, once."""
    axes = {VARIANT: recipe.variants, **recipe.axes}
    for index, comparison in enumerate(recipe.comparisons):
        of, against, axis, metric = comparison.of, comparison.against, comparison.axis, comparison.metric
        if axis not in axes:
            raise UserError(
                f"recipe {origin}: comparisons.axis={axis!r} is not an axis; {nearest(axis, axes)}"
            )
        for label in (of, against):
            if label not in axes[axis]:
                raise UserError(
                    f"recipe {origin}: comparisons names {label!r}, which {axis!r} does not have; "
                    f"{nearest(label, axes[axis])}"
                )
        if of == against:
            raise UserError(f"recipe {origin}: comparisons has {of!r} against itself; name another label")
        measured = _measured(recipe, grid, comparison)
        if metric not in measured:
            alone = " for text alone, without a [task]" if recipe.task is None else ""
            raise UserError(
                f"recipe {origin}: comparisons.metric={metric!r} is not known{alone}; "
                f"{nearest(metric, measured)}"
            )
        if comparison in recipe.comparisons[:index]:
            raise UserError(
                f"recipe {origin}: comparisons has {of!r} against {against!r} in {metric!r} twice; "
                "leave one out"
            )


def _measured(recipe: Recipe, grid: dict[str, Variant], comparison: Comparison) -> list[str]:
    """What the runs of a comparison can be compared in. A score is one if some pair of cells has it."""
    names = [*METRICS, *(ACCURACY_METRICS if recipe.task is not None else ())]
    for variant in grid.values():
        if variant.labels[comparison.axis] == comparison.of:
            other = grid[described({**variant.labels, comparison.axis: comparison.against})]
            theirs = _scores(other, recipe.data)
            names += [name for name in _scores(variant, recipe.data) if name in theirs]
    return names


def _scores(variant: Variant, data: TextData | None) -> tuple[str, ...]:
    """The names of what the variant's task measures of a trained model."""
    if variant.task is None or not hasattr(TASKS[variant.task["name"]], "scores"):
        return ()
    sizes = {}
    if data is not None:
        assert variant.sequence_length is not None
        loaded = variant.task.get("vocab_size", ROOMY)
        vocab_size = data.vocab_size if data.tokenizer is None else loaded
        sizes = {"vocab_size": vocab_size, "sequence_length": variant.sequence_length}
    task = build_task(variant.task, **sizes)
    return task.scores if isinstance(task, Examined) else ()
