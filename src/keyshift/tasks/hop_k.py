"""Multi-hop induction, after Sanford, Hsu, Telgarsky 2024 (arXiv 2402.09268): k lookups in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from keyshift.errors import UserError
from keyshift.tasks.induction import EXAMINATION, IGNORED, SPLITS, previous_occurrence
from keyshift.tasks.scoring import score

if TYPE_CHECKING:
    from torch import Tensor

EXAMINED_ROWS = 100
"""Rows of each k that `HopK.examine` asks a model about, as many as in the paper's figures."""
SIMULATED_ROWS = 256
"""Rows of each k that `HopK.chance_level` is measured on."""


@dataclass(frozen=True)
class HopK:
    """Random letters behind a token that says k; at each letter, which letter do k hops lead to?

    A hop goes from a letter to the one that followed its last earlier occurrence::

        find_1(i) = max{j ≤ i : x_{j-1} = x_i},  find_k = find_1 ∘ find_{k-1},  answer(i) = x_{find_k(i)}

    and where there is none the answer is the blank. No hop is a copy of the present token, one is induction.
    Letters are uniform, except that none follows itself: with repeats allowed a hop might stand still. k is
    uniform on ``least_hops`` … ``hops``. All of this follows the paper and its code,
    chsanford/hop-induction-heads. All answers are determined: the best accuracy is 1, the best loss 0.

    An answer is *not* the next token. It is due at the letter itself, so the label at i + 1, which the
    shifted loss compares with the model's output at i, is answer(i). The last letter has no label, and the
    token that says k asks for nothing (in the paper's code, for another blank).

    Tokens: the letters are 0 … letters - 1, the blank is ``letters``, and k is said by letters + 1 + k.

    Args:
        letters: size A of the alphabet, at least 3 (4 in the paper).
        vocab_size: at least letters + 2 + hops; the rest is not used.
        sequence_length: tokens per row, the one that says k included (100 in the paper).
        hops: the largest k (16 in the paper).
        least_hops: the smallest k (0 in the paper, 1 in its figures).

    Raises:
        UserError: numbers out of range, a vocabulary too small, rows too short for most answers to exist.

    Example: letters a b c are 0 1 2, the blank is 3, and 6 says k = 2. From the a at 4 a hop leads to the b
        at 2, and the next one nowhere, as no b is before. From the b at 5 they lead to the c at 3 and
        nowhere. From the c at 6 they lead to the a at 4 and on to the b at 2::

            position   0  1  2  3  4  5  6  7
            input_ids  6  0  1  2  0  1  2  0
            labels     -  -  3  3  3  3  3  1      (shifted by the model: position 6 is asked for the 1)
    """

    letters: int = 4
    vocab_size: int = 256
    sequence_length: int = 64
    hops: int = 16
    least_hops: int = 0

    def __post_init__(self) -> None:
        if self.letters < 3:
            raise UserError(
                f"task letters={self.letters}: fewer than 3, none following itself, only alternate"
            )
        if not 0 <= self.least_hops <= self.hops:
            raise UserError(f"task least_hops={self.least_hops} must be from 0 to hops={self.hops}")
        if self.vocab_size < self.letters + 2 + self.hops:
            raise UserError(
                f"task vocab_size={self.vocab_size}: letters={self.letters}, a blank and hops={self.hops} "
                f"need {self.letters + 2 + self.hops} tokens; raise it to that or lower them"
            )
        # Of letters that do not repeat, one comes back after A on average, so a hop leads A - 1 back.
        reach = (self.letters - 1) * self.hops
        if self.sequence_length < reach + 4:
            raise UserError(
                f"task sequence_length={self.sequence_length}: hops={self.hops} over letters={self.letters} "
                f"lead {reach} tokens back on average; raise it to at least {reach + 4} or lower them"
            )

    def batch(self, seed: int, step: int, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [batch_size, sequence_length], int64; a pure function of the
        arguments."""
        rng = np.random.default_rng([seed, SPLITS[split], step])
        hops = rng.integers(self.least_hops, self.hops, size=batch_size, endpoint=True)
        return _tensors(*self._draw(rng, hops))

    def _draw(self, rng: np.random.Generator, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the numbers of hops that are given, [rows], and the answers at each of their positions:
        two arrays [rows, sequence_length], int64."""
        tokens = np.empty((len(hops), self.sequence_length), dtype=np.int64)
        tokens[:, 0] = self.letters + 1 + hops
        away = rng.integers(1, self.letters, size=(len(hops), self.sequence_length - 1))
        away[:, 0] = rng.integers(self.letters, size=len(hops))
        tokens[:, 1:] = np.cumsum(away, axis=1) % self.letters
        found = _find(tokens, hops)
        return tokens, np.where(found > 0, np.take_along_axis(tokens, found, axis=1), self.letters)

    @property
    def scores(self) -> tuple[str, ...]:
        """See `Examined`."""
        return tuple(f"k={hops}" for hops in range(self.least_hops, self.hops + 1))

    def examine(self, model: Any) -> dict[str, float]:
        """Accuracy of ``model`` for each k, ``{"k=1": 0.98, …}``, on 100 held-out rows each, always the same.

        Only letters are asked for, as in the paper's figures: blanks are many and easy.
        """
        scores = {}
        for hops, name in enumerate(self.scores, self.least_hops):
            rng = np.random.default_rng([0, EXAMINATION, hops])
            tokens, answers = self._draw(rng, np.full(EXAMINED_ROWS, hops))
            batch = _tensors(tokens, np.where(answers == self.letters, IGNORED, answers))
            _, correct, count = score(model, [batch])
            scores[name] = correct / count
        return scores

    @property
    def guessing(self) -> str:
        """See `Task`."""
        return (
            "a blank, the present letter or another, whichever is likeliest after k hops at such a position"
        )

    def chance_level(self) -> float:
        """Accuracy of the best answer that looks at k, the position and the present letter alone (estimated).

        It is above 1 / letters because of the blanks, and because two hops often lead back to the letter that
        they started from.
        """
        hops = np.repeat(np.arange(self.least_hops, self.hops + 1), SIMULATED_ROWS)
        tokens, answers = (each[:, 1:-1] for each in self._draw(np.random.default_rng(0), hops))
        blank, same = (
            right.reshape(-1, SIMULATED_ROWS, self.sequence_length - 2).mean(axis=1)
            for right in (answers == self.letters, answers == tokens)
        )
        another = (1 - blank - same) / (self.letters - 1)
        return float(np.maximum(np.maximum(blank, same), another).mean())


def _find(tokens: np.ndarray, hops: np.ndarray) -> np.ndarray:
    """find_k of every position of rows [rows, length], with each row's k from ``hops`` [rows]: int64.

    Position 0, which no hop leads to as no letter precedes it, stands for nowhere and leads to itself.
    """
    hop = previous_occurrence(tokens) + 1
    found = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    for done in range(hops.max(initial=0)):
        rows = np.flatnonzero(hops > done)
        found[rows] = np.take_along_axis(hop[rows], found[rows], axis=1)
    return found


def _tensors(tokens: np.ndarray, answers: np.ndarray) -> dict[str, Tensor]:
    """A batch in which the answer to a letter is the label one position on."""
    import torch

    labels = np.full_like(tokens, IGNORED)
    labels[:, 2:] = answers[:, 1:-1]
    return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
