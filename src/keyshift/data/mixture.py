"""Several prepared stores as one corpus, each with its share of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keyshift.data.store import TextData
from keyshift.data.stream import TokenStream
from keyshift.errors import UserError

if TYPE_CHECKING:
    import torch

_BLOCK = 4096  # rows that hold the sources in their shares
_CYCLE = 256  # blocks after which shares are exact to one row
_TAG = 0x6D6978  # draws of the mixture are none of its sources'


@dataclass(frozen=True, eq=False)
class Mixture:
    """Prepared stores with a weight each. Training takes rows of all, evaluation one source after the other.

    stores, weights: by name; weights add up to 1. Made with ``of`` or ``open``.
    """

    stores: Mapping[str, TextData]
    weights: dict[str, float]

    @classmethod
    def of(cls, stores: Mapping[str, TextData], weights: Mapping[str, float]) -> Mixture:
        """Stores with weights of any scale.

        Raises ``UserError`` for names that differ, weights that are not positive or too small to ever be
        drawn, and stores whose tokens are not those of the same tokenizer.
        """
        if not stores or stores.keys() != weights.keys():
            raise UserError(
                f"weights are for {', '.join(weights)}; sources are {', '.join(stores) or 'missing'}"
            )
        for name, weight in weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise UserError(f"weight of source {name!r} is {weight}; it should be a positive number")
        total = sum(weights[name] for name in stores)
        shares = {name: weights[name] / total for name in stores}
        if small := [name for name, share in shares.items() if share * _BLOCK * _CYCLE < 1]:
            raise UserError(
                f"weight of source {small[0]!r} is {shares[small[0]]:.2g} of all: no row in a million; "
                "raise it or leave the source out"
            )
        _check_alike(stores)
        return cls(stores, shares)

    @classmethod
    def open(cls, directories: Mapping[str, str | Path], weights: Mapping[str, float]) -> Mixture:
        """The stores in ``directories``; raises ``UserError`` as ``TextData.open`` and ``of`` do."""
        return cls.of({name: TextData.open(path) for name, path in directories.items()}, weights)

    @cached_property
    def train(self) -> MixedStream:
        streams = [store.train for store in self.stores.values()]
        return MixedStream(streams, tuple(self.weights.values()))

    @property
    def validations(self) -> dict[str, TokenStream]:
        """What each source holds out."""
        return {name: store.validation for name, store in self.stores.items()}

    @property
    def _first(self) -> TextData:
        return next(iter(self.stores.values()))

    @property
    def tokenizer_path(self) -> Path:
        return self._first.tokenizer_path

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._first.tokenizer_fingerprint

    @property
    def vocab_size(self) -> int:
        return self._first.vocab_size

    @property
    def end_token(self) -> int | None:
        return self._first.end_token

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """``TextData.verify`` for one store after the other."""
        for store in self.stores.values():
            store.verify(progress)

    def summary(self) -> dict[str, Any]:
        """The summary of every store, and its share of the rows."""
        sources = {
            name: {"weight": self.weights[name], **store.summary()} for name, store in self.stores.items()
        }
        return {"sources": sources, "vocab_size": self.vocab_size}


def _check_alike(stores: Mapping[str, TextData]) -> None:
    (first, reference), *others = stores.items()
    for name, store in others:
        if store.tokenizer_fingerprint != reference.tokenizer_fingerprint:
            raise UserError(
                f"sources {first!r} and {name!r} were tokenised differently ({reference.tokenizer_path}, "
                f"{store.tokenizer_path}); prepare both with the same --tokenizer"
            )
        if store.end_token != reference.end_token:
            raise UserError(
                f"sources {first!r} and {name!r}: only one has end tokens; prepare both the same way"
            )


@dataclass(frozen=True, eq=False)
class MixedStream:
    """The training rows of several streams: like a ``TokenStream``, whose ``rows`` and ``batch`` it has.

    Of every 4,096 rows each stream has its share, to a row, in an order drawn from the seed; over 256 such
    blocks the shares are exact to a row. Each stream goes through its own epochs at its own pace.
    """

    streams: Sequence[TokenStream]
    shares: tuple[float, ...]

    @property
    def token_count(self) -> int:
        return sum(stream.token_count for stream in self.streams)

    def windows(self, sequence_length: int) -> int:
        """Of all streams together; 0 if one has none, since its turn would come."""
        windows = [stream.windows(sequence_length) for stream in self.streams]
        return sum(windows) if all(windows) else 0

    def rows(self, numbers: NDArray[np.int64], sequence_length: int, seed: int) -> dict[str, torch.Tensor]:
        """Rows of endless training by their numbers [B], see ``TokenStream.rows``."""
        import torch

        sources, places = self._chosen(numbers, seed)
        mixed: dict[str, torch.Tensor] = {}
        for source in np.unique(sources):
            of_source = np.flatnonzero(sources == source)
            rows = self.streams[source].rows(places[of_source], sequence_length, seed)
            for name, values in rows.items():
                if name not in mixed:
                    mixed[name] = values.new_empty((len(numbers), sequence_length))
                mixed[name][torch.from_numpy(of_source)] = values
        return mixed

    def batch(self, step: int, batch_size: int, sequence_length: int, seed: int) -> dict[str, torch.Tensor]:
        """Batch ``step`` of endless training: the next ``batch_size`` of its ``rows``."""
        return self.rows(step * batch_size + np.arange(batch_size), sequence_length, seed)

    def sources(self, numbers: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Which stream each row comes from [B]."""
        return self._chosen(numbers, seed)[0]

    def _chosen(self, numbers: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For row numbers [B], the stream and the number of the row within that stream."""
        blocks, within = np.divmod(numbers, _BLOCK)
        sources, places = np.empty_like(numbers), np.empty_like(numbers)
        for block in np.unique(blocks):
            now = blocks == block
            order, ranks = _block(self.shares, seed, int(block))
            sources[now], places[now] = order[within[now]], ranks[within[now]]
        return sources, places


@lru_cache(maxsize=8)
def _block(shares: tuple[float, ...], seed: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which stream each row of a block comes from, and which of that stream's rows it is: [4096] each."""
    before = _before(shares)
    cycle, part = divmod(block, _CYCLE)
    counts = before[part + 1] - before[part]
    order = np.repeat(np.arange(len(shares)), counts)
    order = np.random.default_rng([seed, block, _TAG]).permutation(order)
    ranks = np.empty(_BLOCK, np.int64)
    ranks[np.argsort(order, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
    return order, cycle * before[-1][order] + before[part][order] + ranks


@lru_cache(maxsize=8)
def _before(shares: tuple[float, ...]) -> NDArray[np.int64]:
    """Rows of each stream before every block of a cycle, and in the whole cycle: [257, streams].

    A block has the whole part of a stream's 4,096 × share. What is left of a block is dealt by systematic
    sampling of the fractions: a stream has one more row if a point of the grid u, u + 1, … lies within its
    stretch. Over the cycle u takes 256 evenly spaced values, so that a stream gets its fraction's share.
    """
    exact = np.array(shares) * _BLOCK
    whole = np.floor(exact).astype(np.int64)
    ends = np.cumsum(exact - whole)
    ends[-1] = _BLOCK - whole.sum()  # exactly, whatever the rounding
    grid = (np.arange(_CYCLE) * 159 % _CYCLE) / _CYCLE  # 159 is odd, and near the golden section of 256
    stops = np.floor(ends[None, :] + grid[:, None]).astype(np.int64)
    counts = whole + np.diff(stops, axis=1, prepend=0)
    return np.vstack([np.zeros(len(shares), np.int64), np.cumsum(counts, axis=0)])
