"""The shift weights that a run learned, head by head."""

from __future__ import annotations

from typing import NamedTuple

from keyshift.results import RunResult


class Head(NamedTuple):
    """The shift weights of one head of one run; an empty tuple where that side is not shifted."""

    layer: int
    head: int
    key: tuple[float, ...] = ()
    value: tuple[float, ...] = ()
    query: tuple[float, ...] = ()


def heads_of(run: RunResult) -> list[Head]:
    """One record per head. Where a layer has fewer value than key heads (or the like), a group shares one."""
    heads = []
    for layer in sorted({weights.layer for weights in run.shift_weights}):
        sides = {w.of: w.weights for w in run.shift_weights if w.layer == layer and w.weights}
        count = max((len(weights) for weights in sides.values()), default=0)
        for head in range(count):
            own = {of: tuple(weights[head * len(weights) // count]) for of, weights in sides.items()}
            heads.append(Head(layer, head, **own))
    return heads
