"""A recipe: what to train (variants), on what (a task, text or both), and how. In TOML, checked here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from keyshift.errors import UserError, nearest
from keyshift.tasks import TASKS, Examined, Task

VARIANT = "variant"
"""The axis that the table ``[variants]`` makes; all others are those of ``[axes]``."""

SMALL = "small"
"""The size that a recipe has without ``[sizes]``."""

OVERRIDABLE = {"training", "task", "data"}
"""The tables that a variant, or a label of an axis, may override beside its model."""

METRICS = ("loss", "diverged")
"""What all runs can be compared in: the loss at the end, and the share of runs that diverged."""

ACCURACY_METRICS = ("accuracy", "steps_to_99")
"""What runs on a task can be compared in as well, beside the scores that some tasks give."""

ROOMY = 2**20
"""Stands in for the size of a tokenizer that is not loaded yet, where a task's sizes do not matter."""

WANTED = {"dict_type": "must be a table", "model_type": "must be a table", "list_type": "must be a list"}
"""pydantic's kinds of errors whose own messages speak of Python's types, not of TOML's."""


class Section(BaseModel):
    """Base of a recipe's tables: unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextData(Section):
    """Real text: files to read, and how to tokenise and cut them."""

    paths: list[str] = []
    tokenizer: str | None = Field(
        None, description="name or folder; None trains one on the training documents"
    )
    vocab_size: int = Field(4096, ge=257, description="of a tokenizer that is trained")
    sequence_length: int = Field(256, ge=2)
    validation_fraction: float = Field(0.05, gt=0, lt=1)
    task_share: float | None = Field(
        None, gt=0, lt=1, description="share of every batch's rows that [task] fills; None reads text alone"
    )


class Training(Section):
    """Optimiser, schedule, evaluation. Steps are optimiser steps."""

    steps: int = Field(600, ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    eval_steps: int = Field(25, ge=1)
    eval_batches: int = Field(4, ge=1)
    save_steps: int = Field(200, ge=1)
    until_accuracy: float | None = Field(
        None, gt=0, le=1, description="end a run at the first evaluation that reaches it; None: all steps"
    )
    shift_learning_rate: float = Field(1.0, ge=0, description="of α, β, γ, as a multiple of learning_rate")
    shift_weight_decay: float | None = Field(
        None, ge=0, description="of α, β, γ; None is weight_decay, as for any weight"
    )


class Comparison(Section):
    """Two labels of one axis, compared run by run: at equal seeds and equal labels of the other axes."""

    of: str
    against: str
    axis: str = Field(VARIANT, description="variant: the table [variants]; or one of [axes]")
    metric: str = Field(
        "loss", description="loss, accuracy, steps_to_99, diverged, or a score that the task gives"
    )


@dataclass(frozen=True)
class Variant:
    """One row of a comparison, everything about it filled in.

    Attributes:
        name: the labels, as `described`.
        labels: its label on every axis; ``variant`` is the first.
        model: KeyshiftConfig fields.
        training: as it is trained.
        task: the table of its task, if it has one.
        sequence_length: tokens per row of text, if there is text.
    """

    name: str
    labels: dict[str, str]
    model: dict[str, Any]
    training: Training
    task: dict[str, Any] | None
    sequence_length: int | None


class Recipe(Section):
    """The whole of a recipe file."""

    title: str
    paper: str | None = Field(None, description="what the paper says about it, for the report")
    verdict: str | None = Field(None, description="what came of it at small size, for `keyshift papers`")
    seeds: int = Field(3, ge=1, description="each variant is trained with seeds 0 … seeds - 1")
    task: dict[str, Any] | None = None
    data: TextData | None = None
    training: Training = Training()
    model: dict[str, Any] = Field({}, description="KeyshiftConfig fields that all variants share")
    variants: dict[str, dict[str, Any]] = Field(min_length=1, description="name -> KeyshiftConfig fields")
    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        {}, description="axis -> label -> fields, as in variants: every variant is tried at every label"
    )
    equal_parameters: str | None = Field(
        None, description="a variant; the others' intermediate_size is set so that they are as large as it"
    )
    comparisons: list[Comparison] = []

    def grid(self) -> dict[str, Variant]:
        """Every combination of a variant with one label of each axis, by name.

        Raises:
            UserError: a training, task or data setting of a label that is not known or has a wrong value.
        """
        axes = {VARIANT: self.variants, **self.axes}
        cells = itertools.product(*(labels.items() for labels in axes.values()))
        grid: dict[str, Variant] = {}
        for cell in cells:
            variant = self._variant(dict(zip(axes, cell, strict=True)))
            if variant.name in grid:
                raise UserError(f"two combinations of labels are called {variant.name!r}; rename a label")
            grid[variant.name] = variant
        return grid

    def _variant(self, cell: dict[str, tuple[str, dict[str, Any]]]) -> Variant:
        labels = {axis: label for axis, (label, _) in cell.items()}
        name = described(labels)
        model, tables = dict(self.model), {table: dict[str, Any]() for table in OVERRIDABLE}
        for _, settings in cell.values():
            model.update({key: value for key, value in settings.items() if key not in OVERRIDABLE})
            for table, own in tables.items():
                own.update(settings.get(table, {}))
        try:
            training = Training.model_validate({**self.training.model_dump(), **tables["training"]})
        except ValidationError as error:
            raise UserError(f"variant {name!r}: training.{_describe(error, Training)}") from error
        task = None if self.task is None else {**self.task, **tables["task"]}
        length = None if self.data is None else self.data.sequence_length
        if "sequence_length" in tables["data"]:
            length = _length(tables["data"]["sequence_length"], name)
        return Variant(name, labels, model, training, task, length)


def _length(value: Any, name: str) -> int:
    """A variant's own length of text. Raises `UserError`, naming the variant, if it is not one."""
    try:
        return TextData.model_validate({"sequence_length": value}).sequence_length
    except ValidationError as error:
        raise UserError(f"variant {name!r}: data.{_describe(error, TextData)}") from error


