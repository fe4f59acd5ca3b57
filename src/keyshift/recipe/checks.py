"""What the schema cannot say of a recipe: tables, labels and settings that do not fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keyshift.errors import UserError, nearest
from keyshift.recipe.comparisons import check_comparisons
from keyshift.recipe.schema import OVERRIDABLE, VARIANT, Recipe, TextData, Variant
from keyshift.recipe.task_table import build_task, task_of
from keyshift.recipe.wording import as_table, key_path, shown


def check_recipe(recipe: Recipe, origin: str, *, text_named: bool = True) -> None:
    """Raises `UserError`, naming ``origin``, for the first thing that does not fit the others; without
    ``text_named`` it need not say where text is.
    """
    if recipe.data is not None:
        _check_text(recipe.data, origin, text_named)
    if recipe.task is not None and recipe.data is not None and recipe.data.model_fields_set <= {"paths"}:
        raise UserError(f"recipe {origin} trains on a task and reads no text; leave out {recipe.data.paths}")
    if VARIANT in recipe.axes:
        raise UserError(f"recipe {origin}: axes.{VARIANT} is the table [variants]; use another name")
    for axis, labels in recipe.axes.items():
        if not labels:
            raise UserError(
                f"recipe {origin}: {key_path('axes', axis)} has no labels; add some or leave it out"
            )
    for where, settings in _labels(recipe):
        _check_label(recipe, settings, f"recipe {origin}: {key_path(*where)}")
    grid = recipe.grid()
    for variant in grid.values():
        _check_sources(recipe, variant, origin)
        _check_fields(recipe, variant, origin)
        _check_distillation(recipe, variant, origin)
    check_comparisons(recipe, grid, origin)
    model = recipe.equal_parameters
    if model is not None and model not in recipe.variants:
        raise UserError(
            f"recipe {origin}: equal_parameters={model!r} is not a variant; {nearest(model, recipe.variants)}"
        )


def check_reach(recipe: Recipe, changes: dict[tuple[str, ...], Any], origin: str) -> None:
    """Raises `UserError` for a change that some label's own setting hides from its runs.

    ``changes`` are those of a size and all overrides; a label that one of them sets too is as it is wanted.
    """
    leaves = {path: leaf for keys, value in changes.items() for path, leaf in _leaves(keys, value)}
    for keys, value in leaves.items():
        if len(keys) != 2 or keys[0] not in {"model", *OVERRIDABLE}:
            continue
        inside = keys[1:] if keys[0] == "model" else keys
        for where, settings in _labels(recipe):
            own = settings if keys[0] == "model" else settings.get(keys[0], {})
            path = (*where, *inside)
            if keys[1] in own and path not in leaves:
                raise UserError(
                    f"recipe {origin}: {key_path(*keys)}={shown(value)} does not reach {key_path(*where)}, "
                    f"which sets its own; set {key_path(*path)} too, or change the file"
                )


def _leaves(keys: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in a table, however deep, and the keys that lead to them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves((*keys, key), inner)
    else:
        yield keys, value


def _labels(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every table of ``[variants]`` and ``[axes]``, and the keys that lead to it."""
    for name, settings in recipe.variants.items():
        yield ("variants", name), settings
    for axis, labels in recipe.axes.items():
        for label, settings in labels.items():
            yield ("axes", axis, label), settings


def _check_label(recipe: Recipe, settings: dict[str, Any], place: str) -> None:
    """Raises `UserError` for tables of a label that nothing reads, and for what is the same for all runs."""
    tables = {name: as_table(settings.get(name, {}), f"{place}.{name}") for name in sorted(OVERRIDABLE)}
    for name, present in (("data", recipe.data), ("task", recipe.task)):
        if name in settings and present is None:
            raise UserError(
                f"{place}.{name}={shown(settings[name])} changes the table [{name}], which the recipe does "
                "not have; leave it out"
            )
    if unknown := set(tables["data"]) - {"sequence_length"}:
        raise UserError(
            f"{place}.data.{key_path(min(unknown))} is the same for all; only sequence_length may differ"
        )
    if "until_accuracy" in tables["training"]:
        raise UserError(
            f"{place}.training.until_accuracy={tables['training']['until_accuracy']!r} is the same for all, "
            "or runs of unlike length would be compared; set it in [training]"
        )


