"""Do heads whose shift weights look like induction do induction? The paper on KV shifting counts them (table
4) and does not ask; here each head's (α, β) stands beside what it does and what breaks without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from keyshift.circuits.results import CorrelationResult, HeadResult, QuadrantResult

MEASURES = {"induction": "induction", "loss_increase": "induction_loss_increase"}
"""What is correlated with shift weights, and the field that holds it."""
FEWEST = 4
"""Sets of shift weights below which no correlation is given."""
PAIRINGS = 9999
"""Random pairings behind a p-value (all there are, if they are fewer)."""


def quadrants(heads: Sequence[HeadResult]) -> list[QuadrantResult]:
    """Heads counted by (α1 <= α2?, β1 <= β2?), as in table 4, with their mean scores; [] without both shifts.

    Query heads that share a set of shift weights count once, under the first one's name. With a longer window
    the largest of the later weights stands for the second.
    """
    groups = _sharing(heads)
    table = []
    for key_previous in (False, True):
        for value_previous in (False, True):
            inside = [
                group
                for group in groups
                if _previous(group[0].key_shift) == key_previous
                and _previous(group[0].value_shift) == value_previous
            ]
            members = [head for group in inside for head in group]
            table.append(
                QuadrantResult(
                    key_previous=key_previous,
                    value_previous=value_previous,
                    heads=[group[0].name for group in inside],
                    induction=_mean([head.induction for head in members]),
                    loss_increase=_mean([head.induction_loss_increase for head in members]),
                )
            )
    return table if groups else []


def correlations(heads: Sequence[HeadResult]) -> list[CorrelationResult]:
    """Spearman's rank correlation between shift weights and measurements, over sets of shift weights: query
    heads that share theirs count once, with their mean. The p-value is a permutation test's.

    ``key``: the share |α2| / Σ|α| (with a longer window, all but α1); ``value``: |β1| / Σ|β|; ``both``: their
    product, 1 for the textbook's induction head with α = (0, 1), β = (1, 0).
    """
    groups = _sharing(heads)
    shares = {
        "key": [1 - _own_share(group[0].key_shift) for group in groups],
        "value": [_own_share(group[0].value_shift) for group in groups],
    }
    shares["both"] = [key * value for key, value in zip(shares["key"], shares["value"], strict=True)]
    found = []
    for against, field in MEASURES.items():
        measured = [_mean([getattr(head, field) for head in group]) for group in groups]
        known = [value for value in measured if value is not None]
        if len(known) < FEWEST or len(known) < len(measured):
            continue
        for of, values in shares.items():
            rho, p_value = rank_correlation(values, known)
            found.append(
                CorrelationResult(of=of, against=against, rho=rho, p_value=p_value, sets=len(groups))
            )
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> tuple[float | None, float | None]:
    """Spearman's ρ, ties at their mean rank, and the two-sided p-value of a permutation test; None where one
    side is constant."""
    from scipy.stats import permutation_test, rankdata

    x, y = rankdata(first), rankdata(second)
    x, y = x - x.mean(), y - y.mean()
    size = float((x @ x * (y @ y)) ** 0.5)
    if size == 0:
        return None, None
    test = permutation_test(
        (x,),
        lambda drawn, axis: abs((drawn * y).sum(axis)),
        permutation_type="pairings",
        alternative="greater",
        vectorized=True,
        n_resamples=PAIRINGS,
        rng=0,
    )
    return float(x @ y) / size, float(test.pvalue)


def _sharing(heads: Sequence[HeadResult]) -> list[list[HeadResult]]:
    """Heads with both shifts, those that share their set of weights together."""
    groups: dict[tuple[int, int | None], list[HeadResult]] = {}
    for head in heads:
        if head.key_shift and head.value_shift:
            groups.setdefault((head.layer, head.shift_set), []).append(head)
    return list(groups.values())


def _previous(weights: Sequence[float] | None) -> bool:
    assert weights is not None
    return weights[0] <= max(weights[1:])


def _own_share(weights: Sequence[float] | None) -> float:
    assert weights is not None
    total = sum(abs(weight) for weight in weights)
    return abs(weights[0]) / total if total else 1.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