def number(label: str) -> float | None:
    """The number that a label is, if it is one."""
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def described(labels: Mapping[str, str]) -> str:
    """Labels for readers; a number says nothing without its axis: "GVA, hidden size 8, Q-norm"."""
    return ", ".join(
        label if axis == VARIANT or number(label) is None else f"{axis} {label}"
        for axis, label in labels.items()
    )


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with keyshift, by name."""
    package = Path(__file__).parent
    folder = package / "recipes"
    if not folder.is_dir():  # a checkout keeps them at its root; a wheel carries them inside the package
        folder = package.parents[1] / "recipes"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.toml"))}


def load_recipe(name_or_path: str, overrides: dict[str, Any] | None = None, size: str = SMALL) -> Recipe:
    """Read a recipe at one of its sizes and apply ``overrides`` (``{"training.steps": 100}``) on top.

    ``small`` is the file as it is; ``[sizes.NAME]`` holds what is different at another size. An axis that it
    has replaces that axis, so that labels of one size need not be true of another. A key with dots in it is
    quoted in overrides: ``variants."GVA 0.5".shift``.

    Raises:
        UserError: no such recipe or size, not TOML, unknown keys (with the nearest valid one), values of a
            wrong type, an override that does not reach every variant.
    """
    builtin = builtin_recipes()
    path = builtin.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise UserError(
            f"recipe {name_or_path!r} is neither a file nor built in; {nearest(name_or_path, builtin)}"
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not valid TOML: {error}") from error
    _choose_size(content, size, name_or_path)
    changes = {_keys(dotted): value for dotted, value in (overrides or {}).items()}
    for keys, value in changes.items():
        _set(content, keys, value)
    recipe = parse_recipe(content, str(path))
    _check_reach(recipe, changes, str(path))
    return recipe


def parse_recipe(content: dict[str, Any], origin: str) -> Recipe:
    """Check the content of a recipe; ``origin`` names it in errors.

    Raises:
        UserError: unknown keys, values of a wrong type, tables or comparisons that do not fit each other.
    """
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"recipe {origin}: {_describe(error)}") from error
    if recipe.task is not None and recipe.data is not None and recipe.data.model_fields_set <= {"paths"}:
        raise UserError(f"recipe {origin} trains on a task and reads no text; leave out {recipe.data.paths}")
    if VARIANT in recipe.axes:
        raise UserError(f"recipe {origin}: axes.{VARIANT} is the table [variants]; use another name")
    for axis, labels in recipe.axes.items():
        if not labels:
            raise UserError(f"recipe {origin}: {_path('axes', axis)} has no labels; add some or leave it out")
    for where, settings in _labels(recipe):
        _check_label(recipe, settings, f"recipe {origin}: {_path(*where)}")
    grid = recipe.grid()
    for variant in grid.values():
        _check_sources(recipe, variant, origin)
        _check_fields(recipe, variant, origin)
    _check_comparisons(recipe, grid, origin)
    model = recipe.equal_parameters
    if model is not None and model not in recipe.variants:
        raise UserError(
            f"recipe {origin}: equal_parameters={model!r} is not a variant; {nearest(model, recipe.variants)}"
        )
    return recipe


def _labels(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every table of ``[variants]`` and ``[axes]``, and the keys that lead to it."""
    for name, settings in recipe.variants.items():
        yield ("variants", name), settings
    for axis, labels in recipe.axes.items():
        for label, settings in labels.items():
            yield ("axes", axis, label), settings


