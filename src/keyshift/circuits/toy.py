"""The induction circuit built by hand on three tokens: what every measurement here means, in numbers one can
check.

The stream has six numbers: which token this is (3), which token stood before (3). Layer 0 is a
previous-token head, layer 1 the induction head. The sequence is a b c a; the last a should predict b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyshift.circuits.eigen import positivity
from keyshift.circuits.results import Positivity

SEQUENCE = "abca"
STRENGTH = 4.0
EXAMPLES = {
    "copy": [[2.0, 0.0], [0.0, 1.0]],
    "swap": [[0.0, 1.0], [1.0, 0.0]],
    "mixed": [[2.0, 0.0], [0.0, -1.0]],
}


@dataclass(frozen=True)
class ToyCircuit:
    """What the hand-built circuit computes on its sequence.

    Attributes:
        stream_TD: after layer 0, [4, 6].
        scores_T, weights_T: of the induction head at the last position.
        logits_V: its output there, read as logits of a, b, c.
        term_VV: the K-composition term W_E W_QK (W_E W_OV^p)^T, one row and column per token.
        matching: the positivity of that term.
        examples: positivity of three 2 × 2 matrices.
    """

    stream_TD: Tensor
    scores_T: Tensor
    weights_T: Tensor
    logits_V: Tensor
    term_VV: Tensor
    matching: Positivity
    examples: dict[str, Positivity]


def toy_circuit() -> ToyCircuit:
    """Build it, run it, measure it. Row vectors; float64."""
    embed_VD = torch.cat((torch.eye(3), torch.zeros(3, 3)), dim=1).double()
    note = torch.zeros(6, 6, dtype=torch.float64)
    note[:3, 3:] = torch.eye(3)  # W_OV of the previous-token head: "this is" becomes "before me was"
    match = STRENGTH * note  # W_QK of the induction head: my token against the source's note
    ids = torch.tensor(["abc".index(token) for token in SEQUENCE])
    x_TD = embed_VD[ids]
    before = torch.diag(torch.ones(len(ids) - 1), -1).double()  # each position looks at the one before
    stream = x_TD + before @ x_TD @ note
    scores = stream[-1] @ match @ stream.T
    weights = scores.softmax(-1)
    copies = embed_VD.T @ embed_VD  # W_OV of the induction head: what is read comes out
    term = embed_VD @ match @ (embed_VD @ note).T
    return ToyCircuit(
        stream_TD=stream,
        scores_T=scores,
        weights_T=weights,
        logits_V=weights @ stream @ copies @ embed_VD.T,
        term_VV=term,
        matching=positivity(term),
        examples={name: positivity(torch.tensor(matrix)) for name, matrix in EXAMPLES.items()},
    )
