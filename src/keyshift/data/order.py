"""The order of an endless shuffled stream: where a row number leads, without going through those before."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_TABLE_WINDOWS = 2**20  # up to so many, a permutation is kept: 4 MiB
_ROUNDS = 6


def shuffled(numbers: NDArray[np.int64], windows: int, seed: int) -> NDArray[np.int64]:
    """The window that each row number [n] of the endless stream stands for.

    Row numbers 0 to ``windows`` - 1 are the first epoch, and so on. Each epoch has every window once, in an
    order drawn from (seed, epoch): NumPy's permutation up to 2^20 windows; a keyed permutation, computed
    number by number in constant memory, above that.
    """
    epochs, places = np.divmod(numbers, windows)
    chosen = np.empty_like(places)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        if windows <= _TABLE_WINDOWS:
            chosen[now] = _table(windows, seed, int(epoch))[places[now]]
        else:
            chosen[now] = _keyed(places[now], windows, seed, int(epoch))
    return chosen


@lru_cache(maxsize=32)  # a batch can straddle two epochs, a mixture has several sources
def _table(windows: int, seed: int, epoch: int) -> NDArray[np.uint32]:
    return np.random.default_rng([seed, epoch]).permutation(windows).astype(np.uint32)


def _keyed(places: NDArray[np.int64], windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A Feistel network over the next even number of bits; what falls outside walks on until it is inside.

    The walk ends, since it follows a cycle of a permutation that began inside. Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002.
    """
    half = np.uint64(((windows - 1).bit_length() + 1) // 2)
    keys = np.random.default_rng([seed, epoch]).integers(0, 2**64, _ROUNDS, np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= windows
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value: the finaliser of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