def _check_label(recipe: Recipe, settings: dict[str, Any], place: str) -> None:
    """Raises `UserError` for tables of a label that nothing reads, and for what is the same for all runs."""
    tables = {name: _table(settings.get(name, {}), f"{place}.{name}") for name in sorted(OVERRIDABLE)}
    for name, present in (("data", recipe.data), ("task", recipe.task)):
        if name in settings and present is None:
            raise UserError(
                f"{place}.{name}={_shown(settings[name])} changes the table [{name}], which the recipe does "
                "not have; leave it out"
            )
    if unknown := set(tables["data"]) - {"sequence_length"}:
        raise UserError(
            f"{place}.data.{_path(min(unknown))} is the same for all; only sequence_length may differ"
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
                f"recipe {origin}: {_path(*where, field)} is not known; {nearest(field, config_fields())}"
            )


def _origin_of(field: str, recipe: Recipe) -> tuple[str, ...]:
    """The first label that sets a field of its model."""
    return next(where for where, settings in _labels(recipe) if field in settings)


def _check_comparisons(recipe: Recipe, grid: dict[str, Variant], origin: str) -> None:
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


def _check_reach(recipe: Recipe, changes: dict[tuple[str, ...], Any], origin: str) -> None:
    """Raises `UserError` for an override that some label's own setting hides from its runs.

    ``changes`` are all overrides; a label that one of them sets too is as the user wants it.
    """
    leaves = [leaf for keys, value in changes.items() for leaf in _leaves(keys, value)]
    for keys, value in leaves:
        if len(keys) != 2 or keys[0] not in {"model", *OVERRIDABLE}:
            continue
        inside = keys[1:] if keys[0] == "model" else keys
        for where, settings in _labels(recipe):
            own = settings if keys[0] == "model" else settings.get(keys[0], {})
            path = (*where, *inside)
            if keys[1] in own and not any(path[: len(other)] == other for other in changes):
                raise UserError(
                    f"recipe {origin}: {_path(*keys)}={_shown(value)} does not reach {_path(*where)}, which "
                    f"sets its own; set {_path(*path)} too, or change the file"
                )


