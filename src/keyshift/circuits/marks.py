"""Which sources count for which rows: the conventions of head scores.

A score is weight on marked sources, averaged over counted rows. A perfect induction head which spreads its
weight evenly where there is nothing to find scores, on [BOS] + 25 + 25 tokens:

==================== =====  ==================================================================================
``paper``            1.000  rows with something to find; sources: every token after an earlier copy
``arena``            0.929  the whole diagonal i - (n - 1), which begins two rows before the second copy
``transformer_lens`` 0.490  all rows, those with nothing to find included (its `detect_head`, measure "mul")
==================== =====  ==================================================================================

Shapes: B batch, T tokens, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from keyshift.errors import UserError, nearest

Convention = Literal["paper", "arena", "transformer_lens"]
Kind = Literal["previous_token", "induction", "duplicate_token", "first_token"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROWS = 256
"""Rows that are marked at a time where all are looked at."""


@dataclass(frozen=True)
class Marks:
    """Which sources count for which rows of some sequences, by a convention.

    Attributes:
        ids_BT: the tokens.
        real_BT: False for padding.
        convention: see the top of this file.
        period: n of repeated sequences; None for other text, where equal tokens are copies of each other.
    """

    ids_BT: Tensor
    real_BT: Tensor
    convention: Convention
    period: int | None = None

    def weights(self, rows: slice) -> Tensor:
        """[B, R, T, kinds], float32: 1 on marked sources of counted rows."""
        marks = [self._sources(kind, rows) & self.counted[kind][:, rows, None] for kind in KINDS]
        return torch.stack(marks, dim=-1).float()

    @cached_property
    def counted(self) -> dict[Kind, Tensor]:
        """The rows over which the mean is taken, [B, T] each."""
        return {kind: self.real_BT & self._counts(kind) for kind in KINDS}

    def _counts(self, kind: Kind) -> Tensor:
        if self.convention == "transformer_lens":
            return self.real_BT
        if kind == "previous_token":
            return self._place_BT >= 1
        if kind == "first_token":
            return self._place_BT >= (1 if self.convention == "paper" else 0)
        if self.period is None:
            return torch.cat([self._sources(kind, rows).any(-1) for rows in self._blocks()], dim=1)
        if self.convention == "arena":
            return self._place_BT >= self.period - (1 if kind == "induction" else 0)
        return self._place_BT > self.period

    @cached_property
    def _place_BT(self) -> Tensor:
        """How many real tokens stand before each: 0 for BOS."""
        return self.real_BT.long().cumsum(-1) - 1

    def _blocks(self) -> Iterator[slice]:
        tokens = self.ids_BT.shape[1]
        return (slice(first, min(first + ROWS, tokens)) for first in range(0, tokens, ROWS))

    def _sources(self, kind: Kind, rows: slice) -> Tensor:
        """Marked sources of these rows [B, R, T], whether or not the rows count."""
        tokens = self.ids_BT.shape[1]
        slots = torch.arange(tokens, dtype=torch.int32, device=self.ids_BT.device)
        back = slots[rows, None] - slots
        both = self.real_BT[:, rows, None] & self.real_BT[:, None]
        if kind == "previous_token":
            return both & (back == 1)
        if kind == "first_token":
            start = self.real_BT.long().argmax(-1)
            return both & (slots == start[:, None, None])
        distance = back + 1 if kind == "induction" else back
        if self.period is not None and self.convention != "transformer_lens":
            if self.convention == "arena":
                return both & (distance == self.period)
            first = 2 if kind == "induction" else 1  # BOS is no copy of anything
            inside = self._place_BT[:, None] >= first
            return both & inside & (distance > 0) & (distance % self.period == 0)
        earlier = self.ids_BT[:, rows, None] == self.ids_BT[:, None]
        earlier = earlier & both & (back > 0)
        if kind == "duplicate_token":
            return earlier
        return torch.nn.functional.pad(earlier[..., :-1], (1, 0)) & both


def check_convention(convention: str, period: int | None) -> None:
    """Raise `UserError` for an unknown convention, or one that needs sequences of a known period."""
    if convention not in get_args(Convention):
        raise UserError(
            f"convention={convention!r} is not known; {nearest(convention, get_args(Convention))}"
        )
    if convention == "arena" and period is None:
        raise UserError("convention='arena' reads a diagonal, so it needs repeated sequences; use 'paper'")
