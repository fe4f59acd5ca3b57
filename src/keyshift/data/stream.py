"""Batches: windows of documents packed end to end, their boundaries kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keyshift.data.order import shuffled
from keyshift.data.shards import Shard
from keyshift.errors import UserError

if TYPE_CHECKING:
    import torch

IGNORED_LABEL = -100  # what Hugging Face's and PyTorch's cross entropy leave out


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The documents of one side, end to end over all shards; where a shard ends plays no part.

    end_tokens: whether every document has a token at its end that is not of its text.
    """

    shards: Sequence[Shard]
    end_tokens: bool = False

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Where each shard ends in the stream."""
        return np.cumsum([shard.token_count for shard in self.shards], dtype=np.int64)

    @property
    def token_count(self) -> int:
        """Tokens of all kinds."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @cached_property
    def document_count(self) -> int:
        return sum(shard.document_count for shard in self.shards)

    @cached_property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the documents."""
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def text_tokens(self) -> int:
        """Tokens without the separators and end tokens."""
        return self.token_count - self.document_count * (2 if self.end_tokens else 1)

    def documents(self) -> Iterator[NDArray[np.unsignedinteger]]:
        """The tokens of every document's text in order, without separator and end token."""
        for shard in self.shards:
            ends = [*shard.document_starts[1:].tolist(), shard.token_count]
            for start, end in zip(shard.document_starts.tolist(), ends, strict=False):
                yield shard.tokens[start + 1 : end - 1 if self.end_tokens else end]

    def windows(self, sequence_length: int) -> int:
        """How many windows an epoch has; an incomplete last one is left out."""
        return self.token_count // sequence_length

    def bits_per_byte(self, loss_nats_per_token: float) -> float:
        """A loss on this stream in bits per UTF-8 byte, comparable across tokenizers.

        loss × (tokens without separators ÷ bytes) ÷ ln 2, with the mean loss in nats per predicted token.
        Tokens that evaluation did not predict (a window's first) count at the mean loss. End tokens are
        predicted, so they count.
        """
        predicted = self.token_count - self.document_count
        return loss_nats_per_token * predicted / self.text_bytes / math.log(2)

    def rows(self, numbers: NDArray[np.int64], sequence_length: int, seed: int) -> dict[str, torch.Tensor]:
        """Rows of endless shuffled training, by their numbers [B]; a pure function of its arguments.

        The stream is cut into windows of ``sequence_length`` tokens (an incomplete last one is left out).
        Each epoch visits every window once, in an order drawn from (seed, epoch); epochs follow each other
        without a gap. The cost does not depend on the numbers or the size of the corpus.

        Returns int64 tensors [B, sequence_length]: ``input_ids``; ``position_ids``, which restart at 0 at the
        window's start and at each document's start; ``labels``, equal to ``input_ids`` but -100 at those
        starts, because such a token is not predicted from its own document. The model shifts the labels.

        Raises ``UserError`` if there is no window.
        """
        windows = self.windows(sequence_length)
        if windows == 0:
            raise UserError(
                f"sequence_length is {sequence_length}, the text {self.token_count} tokens; pass more text"
            )
        return self.packed(shuffled(numbers, windows, seed) * sequence_length, sequence_length)

    def batch(self, step: int, batch_size: int, sequence_length: int, seed: int) -> dict[str, torch.Tensor]:
        """Batch ``step`` of endless shuffled training: the next ``batch_size`` of its ``rows``."""
        return self.rows(step * batch_size + np.arange(batch_size), sequence_length, seed)

    def sequential(
        self, batch_size: int, sequence_length: int, max_batches: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Up to ``max_batches`` batches for evaluation, the same ones every time.

        Distinct windows in the order of the stream, spread evenly over it; the last batch can be smaller.
        Each batch is as ``batch`` returns it.
        """
        windows = self.windows(sequence_length)
        count = min(windows, batch_size * max_batches)
        chosen = np.arange(count) * windows // max(count, 1) * sequence_length
        for first in range(0, count, batch_size):
            yield self.packed(chosen[first : first + batch_size], sequence_length)

    def packed(self, firsts: NDArray[np.int64], sequence_length: int) -> dict[str, torch.Tensor]:
        """The ``sequence_length`` tokens from each place [B] of the stream on, as ``rows`` returns them."""
        import torch

        shape = (len(firsts), sequence_length)
        input_ids_BT = np.empty(shape, np.int64)
        starts_BT = np.zeros(shape, bool)
        for row, first in enumerate(firsts.tolist()):
            self._fill(first, input_ids_BT[row], starts_BT[row])
        starts_BT[:, :1] = True
        columns_T = np.arange(sequence_length)
        position_ids_BT = columns_T - np.maximum.accumulate(np.where(starts_BT, columns_T, 0), axis=1)
        labels_BT = np.where(starts_BT, IGNORED_LABEL, input_ids_BT)
        arrays = {"input_ids": input_ids_BT, "position_ids": position_ids_BT, "labels": labels_BT}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _fill(self, first: int, input_ids_T: NDArray[np.int64], starts_T: NDArray[np.bool_]) -> None:
        """Writes the tokens from ``first`` on, and which of them start a document."""
        number = int(np.searchsorted(self._ends, first, side="right"))
        filled = 0
        while filled < len(input_ids_T):
            shard = self.shards[number]
            here = first + filled - (int(self._ends[number]) - shard.token_count)
            take = min(len(input_ids_T) - filled, shard.token_count - here)
            input_ids_T[filled : filled + take] = shard.tokens[here : here + take]
            begin, end = np.searchsorted(shard.document_starts, [here, here + take])
            starts_T[filled + shard.document_starts[begin:end] - here] = True
            filled += take
            number += 1