def _leaves(keys: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in a table, however deep, and the keys that lead to them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves((*keys, key), inner)
    else:
        yield keys, value


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
    if data is not None and not data.paths:
        raise UserError(
            f"recipe {origin}: no text to read; name files or folders after it, or set data.paths"
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
        _task_of(task)


def build_task(table: dict[str, Any], **sizes: int) -> Task:
    """The task of a ``[task]`` table: ``name`` picks it, the rest are its fields.

    ``sizes`` are those of the text that it is mixed with: the table need not give them.

    Raises:
        UserError: an unknown task or field, a value of a wrong type, or one that contradicts ``sizes``.
    """
    kind, fields = _task_of(table)
    for field, value in sizes.items():
        if field not in _sizes_of(kind):
            raise UserError(
                f"task.name={table['name']!r} has a {field} of its own and cannot be mixed with text"
            )
        if fields.setdefault(field, value) != value:
            raise UserError(
                f"task.{field}={fields[field]} contradicts the text's {field}={value}; leave it out"
            )
    return kind(**fields)


def _task_of(table: dict[str, Any]) -> tuple[type[Task], dict[str, int]]:
    """The class of a ``[task]`` table, and its fields. Raises `UserError` as `build_task`."""
    fields = dict(table)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"task.name={_shown(name)} is not known; {nearest(str(name), TASKS)}")
    for field, value in fields.items():
        if field not in _sizes_of(TASKS[name]):
            raise UserError(f"{_path('task', field)} is not known; {nearest(field, _sizes_of(TASKS[name]))}")
        if type(value) is not int:  # true is one by inheritance
            raise UserError(f"task.{field}={_shown(value)} must be an integer")
    return TASKS[name], fields


def _sizes_of(task: type[Task]) -> list[str]:
    """The fields of a ``[task]`` table beside its name."""
    return [field.name for field in dataclasses.fields(cast(Any, task))]


def config_fields() -> list[str]:
    """The KeyshiftConfig fields that a recipe may set."""
    from keyshift.configuration import KeyshiftConfig

    own = KeyshiftConfig.__annotations__
    return sorted(set(own) - {"model_type", "vocab_size", "use_cache"})


def _choose_size(content: dict[str, Any], size: str, name: str) -> None:
    """Take the table of sizes out of ``content``, and put what one of them changes over the rest.

    Raises:
        UserError: an unknown size, or tables of ``[sizes]`` that are none; ``name`` names the recipe.
    """
    sizes = {SMALL: {}, **_table(content.pop("sizes", {}), f"recipe {name}: sizes")}
    for other, changes in sizes.items():
        _table(changes, f"recipe {name}: {_path('sizes', other)}")
    if size not in sizes:
        raise UserError(f"size={size!r} is not known to recipe {name!r}; {nearest(size, sizes)}")
    axes = _table(sizes[size].get("axes", {}), f"recipe {name}: {_path('sizes', size, 'axes')}")
    replaced = content.get("axes", {})
    if isinstance(replaced, dict):  # what it is instead is refused with the rest
        content["axes"] = {axis: labels for axis, labels in replaced.items() if axis not in axes}
    _merge(content, sizes[size])


def _merge(content: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put ``changes`` over ``content``, table by table."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            _merge(content[key], value)
        else:
            content[key] = value


def _keys(dotted: str) -> tuple[str, ...]:
    """The keys of ``variants."GVA 0.5".shift``: dots in quotes do not separate."""
    return tuple(key.strip('"') for key in re.split(r'\.(?=(?:[^"]*"[^"]*")*[^"]*$)', dotted))


def _path(*keys: str) -> str:
    """Keys as TOML writes them, and as `_keys` reads them."""
    bare = re.compile(r"[A-Za-z0-9_-]+")
    return ".".join(key if bare.fullmatch(key) else json.dumps(key, ensure_ascii=False) for key in keys)


def _set(content: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    *tables, key = keys
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise UserError(f"--set {_path(*keys)}: {table!r} is not a table")
    content[key] = value


def _table(value: Any, where: str) -> dict[str, Any]:
    """``value``, which is a table. Raises `UserError`, naming ``where``, if it is none."""
    if not isinstance(value, dict):
        raise UserError(f"{where}={_shown(value)} must be a table")
    return value


def _shown(value: Any) -> str:
    """A value of the file as errors quote it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _describe(error: ValidationError, owner: type[BaseModel] | None = None) -> str:
    """The first problem in one line, with the nearest valid key where the key is the problem.

    ``owner`` is the section whose keys these are; None finds it from the key's table.
    """
    problem = error.errors()[0]
    where = _path(*(str(part) for part in problem["loc"]))
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] in WANTED:
        return f"{where}={_shown(problem['input'])} {WANTED[problem['type']]}"
    if problem["type"] != "extra_forbidden":
        return f"{where}={_shown(problem['input'])}: {problem['msg'].lower()}"
    if owner is None:
        sections: dict[str, type[BaseModel]] = {
            "data": TextData,
            "training": Training,
            "comparisons": Comparison,
        }
        owner = sections.get(str(problem["loc"][0]), Recipe) if len(problem["loc"]) > 1 else Recipe
    return f"{where} is not known; {nearest(str(problem['loc'][-1]), owner.model_fields)}"
