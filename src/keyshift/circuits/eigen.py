"""What weights alone say of copying and matching (A Mathematical Framework for Transformer Circuits).

A table over the vocabulary such as W_E W_OV W_U^T has the eigenvalues of the same product taken around the
circle, which is at most as wide as a head. Shapes: D hidden size, N, M widths of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from keyshift.circuits.model import CircuitModel
from keyshift.circuits.results import Positivity
from keyshift.circuits.weights import LayerWeights, embedding, unembedding
from keyshift.errors import UserError

VOCABULARY_CHUNK = 8192
NOTHING = 1e-12
"""Eigenvalues whose sizes add up to less than this share of the matrix are rounding."""


def positivity(matrix: Tensor, sign: float = 1.0) -> Positivity:
    """Σλ / Σ|λ| of a square matrix times ``sign``, in float64.

    The condition number of the eigenvectors says how much rounding the eigenvalues may have picked up. A zero
    matrix, and one whose eigenvalues all vanish, gives 0 and is flagged.

    >>> [round(positivity(torch.tensor(m)).value, 2) for m in ([[2., 0], [0, 1]], [[0., 1], [1, 0]], [[2.,
    0], [0, -1]])] [1.0, 0.0, 0.33]
    """
    matrix = matrix.double()
    values, vectors = torch.linalg.eig(matrix)
    total = float(values.abs().sum())
    if sign == 0 or total <= NOTHING * max(float(matrix.norm()), NOTHING):
        return Positivity(value=0.0, condition=1.0, zero=True)
    condition = float(torch.linalg.cond(vectors))
    value = float(values.real.sum()) / total * (1.0 if sign > 0 else -1.0)
    return Positivity(value=value, condition=min(condition, 1e300))


@dataclass(frozen=True)
class Vocabulary:
    """The embeddings of a model, as the weight tests need them; ``fold_norms`` as in `layer_weights`."""

    model: CircuitModel
    fold_norms: bool = True

    @cached_property
    def embeds(self) -> Tensor:
        """W_E^T W_E, [D, D]."""
        return _gram(embedding(self.model), embedding(self.model))

    @cached_property
    def unembeds(self) -> Tensor:
        """W_U^T W_E with W_U as [V, D]: how embeddings read as logits, [D, D]."""
        return _gram(unembedding(self.model, self.fold_norms), embedding(self.model))

    def copying(self, weights: LayerWeights, head: int) -> Positivity:
        """Positivity of W_E W_OV W_U^T: 1 where reading a token raises it (shift: β1 W_OV, the source's
        own)."""
        into, out = weights.ov(head)
        return positivity(out @ self.unembeds @ into, weights.beta(head, 0))

    def direct(self, weights: LayerWeights, head: int) -> Positivity:
        """Positivity of W_E W_QK W_E^T: the present token against the source's own (shift: α1 W_QK)."""
        query, key = weights.qk(head)
        sign = weights.gamma(head) * weights.alpha(head, 0)
        return positivity(key.T @ self.embeds @ query, sign)

    def matching_through_shift(self, weights: LayerWeights, head: int, back: int = 1) -> Positivity:
        """Positivity of α W_E W_QK W_E^T: the present token against the one ``back`` before the source.

        It is `direct`, but for the sign and the presence of α: that a head *uses* its shift, its key lift
        shows.

        Raises:
            UserError: keys that are not shifted.
        """
        if weights.key_shift_HW is None:
            raise UserError(
                f"layer {weights.layer} does not shift its keys: there is no match through a shift"
            )
        query, key = weights.qk(head)
        sign = weights.gamma(head) * weights.alpha(head, back)
        return positivity(key.T @ self.embeds @ query, sign)

    def matching(
        self, weights: LayerWeights, head: int, earlier: LayerWeights, earlier_head: int
    ) -> Positivity:
        """Positivity of the K-composition term W_E W_QK^h (W_E W_OV^p)^T: the present token against the one
        that head p read."""
        query, key = weights.qk(head)
        into, out = earlier.ov(earlier_head)
        sign = weights.gamma(head) * weights.alpha(head, 0) * earlier.beta(earlier_head, 0)
        return positivity((into @ (out @ key)).T @ self.embeds @ query, sign)

    def copied_share(self, weights: LayerWeights, head: int, tokens: Tensor) -> float:
        """Of these tokens, the share whose top output through the head's OV circuit is the token itself."""
        into, out = weights.ov(head)
        rows = embedding(self.model)[tokens] @ into * weights.beta(head, 0)
        if not bool((rows @ out).any()):
            return 0.0  # all logits are equal: no token is on top
        return float((self._top_tokens(rows, out) == tokens.to(rows.device)).double().mean())

    def raised(self, weights: LayerWeights, head: int, token: int, count: int = 5) -> list[int]:
        """The tokens whose logits the head raises most when it reads ``token``."""
        into, out = weights.ov(head)
        row = embedding(self.model)[token] @ into * weights.beta(head, 0)
        logits = self.reads @ (row @ out).float()
        return logits.topk(min(count, len(logits))).indices.tolist()

    @cached_property
    def reads(self) -> Tensor:
        """W_U as [V, D], float32: enough to tell which logit is highest."""
        return unembedding(self.model, self.fold_norms).float()

    def _top_tokens(self, rows_XM: Tensor, out_MD: Tensor) -> Tensor:
        """The token with the highest logit for each row, over the vocabulary in pieces."""
        best = torch.full((len(rows_XM),), -torch.inf, device=rows_XM.device)
        where = torch.full((len(rows_XM),), -1, device=rows_XM.device)
        rows, out = rows_XM.float(), out_MD.float()
        for chunk in _chunks(len(self.reads)):
            value, index = (rows @ (self.reads[chunk] @ out.T).T).max(-1)
            where = torch.where(value > best, index + chunk.start, where)
            best = torch.maximum(value, best)
        return where


def _gram(left_VD: Tensor, right_VD: Tensor) -> Tensor:
    return sum(
        (left_VD[rows].T @ right_VD[rows] for rows in _chunks(len(left_VD))),
        start=left_VD.new_zeros(left_VD.shape[1], right_VD.shape[1]),
    )


def _chunks(count: int) -> Iterator[slice]:
    return (slice(first, first + VOCABULARY_CHUNK) for first in range(0, count, VOCABULARY_CHUNK))
