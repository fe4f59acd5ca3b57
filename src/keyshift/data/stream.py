"""Batches: windows of documents packed end to end, their boundaries kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

IGNORED_LABEL = -100  # what Hugging Face's and PyTorch's cross entropy leave out


@lru_cache(maxsize=2)  # a batch can straddle two epochs
def _order(windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(windows)


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The documents of one side, end to end. Each is stored as the separator token followed by its tokens.

    tokens: [N] uint16 or uint32. document_starts: [D] int64, ascending, index of each document's separator.
    text_bytes: UTF-8 bytes of the documents.
    """

    tokens: NDArray[np.unsignedinteger]
    document_starts: NDArray[np.int64]
    text_bytes: int

    @property
    def text_tokens(self) -> int:
        """Tokens without the separators."""
        return len(self.tokens) - len(self.document_starts)

    def batch(self, step: int, batch_size: int, sequence_length: int, seed: int) -> dict[str, torch.Tensor]:
        """Batch ``step`` of endless shuffled training; a pure function of its arguments.

        The stream is cut into windows of ``sequence_length`` tokens (an incomplete last one is left out).
        Each epoch visits every window once, in an order drawn from (seed, epoch); epochs follow each other
        without a gap.

        Returns int64 tensors [batch_size, sequence_length]: ``input_ids``; ``position_ids``, which restart
        at 0 at the window's start and at each document's start; ``labels``, equal to ``input_ids`` but -100
        at those starts, because such a token is not predicted from its own document. The model shifts the
        labels.

        The stream must hold at least one window, which ``prepare`` checks.
        """
        windows = len(self.tokens) // sequence_length
        epochs, places = np.divmod(step * batch_size + np.arange(batch_size), windows)
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            chosen[now] = _order(windows, seed, int(epoch))[places[now]]
        return self._windows(chosen, sequence_length)

    def sequential(
        self, batch_size: int, sequence_length: int, max_batches: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Up to ``max_batches`` batches for evaluation, the same ones every time.

        Distinct windows in the order of the stream, spread evenly over it; the last batch can be smaller.
        Each batch is as ``batch`` returns it.
        """
        windows = len(self.tokens) // sequence_length
        count = min(windows, batch_size * max_batches)
        chosen = np.arange(count) * windows // max(count, 1)
        for first in range(0, count, batch_size):
            yield self._windows(chosen[first : first + batch_size], sequence_length)

    def _windows(self, windows: NDArray[np.int64], sequence_length: int) -> dict[str, torch.Tensor]:
        """The windows with these numbers [B], as tensors."""
        import torch

        first_B1 = windows[:, None] * sequence_length
        index_BT = first_B1 + np.arange(sequence_length)
        input_ids = self.tokens[index_BT].astype(np.int64)
        document_BT = np.searchsorted(self.document_starts, index_BT, side="right") - 1
        position_ids = index_BT - np.maximum(self.document_starts[document_BT], first_B1)
        labels = np.where(position_ids == 0, IGNORED_LABEL, input_ids)
        arrays = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
