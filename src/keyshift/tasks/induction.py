"""Induction, as in the KV shifting paper (appendix D): what followed a token once follows it every time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keyshift.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
SPLITS = {"train": 0, "validation": 1}
EXAMINATION = len(SPLITS)
"""What `Examined.examine` draws from is a split of its own."""


@dataclass(frozen=True)
class Induction:
    """Uniformly random tokens, except that when token j repeats token i, token j+1 repeats token i+1.

    So a sequence runs until chance repeats a token and loops from there on. The answer is *determined* where
    the present token has been seen before; only there is it a label, elsewhere the label is -100. So the best
    accuracy is 1, and the best loss 0.

    Args:
        vocab_size: tokens to draw from (8,000 in the paper).
        sequence_length: tokens per sequence (up to 512 in the paper).

    Raises:
        UserError: sizes with which hardly any sequence would repeat a token.

    Example: tokens ``7 3 9 3`` were drawn, 3 repeats, so 9 3 9 3 … follows; from the fifth token on the
    answers are determined::

        input_ids  7  3  9  3  9  3
        labels     -  -  -  -  9  3      (labels are the tokens themselves; the model shifts them)
    """

    vocab_size: int = 256
    sequence_length: int = 64

    def __post_init__(self) -> None:
        if self.vocab_size < 2 or self.sequence_length < 3:
            raise UserError(
                f"task vocab_size={self.vocab_size}, sequence_length={self.sequence_length}: needs at least "
                "2 and 3"
            )
        if self.repeat_probability < 0.05:
            raise UserError(
                f"task vocab_size={self.vocab_size} is too large for sequence_length={self.sequence_length}: "
                f"only {self.repeat_probability:.1%} of the sequences would repeat a token; use longer ones"
            )

    @property
    def repeat_probability(self) -> float:
        """The probability that a sequence has a determined answer (birthday problem)."""
        drawn = min(self.sequence_length - 1, self.vocab_size)
        if drawn < self.sequence_length - 1:
            return 1.0
        return 1 - math.exp(sum(math.log1p(-k / self.vocab_size) for k in range(drawn)))

    def batch(self, seed: int, step: int, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [batch_size, sequence_length], int64; a pure function of the
        arguments."""
        import torch

        rng = np.random.default_rng([seed, SPLITS[split], step])
        while True:  # a small batch may, by chance, have no answer to learn from: draw another
            drawn = rng.integers(self.vocab_size, size=(batch_size, self.sequence_length))
            first, repeat = _first_repeat(drawn)
            if (repeat < self.sequence_length - 1).any():
                break
        position = np.arange(self.sequence_length)
        period = np.maximum(repeat - first, 1)[:, None]
        looped = first[:, None] + (position - first[:, None]) % period
        tokens = np.take_along_axis(drawn, np.where(position < repeat[:, None], position, looped), axis=1)
        labels = np.where(position > repeat[:, None], tokens, IGNORED)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    @property
    def guessing(self) -> str:
        """See `Task`."""
        return "guessing among the tokens that the sequence loops through, which takes some learning"

    def chance_level(self) -> float:
        """Accuracy of guessing among the tokens of the loop, on average over determined answers
        (estimated)."""
        drawn = np.random.default_rng(0).integers(self.vocab_size, size=(4096, self.sequence_length))
        first, repeat = _first_repeat(drawn)
        answers = np.maximum(self.sequence_length - 1 - repeat, 0)
        return float((answers / np.maximum(repeat - first, 1)).sum() / max(1, answers.sum()))


def previous_occurrence(tokens: np.ndarray) -> np.ndarray:
    """For every position of ``tokens`` [rows, length], the last one before it with the same token, or -1:
    [rows, length], int64."""
    order = np.argsort(tokens, axis=1, kind="stable")
    ordered = np.take_along_axis(tokens, order, axis=1)
    previous = np.full(tokens.shape, -1)
    same = np.where(ordered[:, 1:] == ordered[:, :-1], order[:, :-1], -1)
    np.put_along_axis(previous, order[:, 1:], same, axis=1)
    return previous


def _first_repeat(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row, the positions i < j of its earliest repeat: the smallest j, and where that token stood
    before.

    A row without a repeat gets j = its length (and i = -1).
    """
    previous = previous_occurrence(drawn)
    repeated = previous >= 0
    earliest = repeated.argmax(axis=1)
    repeat = np.where(repeated.any(axis=1), earliest, drawn.shape[1])
    return previous[np.arange(len(drawn)), earliest], repeat
