"""What the pattern viewer shows, small enough to be part of a page.

Letters in names of arrays: L layers, H heads, T tokens; of two Ts the first is the token that looks.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

BUDGET = 1_000_000  # bytes of packed patterns on one page
INVISIBLE = str.maketrans({"\n": "↵", "\r": "␍", "\t": "⇥", "\0": "␀"})
LONGEST = 256  # tokens; with more, a cell of the matrix would be too small to point at


@dataclass(frozen=True)
class Patterns:
    """One text as one model's heads look at it."""

    tokens: list[str]
    weights_LHTT: (
        np.ndarray
    )  # attention: rows are the tokens that look, and sum to 1; nothing above the diagonal
    value_norms_LHT: np.ndarray  # norm of the value vector that a head reads at each source
    value_shift: list[list[list[float]]] | None = None  # [layer][head]: β1, β2, …; [] without shift
    note: str = ""  # what text it is, or which part of one

    def first(self, length: int) -> Patterns:
        """Only the first tokens: later ones change nothing about what these look at."""
        if length >= len(self.tokens):
            return self
        kept = f"The first {length} of {len(self.tokens)} tokens are shown, to keep this page small."
        return replace(
            self,
            tokens=self.tokens[:length],
            weights_LHTT=self.weights_LHTT[:, :, :length, :length],
            value_norms_LHT=self.value_norms_LHT[:, :, :length],
            note=f"{self.note} {kept}".strip(),
        )


def fit(patterns: Sequence[Patterns | None], budget: int = BUDGET) -> list[Patterns | None]:
    """The patterns cut to one common length, the longest whose packed weights take at most ``budget`` bytes.

    A model too large for even one token is left out.
    """
    longest = max((len(each.tokens) for each in patterns if each), default=0)
    for length in range(min(longest, LONGEST), 0, -1):
        if sum(_packed_size(each, length) for each in patterns if each) <= budget:
            return [each.first(length) if each else None for each in patterns]
    return [None for _ in patterns]


def _packed_size(patterns: Patterns, length: int) -> int:
    """Bytes that ``pack`` makes of the first ``length`` tokens."""
    layers, heads = patterns.weights_LHTT.shape[:2]
    kept = min(length, len(patterns.tokens))
    weights = layers * heads * kept * (kept + 1) // 2
    return -(-weights // 3) * 4


def pack(weights_LHTT: np.ndarray) -> str:
    """Base64 of a byte per weight, 255 for 1: layer by layer, head by head, lower triangles row by row."""
    rows, columns = np.tril_indices(weights_LHTT.shape[-1])
    levels = np.rint(np.clip(weights_LHTT[:, :, rows, columns], 0, 1) * 255).astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()


def payload(patterns: Patterns) -> dict[str, Any]:
    """What the page's script reads, as plain JSON values."""
    layers, heads = patterns.weights_LHTT.shape[:2]
    return {
        "tokens": [visible(token) for token in patterns.tokens],
        "layers": layers,
        "heads": heads,
        "weights": pack(patterns.weights_LHTT),
        "norms": [
            [[float(f"{norm:.4g}") for norm in head] for head in layer] for layer in patterns.value_norms_LHT
        ],
        "shift": patterns.value_shift,
    }


def visible(token: str) -> str:
    """A token's text with a sign for what cannot be seen."""
    return token.translate(INVISIBLE) or "(empty)"
