"""Trigrams to learn by heart, as in the KV shifting paper (figure 3): two tokens decide the third."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from keyshift.errors import UserError
from keyshift.tasks.induction import IGNORED, SPLITS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NGram:
    """A table of pairs x1 x2, each followed by a fixed random x3; a row is trigrams of the table in a row.

    The label is x3, and nothing else is. The table is the task: training and validation share it, and
    knowing it by heart is what is measured. Its pairs are distinct, drawn from the square of ⌈√(2 · pairs)⌉
    random tokens (of all, if there are fewer), so that each of these begins about √(pairs / 2) pairs and ends
    as many: neither x1 nor x2 tells x3, as they would if few pairs shared a token. x3 is
    uniform over the vocabulary. Who knows the table has accuracy 1 and loss 0.

    The paper's figure has about 200 random pairs; that they share their tokens is our way of drawing them.

    Args:
        pairs: pairs in the table.
        vocab_size: tokens that the table is drawn from.
        sequence_length: tokens per row; the last trigram may be cut.
        table_seed: what the table is drawn with, whatever the seed of a run.

    Raises:
        UserError: fewer than 4 pairs, more than the vocabulary has, a row without a trigram, a negative seed.

    Example: with 1 5 → 8, 1 6 → 2 and 3 5 → 4 in the table::

        input_ids  1  6  2  3  5  4  1  5  8
        labels     -  -  2  -  -  4  -  -  8      (labels are the tokens themselves; the model shifts them)
    """

    pairs: int = 200
    vocab_size: int = 256
    sequence_length: int = 64
    table_seed: int = 0

    def __post_init__(self) -> None:
        if self.pairs < 4:  # four are the fewest of which two must share x1 and two x2
            raise UserError(f"task pairs={self.pairs}: a table has at least 4 pairs")
        if self.pairs > self.vocab_size**2:
            raise UserError(
                f"task pairs={self.pairs}: vocab_size={self.vocab_size} has {self.vocab_size**2} pairs; "
                "lower pairs or raise it"
            )
        if self.sequence_length < 3:
            raise UserError(f"task sequence_length={self.sequence_length}: a trigram has 3 tokens")
        if self.table_seed < 0:
            raise UserError(f"task table_seed={self.table_seed} must be at least 0")

    @cached_property
    def table(self) -> np.ndarray:
        """The trigrams x1 x2 x3: [pairs, 3], int64, read-only."""
        rng = np.random.default_rng(self.table_seed)
        square = min(self.vocab_size, 1 + math.isqrt(2 * self.pairs - 1))
        tokens = rng.permutation(self.vocab_size)[:square]
        cells = rng.choice(square**2, size=self.pairs, replace=False)
        pairs = tokens[np.stack(np.divmod(cells, square), axis=1)]
        while True:  # a tiny table may, by chance, follow from one of the two tokens: draw another
            table = np.column_stack((pairs, rng.integers(self.vocab_size, size=self.pairs)))
            if _one_token_tells(table) < 1:
                break
        table.flags.writeable = False
        return table

    def batch(self, seed: int, step: int, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [batch_size, sequence_length], int64; a pure function of the
        arguments."""
        import torch

        rng = np.random.default_rng([seed, SPLITS[split], step])
        drawn = rng.integers(self.pairs, size=(batch_size, -(-self.sequence_length // 3)))
        tokens = self.table[drawn].reshape(batch_size, -1)[:, : self.sequence_length].copy()
        labels = np.where(np.arange(self.sequence_length) % 3 == 2, tokens, IGNORED)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    @property
    def guessing(self) -> str:
        """See `Task`."""
        return "knowing only what most often follows one of the two tokens, which takes some learning"

    def chance_level(self) -> float:
        """Accuracy of the best answer that looks at x1 alone, or at x2 alone, whichever tells more."""
        return _one_token_tells(self.table)


def _one_token_tells(table: np.ndarray) -> float:
    """The share of a table [pairs, 3] that is right with the most frequent x3 of each x1, or of each x2."""
    return max(_most_frequent(table[:, 0], table[:, 2]), _most_frequent(table[:, 1], table[:, 2]))


def _most_frequent(given: np.ndarray, answers: np.ndarray) -> float:
    """The share of ``answers`` that is the most frequent one to what is given with it."""
    both, counts = np.unique(np.column_stack((given, answers)), axis=0, return_counts=True)
    best = np.zeros(given.max() + 1, dtype=np.int64)
    np.maximum.at(best, both[:, 0], counts)
    return float(best.sum() / len(given))
