"""Multi-query associative recall (MQAR), after Arora et al. 2023, "Zoology" (arXiv 2312.04927)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keyshift.errors import UserError
from keyshift.tasks.induction import IGNORED, SPLITS

if TYPE_CHECKING:
    from torch import Tensor

FILLER = 0
"""The token between queries."""


@dataclass(frozen=True)
class Recall:
    """Key-value pairs, then every key once more, in random places: which value belonged to it?

    A row begins with its pairs, drawn anew for every row, no key or value twice. Then come slots of two
    tokens, for a key and its value; the slots that are used, as many as there are pairs, are drawn one
    after the other with probabilities as g^(a - 1) of the g-th slot, so with a small a most keys are
    asked for early, as most bigrams of a text come back soon. The rest is token 0. Keys are tokens
    1 … V/2 - 1, values V/2 … V - 1. The label is the value after a key that is asked for, and nothing else
    is. It was said before, so the best accuracy is 1 and the best loss 0.

    This is the layout, and the distribution, of ``multiquery_ar`` in HazyResearch/zoology with
    ``random_non_queries=False``, as in that paper's figure 2. What differs: there the answer is a label only,
    here it also follows its key in the row, as in the paper's definition, so that a row is a text.

    Args:
        vocab_size: V (8,192 in the paper).
        sequence_length: tokens per row (64 … 512 in the paper, with 4 … 64 pairs).
        key_value_pairs: pairs in a row, at least 2.
        power_percent: 100 · a, from 0 to 100; 100 spreads the queries uniformly, 1 is zoology's.

    Raises:
        UserError: fewer than 2 pairs, rows or vocabularies too small for them, a power out of range.

    Example: two pairs in a row of 12, whose vocabulary is 12::

        input_ids  2  8  4  7  4  7  0  0  2  8  0  0
        labels     -  -  -  -  -  7  -  -  -  8  -  -      (labels are the tokens themselves; the model
                                                            shifts them)
    """

    vocab_size: int = 256
    sequence_length: int = 64
    key_value_pairs: int = 8
    power_percent: int = 1

    def __post_init__(self) -> None:
        pairs = self.key_value_pairs
        if pairs < 2:
            raise UserError(f"task key_value_pairs={pairs}: with fewer than 2 there is nothing to tell apart")
        if self.sequence_length < 4 * pairs:
            raise UserError(
                f"task sequence_length={self.sequence_length}: key_value_pairs={pairs} and their queries "
                f"take {4 * pairs} tokens; raise it to that or lower key_value_pairs"
            )
        if self.vocab_size // 2 - 1 < pairs:
            raise UserError(
                f"task vocab_size={self.vocab_size} has {max(0, self.vocab_size // 2 - 1)} keys, and "
                f"key_value_pairs={pairs} need as many; raise it to {2 * pairs + 2} or lower key_value_pairs"
            )
        if not 0 <= self.power_percent <= 100:
            raise UserError(f"task power_percent={self.power_percent} must be from 0 to 100 (uniform)")

    def batch(self, seed: int, step: int, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [batch_size, sequence_length], int64; a pure function of the
        arguments."""
        import torch

        rng = np.random.default_rng([seed, SPLITS[split], step])
        half, pairs = self.vocab_size // 2, self.key_value_pairs
        keys = 1 + _draw_distinct(rng, batch_size, half - 1, pairs)
        values = half + _draw_distinct(rng, batch_size, self.vocab_size - half, pairs)
        tokens = np.full((batch_size, self.sequence_length), FILLER, dtype=np.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        asked = 2 * pairs + 2 * self._draw_slots(rng, batch_size)
        np.put_along_axis(tokens, asked, keys, axis=1)
        np.put_along_axis(tokens, asked + 1, values, axis=1)
        labels = np.full_like(tokens, IGNORED)
        np.put_along_axis(labels, asked + 1, values, axis=1)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def _draw_slots(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """The slot of every pair's query, [rows, key_value_pairs], int64: without replacement, as probable as
        the power law says."""
        slots = self.sequence_length // 2 - self.key_value_pairs
        log_weight = (self.power_percent / 100 - 1) * np.log(np.arange(1, slots + 1))
        # The order of log weights with Gumbel noise is that of drawing one slot after the other.
        noisy = log_weight + rng.gumbel(size=(rows, slots))
        return rng.permuted(np.argsort(-noisy, axis=1)[:, : self.key_value_pairs], axis=1)

    @property
    def guessing(self) -> str:
        """See `Task`."""
        return "guessing among the values of the row that no key was answered with, which takes some learning"

    def chance_level(self) -> float:
        """Accuracy of guessing among the values of the row that no key was answered with: of all at the
        first query, right for sure at the last."""
        return float((1 / np.arange(1, self.key_value_pairs + 1)).mean())


def _draw_distinct(rng: np.random.Generator, rows: int, population: int, size: int) -> np.ndarray:
    """``size`` different numbers below ``population`` in random order for every row: [rows, size], int64.

    They are the beginnings of Fisher-Yates shuffles, all rows at once.
    """
    shuffled = np.tile(np.arange(population, dtype=np.int32), (rows, 1))
    picked = rng.integers(np.arange(size), population, size=(rows, size))
    row = np.arange(rows)
    for place in range(size):
        pick = picked[:, place]
        chosen = shuffled[row, pick]
        shuffled[row, pick] = shuffled[:, place]
        shuffled[:, place] = chosen
    return shuffled[:, :size].astype(np.int64)
