"""What ``keyshift eval`` measures: the schema of ``eval.json``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from keyshift.results import Record

SCHEMA_VERSION: Literal[1] = 1

SHARES = ("acc", "acc_norm", "exact_match", "math_verify")
"""Metrics that are shares of right answers."""


class Score(Record):
    """One metric of one task for one checkpoint."""

    model: str = Field(description="the name that checkpoints of several seeds share")
    checkpoint: str = Field(description="the folder or the hub name")
    task: str
    part_of: str | None = Field(None, description="the group whose score this one enters")
    shots: int | None = Field(None, description="examples in the prompt; None where they differ or are none")
    metric: str = Field(description="as the harness calls it; its filter in brackets, unless it has none")
    value: float = Field(description="accuracies from 0 to 1, losses in nats per token")
    error: float | None = Field(
        None, description="standard error over questions, of shares of right answers: √(p (1 - p) / (n - 1))"
    )
    questions: int = Field(description="documents, passages or keys that the value is over")
    requests: int = Field(0, description="calls of the model: a question with four answers makes four")
    truncated: int = Field(0, description="requests whose beginning was cut off to fit the model's positions")


class EvalReport(Record):
    """One call of ``keyshift eval``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    command: str = Field(description="that made this report")
    created: str = Field(description="ISO 8601, UTC")
    environment: dict[str, str] = Field(description="versions and machine")
    settings: dict[str, Any] = Field(description="tasks, shots, limit, batch size, dtype, device")
    models: dict[str, list[str]] = Field(description="name, and the checkpoints that share it")
    answers: dict[str, str] = Field(description="checkpoint, and the name of the file of its answers")
    remarks: list[str] = Field([], description="what a reader should know of the checkpoints")
    scores: list[Score]
