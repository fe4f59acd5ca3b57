"""The tables of a recipe, and the grid of variants that they make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from keyshift.errors import UserError
from keyshift.recipe.wording import first_problem

VARIANT = "variant"
"""The axis that the table ``[variants]`` makes; all others are those of ``[axes]``."""

SMALL = "small"
"""The size that a recipe has without ``[sizes]``."""

OVERRIDABLE = {"training", "task", "data"}
"""The tables that a variant, or a label of an axis, may override beside its model."""


class Section(BaseModel):
    """Base of a recipe's tables: unknown keys, infinity and NaN are errors.

    A number is one in the file too: neither ``"3"`` nor ``true`` stands for it.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class TextData(Section):
    """Real text: where it is, and how to tokenise and cut it."""

    paths: list[str] = Field(
        [], description="files, folders or globs to read; or the folder that `keyshift data prepare` wrote"
    )
    mixture: dict[str, float] = Field(
        {}, description="folders that `keyshift data prepare` wrote -> their shares, in place of paths"
    )
    dataset: str | None = Field(None, description="a Hugging Face data set, in place of paths")
    dataset_config: str | None = Field(None, description="which of its configurations")
    split: str = Field("train", description="of the data set")
    column: str = Field("text", description="of the data set, of jsonl and of parquet: where the text is")
    stream: bool = Field(False, description="tokenise while training goes on, in order, and prepare nothing")
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

    start_from: str | None = Field(
        None,
        description="a keyshift checkpoint whose model and weights training starts from; None: fresh ones",
    )
    trained: Literal["all", "shift"] = Field("all", description="which weights move: all, or α, β, γ alone")
    distil_from: str | None = Field(
        None, description="a checkpoint, the teacher, that the model is trained to match; None: labels alone"
    )
    distil_logits: float = Field(1.0, ge=0, description="weight of KL(teacher || model), nats per token")
    distil_attention: float = Field(
        1.0, ge=0, description="weight of the relative squared error of attention outputs, mean over layers"
    )
    distil_labels: float = Field(0.0, ge=0, description="weight of the cross-entropy, nats per token")
    steps: int = Field(600, ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    clipping: Literal["norm", "zclip"] = Field(
        "norm", description="of gradients: zclip goes by the norm's z-score among recent steps"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="the norm that clipping = norm allows")
    unstable: Literal["stop", "skip"] = Field(
        "stop", description="at a NaN, an infinity or a spike: end the run, or leave out the step"
    )
    spike_zscore: float | None = Field(
        None, gt=0, description="a loss so many standard deviations above its recent mean is a spike"
    )
    eval_steps: int = Field(25, ge=1)
    eval_batches: int = Field(4, ge=1)
    save_steps: int = Field(200, ge=1)
    probe_steps: int | None = Field(
        None, ge=1, description="how often heads are measured: induction scores, α and β; None: never"
    )
    until_accuracy: float | None = Field(
        None, gt=0, le=1, description="end a run at the first evaluation that reaches it; None: all steps"
    )
    shift_learning_rate: float = Field(1.0, ge=0, description="of α, β, γ, as a multiple of learning_rate")
    shift_weight_decay: float | None = Field(
        None, ge=0, description="of α, β, γ; None is weight_decay, as for any weight"
    )


class Engine(Section):
    """How training is computed: but for rounding, nothing here changes what comes out."""

    micro_batch_size: int | None = Field(
        None, ge=1, description="rows that a process computes at a time; None: all of its share of a batch"
    )
    processes: int | None = Field(
        None, ge=1, description="how many torchrun must have started, or it is an error; None: any number"
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="of several processes: each holds the model, or (FSDP2) a share of it"
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of products; auto: bfloat16 on a GPU that has it, else float32"
    )
    compile: bool = Field(False, description="blocks through torch.compile")
    gradient_checkpointing: bool = Field(False, description="activations computed again, not kept")


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
    engine: Engine = Engine()
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
            raise UserError(f"variant {name!r}: training.{first_problem(error, Training)}") from error
        task = None if self.task is None else {**self.task, **tables["task"]}
        length = None if self.data is None else self.data.sequence_length
        if "sequence_length" in tables["data"]:
            length = _length(tables["data"]["sequence_length"], name)
        return Variant(name, labels, model, training, task, length)


TABLES: dict[str, type[BaseModel]] = {
    "data": TextData,
    "training": Training,
    "engine": Engine,
    "comparisons": Comparison,
}
"""The keys of a recipe that hold one of the tables above, or a list of them."""


def _length(value: Any, name: str) -> int:
    """A variant's own length of text. Raises `UserError`, naming the variant, if it is not one."""
    try:
        return TextData.model_validate({"sequence_length": value}).sequence_length
    except ValidationError as error:
        raise UserError(f"variant {name!r}: data.{first_problem(error, TextData)}") from error


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
