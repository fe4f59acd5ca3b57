"""A recipe: what to train (variants), on what (a task, text or both), and how. In TOML, checked here."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from keyshift.errors import UserError, nearest
from keyshift.tasks import TASKS, Task

VARIANT = "variant"
"""The axis that the table ``[variants]`` makes; all others are those of ``[axes]``."""

SMALL = "small"
"""The size that a recipe has without ``[sizes]``."""

OVERRIDABLE = {"training", "task", "data"}
"""The tables that a variant, or a label of an axis, may override beside its model."""


class Section(BaseModel):
    """Base of a recipe's tables: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


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
    metric: str = Field("loss", description="loss, accuracy, steps_to_99, or a score that the task gives")


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
        if unknown := set(tables["data"]) - {"sequence_length"}:
            raise UserError(
                f"variant {name!r}: data.{min(unknown)} is the same for all; only sequence_length may differ"
            )
        try:
            training = Training.model_validate({**self.training.model_dump(), **tables["training"]})
        except ValidationError as error:
            raise UserError(f"variant {name!r}: training.{_describe(error, Training)}") from error
        task = None if self.task is None else {**self.task, **tables["task"]}
        length = (
            None if self.data is None else tables["data"].get("sequence_length", self.data.sequence_length)
        )
        return Variant(name, labels, model, training, task, length)


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
    has replaces that axis, so that labels of one size need not be true of another.

    Raises:
        UserError: no such recipe or size, not TOML, unknown keys (with the nearest valid one), values of a
            wrong type.
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
    sizes = {SMALL: {}, **content.pop("sizes", {})}
    if size not in sizes:
        raise UserError(f"size={size!r} is not known to recipe {name_or_path!r}; {nearest(size, sizes)}")
    for axis in sizes[size].get("axes", {}):
        content.get("axes", {}).pop(axis, None)
    _merge(content, sizes[size])
    for key, value in (overrides or {}).items():
        _set(content, key, value)
    return parse_recipe(content, str(path))


def parse_recipe(content: dict[str, Any], origin: str) -> Recipe:
    """Check the content of a recipe; ``origin`` names it in errors."""
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"recipe {origin}: {_describe(error)}") from error
    if recipe.task is not None and recipe.data is not None and set(content["data"]) <= {"paths"}:
        raise UserError(f"recipe {origin} trains on a task and reads no text; leave out {recipe.data.paths}")
    if VARIANT in recipe.axes:
        raise UserError(f"recipe {origin}: axes.{VARIANT} is the table [variants]; use another name")
    for axis, labels in recipe.axes.items():
        if not labels:
            raise UserError(f"recipe {origin}: axes.{axis} has no labels; add some or leave it out")
    for name, variant in recipe.grid().items():
        _check_sources(recipe, variant, origin)
        for field in variant.model:
            if field not in config_fields():
                where = _origin_of(field, recipe, name)
                raise UserError(
                    f"recipe {origin}: {where}.{field} is not known; {nearest(field, config_fields())}"
                )
    for comparison in recipe.comparisons:
        _check_comparison(recipe, comparison, origin)
    model = recipe.equal_parameters
    if model is not None and model not in recipe.variants:
        raise UserError(
            f"recipe {origin}: equal_parameters={model!r} is not a variant; {nearest(model, recipe.variants)}"
        )
    return recipe


def _origin_of(field: str, recipe: Recipe, name: str) -> str:
    """The table of the recipe that sets a field of a variant's model."""
    if field in recipe.model:
        return "model"
    for axis, labels in {
        "variants": recipe.variants,
        **{f"axes.{a}": t for a, t in recipe.axes.items()},
    }.items():
        for label, settings in labels.items():
            if field in settings:
                return f"{axis}.{label}"
    raise AssertionError(name)


def _check_comparison(recipe: Recipe, comparison: Comparison, origin: str) -> None:
    """Raises `UserError` unless the axis and both labels exist."""
    axes = {VARIANT: recipe.variants, **recipe.axes}
    if comparison.axis not in axes:
        raise UserError(
            f"recipe {origin}: comparisons.axis={comparison.axis!r} is not an axis; "
            f"{nearest(comparison.axis, axes)}"
        )
    labels = axes[comparison.axis]
    for label in (comparison.of, comparison.against):
        if label not in labels:
            raise UserError(
                f"recipe {origin}: comparisons names {label!r}, which {comparison.axis!r} does not have; "
                f"{nearest(label, labels)}"
            )


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
    if task is not None and data is None:
        build_task(task)
    if task is not None and data is not None and data.tokenizer is None:  # a loaded one's size is not known
        assert variant.sequence_length is not None
        build_task(task, vocab_size=data.vocab_size, sequence_length=variant.sequence_length)


def build_task(table: dict[str, Any], **sizes: int) -> Task:
    """The task of a ``[task]`` table: ``name`` picks it, the rest are its fields.

    ``sizes`` are those of the text that it is mixed with: the table need not give them.

    Raises:
        UserError: an unknown task or field, a value of a wrong type, or one that contradicts ``sizes``.
    """
    fields = dict(table)
    name = fields.pop("name", None)
    if name not in TASKS:
        raise UserError(f"task.name={name!r} is not known; {nearest(str(name), TASKS)}")
    task = TASKS[name]
    valid = [field.name for field in dataclasses.fields(cast(Any, task))]
    for field, value in fields.items():
        if field not in valid:
            raise UserError(f"task.{field} is not known; {nearest(field, valid)}")
        if not isinstance(value, int):
            raise UserError(f"task.{field}={value!r} must be an integer")
    for field, value in sizes.items():
        if field not in valid:
            raise UserError(f"task.name={name!r} has a {field} of its own and cannot be mixed with text")
        if fields.setdefault(field, value) != value:
            raise UserError(
                f"task.{field}={fields[field]} contradicts the text's {field}={value}; leave it out"
            )
    return task(**fields)


def config_fields() -> list[str]:
    """The KeyshiftConfig fields that a recipe may set."""
    from keyshift.configuration import KeyshiftConfig

    own = KeyshiftConfig.__annotations__
    return sorted(set(own) - {"model_type", "vocab_size", "use_cache"})


def _merge(content: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put ``changes`` over ``content``, table by table."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            _merge(content[key], value)
        else:
            content[key] = value


def _set(content: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise UserError(f"--set {dotted}: {table!r} is not a table")
    content[key] = value


def _describe(error: ValidationError, owner: type[BaseModel] | None = None) -> str:
    """The first problem in one line, with the nearest valid key where the key is the problem.

    ``owner`` is the section whose keys these are; None finds it from the key's table.
    """
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{where}={problem['input']!r}: {problem['msg'].lower()}"
    if owner is None:
        sections: dict[str, type[BaseModel]] = {
            "data": TextData,
            "training": Training,
            "comparisons": Comparison,
        }
        owner = sections.get(str(problem["loc"][0]), Recipe) if len(problem["loc"]) > 1 else Recipe
    return f"{where} is not known; {nearest(str(problem['loc'][-1]), owner.model_fields)}"
