"""What heads attend to: previous-token, induction, duplicate-token and first-token scores.

How a score is defined is up to a convention, see ``marks``. Shapes: B batch, T tokens, H heads, R rows of a
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from keyshift.circuits.capture import AttentionCall, Observer
from keyshift.circuits.marks import KINDS, Convention, Kind, Marks, check_convention
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.repeats import Repeats, in_batches

INDUCTION = KINDS.index("induction")


class WatchedLayer(Protocol):
    """One attention layer: the module that attends, and its number of query heads."""

    @property
    def attention(self) -> nn.Module: ...
    @property
    def heads(self) -> int: ...


class Watched(Protocol):
    """What scores ask of a model: `CircuitModel` answers, and so does whoever trains one."""

    @property
    def layers(self) -> Sequence[WatchedLayer]: ...
    @property
    def device(self) -> torch.device: ...
    def watch(self, ids_BT: Tensor, mask_BT: Tensor | None, observer: Observer, /) -> None: ...


@dataclass(frozen=True)
class HeadScores:
    """Scores of all heads: per layer a tensor [H], float64, and what even spreading would score.

    ``induction_flow`` is the induction score of the value flow (`value_flow`), for layers that shift values.
    """

    scores: list[dict[Kind, Tensor]]
    levels: list[dict[Kind, float]]
    induction_flow: list[Tensor | None]

    def of(self, kind: Kind, layer: int, head: int) -> float:
        return float(self.scores[layer][kind][head])


def head_scores(
    model: Watched,
    sequences: Repeats | Tensor,
    mask_ST: Tensor | None = None,
    convention: Convention = "paper",
    edit: Observer | None = None,
) -> HeadScores:
    """Score every head on repeated sequences, or on any tokens [S, T] (equal tokens then are copies).

    Patterns are reduced as they come: at most one block of rows is in memory.

    Args:
        mask_ST: 0 for padding.
        edit: changes attention outputs meanwhile (`ablation`).

    Raises:
        UserError: an unknown convention, or ``arena`` on sequences without a period.
    """
    ids = sequences.ids_ST if isinstance(sequences, Repeats) else sequences
    period = sequences.period if isinstance(sequences, Repeats) else None
    check_convention(convention, period)
    tally = _Tally(model)
    for batch, mask in in_batches(ids, mask_ST, least=1 if edit is None else 2):
        batch = batch.to(model.device)
        real = torch.ones_like(batch, dtype=torch.bool) if mask is None else mask.to(model.device).bool()
        marks = Marks(batch, real, convention, period)
        tally.count(marks)

        def observer(call: AttentionCall, marks: Marks = marks) -> Tensor | None:
            tally.add(call, marks)
            return None if edit is None else edit(call)

        model.watch(batch, mask, observer)
    return tally.scores()


class _Tally:
    """Sums over sequences and rows, of every layer."""

    def __init__(self, model: Watched):
        self.layer_of = {id(layer.attention): index for index, layer in enumerate(model.layers)}
        self.sums = [_zeros(layer.heads, len(KINDS)) for layer in model.layers]
        self.even = [_zeros(len(KINDS)) for _ in model.layers]
        self.flows: list[Tensor | None] = [None] * len(model.layers)
        self.counts = _zeros(len(KINDS))

    def count(self, marks: Marks) -> None:
        self.counts += torch.tensor([float(marks.counted[kind].sum()) for kind in KINDS], dtype=torch.float64)

    def add(self, call: AttentionCall, marks: Marks) -> None:
        layer, betas = self.layer_of[id(call.module)], value_weights(call)
        for rows, weights in call.blocks():
            marked = marks.weights(rows)
            self.sums[layer] += _sum_marked(weights, marked)
            visible = call.visible(rows).float()
            spread = visible / visible.sum(-1, keepdim=True).clamp(min=1)
            self.even[layer] += _sum_marked(spread.mean(1, keepdim=True), marked)[0]
            if betas is not None:
                flow = _sum_marked(value_flow(weights, betas), marked)[:, INDUCTION]
                before = self.flows[layer]
                self.flows[layer] = flow if before is None else before + flow

    def scores(self) -> HeadScores:
        counts = self.counts.clamp(min=1)
        return HeadScores(
            scores=[{kind: (total / counts)[:, i] for i, kind in enumerate(KINDS)} for total in self.sums],
            levels=[
                {kind: float((level / counts)[i]) for i, kind in enumerate(KINDS)} for level in self.even
            ],
            induction_flow=[None if flow is None else flow / counts[INDUCTION] for flow in self.flows],
        )


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def _sum_marked(weights_BHRT: Tensor, marked_BRTK: Tensor) -> Tensor:
    """Σ over rows, sources and sequences of weight on marked sources, [H, kinds], float64."""
    weights = weights_BHRT.expand(len(marked_BRTK), -1, -1, -1).flatten(2)
    return torch.bmm(weights, marked_BRTK.flatten(1, 2).to(weights.dtype)).sum(0).double().cpu()


def patterns(model: CircuitModel, ids_BT: Tensor, mask_BT: Tensor | None = None) -> list[Tensor]:
    """The full patterns of every layer, [B, H, T, T] each, float32 at least: for few, short sequences."""
    found: list[Tensor] = []
    model.watch(ids_BT, mask_BT, lambda call: found.append(call.pattern().cpu()))
    return found


def value_weights(call: AttentionCall) -> Tensor | None:
    """β of every query head [H, W] where the attention shifts values; None elsewhere."""
    shift = getattr(call.module, "value_shift", None)
    if shift is None:
        return None
    weights = shift.weights().detach()
    return weights.repeat_interleave(call.queries_BHTD.shape[1] // weights.shape[0], dim=0)


def value_flow(pattern_BHRT: Tensor, betas_HW: Tensor, real_BT: Tensor | None = None) -> Tensor:
    """Where information really came from: β1 p_j + β2 p_{j+1} + …, [B, H, R, T].

    The value at j is mixed of tokens j, j - 1, …; this puts the weight on the tokens themselves.

    Args:
        real_BT: False for padding on the left, on which nothing lands.
    """
    betas = betas_HW.to(pattern_BHRT)[:, None, None].unbind(-1)
    flow = pattern_BHRT * betas[0]
    for back in range(1, len(betas)):
        flow[..., :-back] += pattern_BHRT[..., back:] * betas[back]
    return flow if real_BT is None else flow * real_BT[:, None, None]


def value_weighted(call: AttentionCall, rows: slice = slice(None)) -> Tensor:
    """Attention weight times the norm of the value vector at the source, [B, H, R, T]: how much is moved."""
    norms = call.values_BGTV.float().norm(dim=-1)
    norms = norms.repeat_interleave(call.queries_BHTD.shape[1] // norms.shape[1], dim=1)
    return call.pattern(rows) * norms[:, :, None]


def strongest(
    scores: HeadScores, kind: Kind, layers: Sequence[int] | None = None
) -> list[tuple[int, int, float]]:
    """Layer, head and score of all heads (in ``layers``, if given), the highest first."""
    chosen = range(len(scores.scores)) if layers is None else layers
    every = [(layer, head, float(s)) for layer in chosen for head, s in enumerate(scores.scores[layer][kind])]
    return sorted(every, key=lambda entry: -entry[2])
