"""Heads taken out: their result vectors, the input of the output projection, replaced.

Shapes: S sequences, T tokens, H heads, M width of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from keyshift.circuits.capture import AttentionCall, Observer, observe_each
from keyshift.circuits.marks import Convention
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.repeats import Repeats, in_batches, prediction_losses
from keyshift.circuits.results import AblationResult
from keyshift.circuits.scores import head_scores
from keyshift.errors import UserError, nearest

Method = Literal["mean", "position_mean", "zero", "resample"]
Head = tuple[int, int]
"""Layer and head; functions also take its name, ``"1.6"``."""
POPULATION = {
    "mean": "their mean over all positions and sequences",
    "position_mean": "their mean over all sequences, position by position",
    "zero": "zero",
    "resample": "those of another sequence at the same position",
}
"""What result vectors are replaced with."""


@dataclass(frozen=True)
class Means:
    """Mean result vectors of every layer over a population of tokens, float64.

    mean: [H, M] each, over sequences and positions; position_mean: [T, H, M] each, over sequences.
    """

    mean: list[Tensor]
    position_mean: list[Tensor]


def mean_results(model: CircuitModel, ids_ST: Tensor, mask_ST: Tensor | None = None) -> Means:
    """Mean result vectors of all heads on these tokens, padding left out; ``position_mean`` is by slot."""
    layer_of = {id(layer.attention): index for index, layer in enumerate(model.layers)}
    sums: list[Tensor | None] = [None] * len(model.layers)
    real = torch.ones_like(ids_ST) if mask_ST is None else mask_ST
    for ids, mask in in_batches(ids_ST, mask_ST):
        kept = (torch.ones_like(ids) if mask is None else mask).to(model.device).double()

        def observer(call: AttentionCall, kept: Tensor = kept) -> None:
            layer = layer_of[id(call.module)]
            total = torch.einsum("bthm,bt->thm", call.output_BTHV.double(), kept)
            before = sums[layer]
            sums[layer] = total if before is None else before + total

        model.watch(ids, mask, observer)
    count = real.sum(0).to(model.device)
    totals = [total for total in sums if total is not None]
    return Means(
        mean=[total.sum(0) / count.sum().clamp(min=1) for total in totals],
        position_mean=[total / count[:, None, None].clamp(min=1) for total in totals],
    )


def check_method(method: str) -> None:
    """Raise `UserError` for an unknown method."""
    if method not in get_args(Method):
        raise UserError(f"method={method!r} is not known; {nearest(method, get_args(Method))}")


def ablating(
    model: CircuitModel, heads: Iterable[Head | str], method: Method = "mean", means: Means | None = None
) -> Observer:
    """What to pass as observer, so that the model runs without these heads.

    Args:
        heads: (layer, head) pairs; all query heads of a key/value head are had by `heads_of_key_head`.
        method: ``resample`` takes another sequence of the same batch, so that batches need two at least; of
            several heads, later ones then come from a run without the earlier.
        means: for ``mean`` and ``position_mean``: over the population that is to stand in.

    Raises:
        UserError: an unknown method, a head out of range, or means that are missing.
    """
    check_method(method)
    if means is None and method in ("mean", "position_mean"):
        raise UserError(
            f"method={method!r} needs means: mean_results(model, ids) over the tokens that are typical"
        )
    by_layer: dict[int, list[int]] = {}
    for layer, head in as_pairs(model, heads):
        by_layer.setdefault(layer, []).append(head)

    def editor(layer: int, chosen: list[int]) -> Observer:
        def edit(call: AttentionCall) -> Tensor:
            output = call.output_BTHV.clone()
            output[:, :, chosen] = _stand_in(call, layer, method, means)[..., chosen, :].to(output.dtype)
            return output

        return edit

    modules = [layer.attention for layer in model.layers]
    return observe_each(modules, {layer: editor(layer, chosen) for layer, chosen in by_layer.items()})


def as_pairs(model: CircuitModel, heads: Iterable[Head | str]) -> list[Head]:
    """Heads given as pairs or names, as pairs. Raises `UserError` for one that the model does not have."""
    pairs = [model.head(each) if isinstance(each, str) else each for each in heads]
    for layer, head in pairs:
        model.check_head(layer, head)
    return pairs


def _stand_in(call: AttentionCall, layer: int, method: Method, means: Means | None) -> Tensor:
    if method == "zero":
        return torch.zeros_like(call.output_BTHV)
    if method == "resample":
        if len(call.output_BTHV) < 2:
            raise UserError("method='resample' needs at least two sequences in a batch")
        return call.output_BTHV.roll(1, dims=0)
    assert means is not None
    source = means.mean if method == "mean" else means.position_mean
    if method == "position_mean" and source[layer].shape[0] != call.output_BTHV.shape[1]:
        raise UserError(
            f"method='position_mean' has means of {source[layer].shape[0]} positions, and these sequences "
            f"have {call.output_BTHV.shape[1]}; take them over sequences of this length"
        )
    return source[layer].expand_as(call.output_BTHV)


def heads_of_key_head(model: CircuitModel, layer: int, key_head: int) -> list[Head]:
    """The query heads that read through a key/value head.

    Raises:
        UserError: out of range.
    """
    model.check_head(layer, 0)
    found = model.layers[layer]
    if not 0 <= key_head < found.key_heads:
        raise UserError(f"key_head={key_head} is out of range: layer {layer} has 0 to {found.key_heads - 1}")
    return [(layer, head) for head in range(found.heads) if found.key_head(head) == key_head]


def ablate(
    model: CircuitModel,
    sequences: Repeats,
    heads: Sequence[Head | str],
    *,
    role: str = "",
    method: Method = "mean",
    means: Means | None = None,
    watched: Sequence[Head | str] = (),
    convention: Convention = "paper",
) -> AblationResult:
    """Loss and top-1 on each copy without ``heads``, and the induction scores of ``watched`` heads then.

    Args:
        role: kept in the result: why these heads.
        method, means: as in `ablating`; means that are needed and not given are taken over ``sequences``.
        convention: of the induction scores.
    """
    chosen, seen = as_pairs(model, heads), as_pairs(model, watched)
    if chosen and means is None and method in ("mean", "position_mean"):
        means = mean_results(model, sequences.ids_ST)
    edit = ablating(model, chosen, method, means) if chosen else None
    loss, right = prediction_losses(model, sequences.ids_ST, observer=edit)
    scores = head_scores(model, sequences, convention=convention, edit=edit) if seen else None
    return AblationResult(
        heads=[f"{layer}.{head}" for layer, head in chosen],
        role=role,
        loss=sequences.by_copy(loss),
        top1=sequences.by_copy(right),
        induction={
            f"{layer}.{head}": scores.of("induction", layer, head)
            for layer, head in seen
            if scores is not None
        },
    )
