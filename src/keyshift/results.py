"""What a comparison measures: the schema of ``report.json``, read by the report and by other programs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Literal[1] = 1


Status = Literal["finished", "interrupted", "diverged", "failed", "pending"]


class Record(BaseModel):
    """Base of every record: unknown keys are errors, so that a typo in a producer cannot go unnoticed."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Point(Record):
    """One evaluation during training, on held-out data."""

    step: int = Field(description="optimiser steps taken so far")
    tokens: int = Field(description="training tokens seen so far")
    loss: float = Field(description="mean held-out loss, nats per predicted token")
    accuracy: float | None = Field(None, description="top-1 accuracy where the answer is determined (tasks)")
    bits_per_byte: float | None = Field(None, description="held-out loss in bits per UTF-8 byte (text)")


class ShiftWeights(Record):
    """The shift weights that one layer learned. ``weights[h][m]`` multiplies the token ``m`` places back."""

    layer: int = Field(description="from 0")
    of: Literal["key", "value", "query"] = Field(
        description="what is mixed: α of keys, β of values, γ of queries"
    )
    weights: list[list[float]] = Field(
        description="per head, the weights of the token itself and of those before"
    )


class RunResult(Record):
    """One variant trained with one seed."""

    seed: int = Field(description="of the initial weights and of the order of the data")
    status: Status = Field(
        description="diverged: the loss or a weight became NaN or infinite; failed: its process was killed "
        "or could not go on; pending: not begun"
    )
    message: str | None = Field(None, description="why the run did not finish")
    steps: int = Field(0, description="optimiser steps taken")
    curve: list[Point] = Field([], description="held-out evaluations, in order")
    skipped: int = Field(0, description="steps left out: a NaN, an infinity or a spike")
    induction: list[tuple[int, float]] = Field(
        [], description="(step, the best head's induction score on repeated random tokens), where probed"
    )
    train_loss: list[tuple[int, float]] = Field([], description="(step, training loss) as logged")
    train_tokens_per_second: float | None = Field(
        None, description="from the median optimiser step, without data, evaluation and saving"
    )
    decode_ms_per_token: float | None = Field(
        None, description="milliseconds per generated token, one sequence, median"
    )
    shift_weights: list[ShiftWeights] = Field([], description="as learned, for variants with a shift")
    scores: dict[str, float] = Field(
        {}, description="what the task measured of the trained model, each from 0 to 1 (best)"
    )
    environment: dict[str, str] = Field({}, description="where it was trained: versions, processor, threads")

    def steps_to(self, accuracy: float) -> int | None:
        """The first evaluated step at which held-out accuracy reached ``accuracy``; None if it never did."""
        reached = (p.step for p in self.curve if p.accuracy is not None and p.accuracy >= accuracy)
        return next(reached, None)


class VariantResult(Record):
    """One row of the comparison: a model configuration and its runs."""

    name: str = Field(description="the variant's name in the recipe")
    labels: dict[str, str] = Field({}, description="its label on each axis of the recipe's grid")
    config: dict[str, Any] = Field(description="the KeyshiftConfig fields that define the variant")
    parameters: int = Field(description="trainable parameters, embeddings included, tied ones once")
    shift_parameters: int = Field(0, description="how many of them are shift weights")
    cache_bytes_per_token: int = Field(description="predicted, all layers, one sequence, in the run's dtype")
    cache_bytes_per_token_measured: float | None = Field(
        None, description="allocated bytes of a real cache, divided by its capacity in tokens"
    )
    runs: list[RunResult] = Field([], description="one per seed, in order")


class Report(Record):
    """The whole of ``report.json``."""

    schema_version: Literal[1] = Field(SCHEMA_VERSION, description="of this schema")
    title: str = Field(description="the recipe's")
    kind: Literal["task", "text"] = Field(description="a synthetic task or the user's text")
    command: str = Field(description="the command line that produces this report")
    created: str = Field(description="ISO 8601 time, UTC")
    environment: dict[str, str] = Field(description="versions, processor, threads, of the first run trained")
    recipe: dict[str, Any] = Field(description="the resolved recipe")
    data: dict[str, Any] = Field(
        {}, description="facts about the data: tokens, bytes, documents, chance level"
    )
    complete: bool = Field(description="whether every run finished or diverged")
    variants: list[VariantResult] = Field(description="in the recipe's order")
