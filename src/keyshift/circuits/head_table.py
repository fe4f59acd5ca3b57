"""Every head of a model: what it attends to, what its weights say, and what breaks without it."""

from __future__ import annotations

import torch
from torch import Tensor

from keyshift.circuits.ablation import Head, ablate
from keyshift.circuits.repeats import ordinary_tokens
from keyshift.circuits.results import HeadResult
from keyshift.circuits.study import Study
from keyshift.circuits.weights import LayerWeights

SWEPT_HEADS = 64
"""With more heads than this, only candidates are ablated one by one."""
CANDIDATES = 8
"""So many by each of induction and previous-token score."""
COPY_BUDGET = 2e11
"""Multiply-adds to spend on counting which tokens heads copy: of a large model fewer tokens are asked."""


def head_table(study: Study) -> list[HeadResult]:
    """One record per head, layer by layer, without the effects of ablation."""
    table: list[HeadResult] = []
    total = len(study.model.head_names())
    for layer, found in enumerate(study.model.layers):
        for head in range(found.heads):
            study.progress("weights of heads", len(table), total)
            table.append(_attention(study, layer, head))
            weights = study.weights(layer)
            if weights is not None:
                _add_weights(study, weights, table[-1])
    return table


def add_effects(study: Study, table: list[HeadResult]) -> None:
    """Take every head out by itself; in a large model, the candidates."""
    swept = table
    if len(table) > SWEPT_HEADS:
        names = _strongest(table, "induction") | _strongest(table, "previous_token")
        swept = [head for head in table if head.name in names]
        study.note(
            f"{len(swept)} of {len(table)} heads were ablated one by one: the strongest by induction and "
            "previous-token score"
        )
    whole = study.sequences.by_copy(study.loss_ST)[-1]
    for number, record in enumerate(swept):
        study.progress("ablation of each head", number, len(swept))
        without = ablate(
            study.model,
            study.sequences,
            [(record.layer, record.head)],
            method=study.settings.method,
            means=study.means,
        )
        record.induction_loss_increase = without.loss[-1] - whole


def _attention(study: Study, layer: int, head: int) -> HeadResult:
    scores, flow = study.scores, study.scores.induction_flow[layer]
    return HeadResult(
        layer=layer,
        head=head,
        key_value_head=study.model.layers[layer].key_head(head),
        previous_token=scores.of("previous_token", layer, head),
        induction=scores.of("induction", layer, head),
        duplicate_token=scores.of("duplicate_token", layer, head),
        first_token=scores.of("first_token", layer, head),
        induction_flow=None if flow is None else float(flow[head]),
    )


def _add_weights(study: Study, weights: LayerWeights, record: HeadResult) -> None:
    vocabulary, head = study.vocabulary, record.head
    record.ov = vocabulary.copying(weights, head)
    record.copies = vocabulary.copied_share(weights, head, _asked_tokens(study, weights))
    record.direct = vocabulary.direct(weights, head)
    if weights.shift_sets:
        record.shift_set = head // (weights.heads // weights.shift_sets)
    if weights.key_shift_HW is not None:
        record.key_shift = weights.key_shift_HW[head].tolist()
    if weights.value_shift_HW is not None:
        record.value_shift = weights.value_shift_HW[head].tolist()
    partner = _partner(study, weights, record)
    if partner == "shift":
        back = _heaviest(weights, head)
        record.matching = vocabulary.matching_through_shift(weights, head, back)
        record.matching_with = "shift" if back == 1 else f"shift, {back} back"
    elif isinstance(partner, tuple) and (earlier := study.weights(partner[0])) is not None:
        record.matching = vocabulary.matching(weights, head, earlier, partner[1])
        record.matching_with = f"{partner[0]}.{partner[1]}"


def _partner(study: Study, weights: LayerWeights, record: HeadResult) -> Head | str | None:
    """By what a head may know which token stood before a source: its own shift, where that weighs more than
    the source's own key or no previous-token head is below; else that head."""
    below = study.previous is not None and study.previous[0] < record.layer
    if weights.key_shift_HW is not None:
        own = abs(weights.alpha(record.head, 0))
        previous = abs(weights.alpha(record.head, _heaviest(weights, record.head)))
        if previous >= own or not below:
            return "shift"
    return study.previous if below else None


def _heaviest(weights: LayerWeights, head: int) -> int:
    """How many places before the source the token stands that weighs most in a shifted key, its own apart."""
    assert weights.key_shift_HW is not None
    return 1 + int(weights.key_shift_HW[head, 1:].abs().argmax())


def _asked_tokens(study: Study, weights: LayerWeights) -> Tensor:
    model = study.model
    cost = model.vocabulary * weights.value_GDM.shape[-1] * len(model.head_names())
    tokens = ordinary_tokens(model, int(study.sequences.ids_ST[0, 0]))
    count = int(min(len(tokens), 2000, max(100, COPY_BUDGET // cost)))
    return tokens[torch.linspace(0, len(tokens) - 1, count).long()]


def _strongest(table: list[HeadResult], score: str) -> set[str]:
    ranked = sorted(table, key=lambda head: -getattr(head, score))
    return {head.name for head in ranked[:CANDIDATES]}
