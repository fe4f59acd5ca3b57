"""Repeated random tokens: a string without repeats, over and over, as induction heads are measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keyshift.errors import UserError
from keyshift.tasks.induction import IGNORED, SPLITS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RepeatedTokens:
    """Token 0 (a tokenizer's start of text), then a random string of distinct tokens, repeated to the end.

    The length of the string, the period, is drawn for every row, so that no fixed distance gives the answer.
    An answer is *determined* once the present token was seen before: from the second token of the second copy
    on. Only there is it a label, elsewhere the label is -100. So the best accuracy is 1, and the best loss 0.

    Args:
        vocab_size: the string is drawn from tokens 1 … vocab_size - 1.
        sequence_length: tokens per row.
        shortest: the shortest period.
        longest: the longest one; None is the longest of which the row holds two copies and the vocabulary
            enough tokens. All periods from ``shortest`` to here are equally likely.

    Raises:
        UserError: periods that are in the wrong order, need more tokens than there are, or leave no answer.

    Example: a row of 9 with the string ``7 3 9``. The token at 4 repeats the one at 1 as nobody could know;
        from 5 on the answers are determined::

        input_ids  0  7  3  9  7  3  9  7  3
        labels     -  -  -  -  -  3  9  7  3      (labels are the tokens themselves; the model shifts them)
    """

    vocab_size: int = 256
    sequence_length: int = 64
    shortest: int = 2
    longest: int | None = None

    def __post_init__(self) -> None:
        largest = min(self.vocab_size - 1, self.sequence_length - 3)
        if self.shortest < 1:
            raise UserError(f"task shortest={self.shortest}: a string has at least 1 token")
        if self.last_period > largest:
            raise UserError(
                f"task longest={self.last_period}: vocab_size={self.vocab_size} and sequence_length="
                f"{self.sequence_length} allow at most {largest}; lower it or raise them"
            )
        if self.shortest > self.last_period:
            raise UserError(
                f"task shortest={self.shortest} is above longest={self.last_period}; lower it, or raise "
                "longest, sequence_length or vocab_size"
            )

    @property
    def last_period(self) -> int:
        """``longest``, with its default filled in."""
        if self.longest is not None:
            return self.longest
        return min(self.vocab_size - 1, (self.sequence_length - 1) // 2)

    def batch(self, seed: int, step: int, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [batch_size, sequence_length], int64; a pure function of the
        arguments."""
        import torch

        rng = np.random.default_rng([seed, SPLITS[split], step])
        period = rng.integers(self.shortest, self.last_period, size=(batch_size, 1), endpoint=True)
        alphabet = np.tile(np.arange(1, self.vocab_size), (batch_size, 1))
        string = rng.permuted(alphabet, axis=1)[:, : self.last_period]
        position = np.arange(self.sequence_length)
        tokens = np.take_along_axis(string, (position - 1) % period, axis=1)
        tokens[:, 0] = 0
        labels = np.where(position > period + 1, tokens, IGNORED)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    @property
    def guessing(self) -> str:
        """See `Task`."""
        return "guessing among the tokens of the string, which takes some learning"

    def chance_level(self) -> float:
        """Accuracy of guessing among the tokens of the string, on average over determined answers."""
        period = np.arange(self.shortest, self.last_period + 1)
        answers = self.sequence_length - 2 - period
        return float((answers / period).sum() / answers.sum())
