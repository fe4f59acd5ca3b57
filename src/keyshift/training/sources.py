"""Where batches come from: a task, prepared text, or both. A batch is a pure function of (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from keyshift.data import TextData
from keyshift.tasks import Examined, Task
from keyshift.tasks.scoring import score

Batch = dict[str, Tensor]


class BatchSource(Protocol):
    """What training needs of its data."""

    vocab_size: int
    sequence_length: int
    tokenizer_path: Path | None
    """The folder of the tokenizer that made the tokens, if one did; saved with every checkpoint."""

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """``input_ids``, ``labels`` and whatever else the model takes, [batch_size, sequence_length],
        int64."""
        ...

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        """Held-out ``loss`` (nats per predicted token) and more; the same data at every call."""
        ...

    def examine(self, model: Any) -> dict[str, float]:
        """Scores of a trained model, by name, from 0 to 1: what takes too long for every evaluation."""
        ...


@dataclass
class TaskSource:
    """A synthetic task. Validation adds ``accuracy`` where the answer is determined."""

    task: Task
    vocab_size: int = field(init=False)
    sequence_length: int = field(init=False)
    tokenizer_path: Path | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.vocab_size = self.task.vocab_size
        self.sequence_length = self.task.sequence_length

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        return self.task.batch(seed, step, batch_size)

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        held_out = (self.task.batch(0, step, batch_size, "validation") for step in range(batches))
        loss, correct, count = score(model, held_out)
        return {"loss": loss / count, "accuracy": correct / count}

    def examine(self, model: Any) -> dict[str, float]:
        model.eval()
        return self.task.examine(model) if isinstance(self.task, Examined) else {}


@dataclass
class TextSource:
    """Prepared text. Validation adds ``bits_per_byte``."""

    data: TextData
    sequence_length: int
    vocab_size: int = field(init=False)
    tokenizer_path: Path | None = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = self.data.vocab_size
        self.tokenizer_path = self.data.tokenizer_path

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        return self.data.train.batch(step, batch_size, self.sequence_length, seed)

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        held_out = self.data.validation.sequential(batch_size, self.sequence_length, batches)
        loss, _, count = score(model, held_out)
        return {"loss": loss / count, "bits_per_byte": self.data.bits_per_byte(loss / count)}

    def examine(self, model: Any) -> dict[str, float]:
        return {}


@dataclass
class MixedSource:
    """Text and a task in every batch, the task in ``share`` of the rows (rounded).

    Validation gives the text's ``loss`` and ``bits_per_byte`` and the task's ``accuracy``.
    """

    text: TextSource
    task: TaskSource
    share: float
    vocab_size: int = field(init=False)
    sequence_length: int = field(init=False)
    tokenizer_path: Path | None = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer_path = self.text.tokenizer_path
        self.vocab_size = self.text.vocab_size
        self.sequence_length = self.text.sequence_length

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        of_task = round(self.share * batch_size)
        text = self.text.train_batch(seed, step, batch_size - of_task)
        task = self.task.train_batch(seed, step, of_task)
        task["position_ids"] = torch.arange(self.sequence_length).expand(of_task, -1)
        return {name: torch.cat((rows, task[name])) for name, rows in text.items()}

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        measured = self.text.validate(model, batch_size, batches)
        return {**measured, "accuracy": self.task.validate(model, batch_size, batches)["accuracy"]}

    def examine(self, model: Any) -> dict[str, float]:
        return self.task.examine(model)
