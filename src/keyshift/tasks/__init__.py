"""Synthetic tasks: dataclasses of sizes whose batches are pure functions of (seed, step)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from keyshift.tasks.hop_k import HopK
from keyshift.tasks.igsm import IGSM
from keyshift.tasks.induction import Induction
from keyshift.tasks.ngram import NGram
from keyshift.tasks.recall import Recall
from keyshift.tasks.repeated import RepeatedTokens

if TYPE_CHECKING:
    from torch import Tensor


class Task(Protocol):
    """What training and comparing need of a task."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 … vocab_size - 1."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        ...

    def batch(self, seed: int, step: int, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [batch_size, sequence_length], int64; ``split`` is train or
        validation."""
        ...

    def chance_level(self) -> float:
        """The accuracy of `guessing`."""
        ...

    @property
    def guessing(self) -> str:
        """The way of guessing whose accuracy `chance_level` is, in words."""
        ...


@runtime_checkable
class Examined(Protocol):
    """A task that takes a closer look at a trained model, where accuracy alone says too little."""

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of what `examine` gives, in its order."""
        ...

    def examine(self, model: Any) -> dict[str, float]:
        """Scores by name, from 0 to 1, of the answers that ``model`` gives to held-out questions."""
        ...


TASKS: dict[str, type[Task]] = {
    "hop_k": HopK,
    "igsm": IGSM,
    "induction": Induction,
    "ngram": NGram,
    "recall": Recall,
    "repeated": RepeatedTokens,
}

__all__ = [
    "IGSM",
    "TASKS",
    "Examined",
    "HopK",
    "Induction",
    "NGram",
    "Recall",
    "RepeatedTokens",
    "Task",
]