def _check_fields(recipe: Recipe, variant: Variant, origin: str) -> None:
    """Raises `UserError` for a setting of the variant's model that no model has."""
    for field in variant.model:
        if field not in config_fields():
            where = ("model",) if field in recipe.model else _origin_of(field, recipe)
            raise UserError(
                f"recipe {origin}: {key_path(*where, field)} is not known; "
                f"{nearest(field, [*sorted(OVERRIDABLE), *config_fields()])}"
            )


def _check_distillation(recipe: Recipe, variant: Variant, origin: str) -> None:
    """Raises `UserError` for a teacher that nothing is learned from, or whose attention is not seen."""
    training = variant.training
    if training.distil_from is None:
        return
    if not any((training.distil_logits, training.distil_attention, training.distil_labels)):
        raise UserError(
            f"recipe {origin}: training.distil_logits, distil_attention and distil_labels are all 0: nothing "
            "is left to train for"
        )
    if training.distil_attention and recipe.engine.compile:
        raise UserError(
            f"recipe {origin}: engine.compile=true hides the attention outputs that "
            f"training.distil_attention={training.distil_attention} compares; leave one of them out"
        )


def _origin_of(field: str, recipe: Recipe) -> tuple[str, ...]:
    """The first label that sets a field of its model."""
    return next(where for where, settings in _labels(recipe) if field in settings)


def _check_sources(recipe: Recipe, variant: Variant, origin: str) -> None:
    """Raises `UserError` unless there is a task, or text to read, or both and the share of each."""
    task, data = variant.task, recipe.data
    share = None if data is None else data.task_share
    if share is None and (task is None) == (data is None):
        raise UserError(
            f"recipe {origin}: needs exactly one of the tables [task] and [data], or both and data.task_share"
        )
    if share is not None and task is None:
        raise UserError(
            f"recipe {origin}: data.task_share={share} needs a [task] to mix with the text; add the table or "
            "leave out the share"
        )
    rows = variant.training.batch_size
    if share is not None and not 0 < round(share * rows) < rows:
        raise UserError(
            f"recipe {origin}: data.task_share={share} of training.batch_size={rows} rows leaves none for "
            f"{'the task' if share < 0.5 else 'text'}; change one of them"
        )
    if task is None:
        if variant.training.until_accuracy is not None:
            raise UserError(
                f"recipe {origin}: training.until_accuracy={variant.training.until_accuracy} needs a [task]: "
                "text alone gives no accuracy; leave it out"
            )
    elif data is None:
        build_task(task)
    elif data.tokenizer is None:
        assert variant.sequence_length is not None
        build_task(task, vocab_size=data.vocab_size, sequence_length=variant.sequence_length)
    else:  # the size of a tokenizer that is to be loaded is not known
        task_of(task)


def _check_text(data: TextData, origin: str, text_named: bool) -> None:
    """Raises `UserError` unless it is said once where the text is, and how a stream of it is read."""
    named = [name for name in ("paths", "mixture", "dataset") if getattr(data, name)]
    if not named and text_named and data.model_fields_set != {"paths"}:
        raise UserError(
            f"recipe {origin}: no text to read; name files or folders after it, or set data.paths"
        )
    if len(named) > 1:
        raise UserError(
            f"recipe {origin}: data.{named[0]} and data.{named[1]} both say where the text is; keep one"
        )
    if data.stream and data.mixture:
        raise UserError(f"recipe {origin}: data.stream reads one source, not data.mixture; leave one out")
    if data.stream and data.tokenizer is None:
        raise UserError(
            f"recipe {origin}: data.stream=true needs data.tokenizer: none can be trained on unread text"
        )


def config_fields() -> list[str]:
    """The KeyshiftConfig fields that a recipe may set."""
    from keyshift.configuration import KeyshiftConfig

    own = KeyshiftConfig.__annotations__
    return sorted(set(own) - {"model_type", "vocab_size", "use_cache"})
