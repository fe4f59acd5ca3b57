"""A recipe: what to train (variants), on what (a task, text or both), and how. In TOML, checked here."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from keyshift.errors import UserError, nearest
from keyshift.tasks import TASKS, Task


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


class Recipe(Section):
    """The whole of a recipe file."""

    title: str
    seeds: int = Field(3, ge=1, description="each variant is trained with seeds 0 … seeds - 1")
    task: dict[str, Any] | None = None
    data: TextData | None = None
    training: Training = Training()
    model: dict[str, Any] = Field({}, description="KeyshiftConfig fields that all variants share")
    variants: dict[str, dict[str, Any]] = Field(min_length=1, description="name -> KeyshiftConfig fields")


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with keyshift, by name."""
    package = Path(__file__).parent
    folder = package / "recipes"
    if not folder.is_dir():  # a checkout keeps them at its root; a wheel carries them inside the package
        folder = package.parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_recipe(name_or_path: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe and apply ``overrides`` (``{"training.steps": 100}``) on top.

    Raises:
        UserError: no such recipe, not TOML, unknown keys (with the nearest valid one), values of a wrong
            type.
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
    _check_sources(recipe, origin)
    valid = config_fields()
    for table, fields in [
        ("model", recipe.model),
        *((f"variants.{n}", v) for n, v in recipe.variants.items()),
    ]:
        for field in fields:
            if field not in valid:
                raise UserError(f"recipe {origin}: {table}.{field} is not known; {nearest(field, valid)}")
    return recipe


def _check_sources(recipe: Recipe, origin: str) -> None:
    """Raises `UserError` unless there is a task, or text to read, or both and the share of each."""
    task, data = recipe.task, recipe.data
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
    rows = recipe.training.batch_size
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
        build_task(task, vocab_size=data.vocab_size, sequence_length=data.sequence_length)


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


def _set(content: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise UserError(f"--set {dotted}: {table!r} is not a table")
    content[key] = value


def _describe(error: ValidationError) -> str:
    """The first problem in one line, with the nearest valid key where the key is the problem."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{where}={problem['input']!r}: {problem['msg'].lower()}"
    sections: dict[str, type[BaseModel]] = {"data": TextData, "training": Training}
    owner = sections.get(str(problem["loc"][0]), Recipe) if len(problem["loc"]) > 1 else Recipe
    return f"{where} is not known; {nearest(str(problem['loc'][-1]), owner.model_fields)}"
