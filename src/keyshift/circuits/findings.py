"""What was measured, in plain sentences: each says no more than the numbers in it."""

from __future__ import annotations

from keyshift.circuits.results import HeadResult, LiftResult, ModelResult, Part

STANDS_OUT = 0.2
"""A head is called a previous-token or induction head from this score on."""


def stands_out(score: float, level: float) -> bool:
    """Whether a score is at least `STANDS_OUT` and ten times even spreading.

    In short sequences, where ten times is out of reach, halfway from even spreading to perfect is enough.
    """
    return score >= max(STANDS_OUT, min(10 * level, (1 + level) / 2))


def describe(result: ModelResult) -> list[str]:
    """One sentence per finding, the most important first."""
    sentences = [_repeating(result)]
    scores = {head.name: head.induction for head in result.heads}
    level = result.levels.induction
    good = [name for name in result.induction_heads if stands_out(scores[name], level)]
    for name in good[:1]:
        sentences += _about_head(result, name)
    sentences += _about_others(result, good[1:])
    for name in result.induction_heads:
        if name not in good:
            sentences += _about_head(result, name)
    if not result.induction_heads:
        best = max(result.heads, key=lambda head: head.induction)
        sentences.append(
            f"No head stands out as an induction head: the highest score is {best.induction:.3f} "
            f"(head {best.name}), where even spreading gives {result.levels.induction:.3f}; "
            f"--head {best.name} looks at it all the same."
        )
    return list(dict.fromkeys(sentences + _about_shift(result)))


def _repeating(result: ModelResult) -> str:
    repeats = result.repeats
    first, last = repeats.copies[0], repeats.copies[-1]
    change = f"goes from {first.loss:.2f} nats on the first copy to {last.loss:.2f} on the last"
    if abs(last.loss - first.loss) < 0.05:
        change = f"stays at {last.loss:.2f} nats"
    elif last.loss < first.loss:
        change = change.replace("goes", "falls")
    return (
        f"On {repeats.sequences} sequences of {repeats.period} random tokens, repeated, the loss {change} "
        f"(an even guess: {repeats.uniform_loss:.2f}); {last.top1:.1%} of the last copy is the first guess."
    )


def _about_head(result: ModelResult, name: str) -> list[str]:
    head = next(head for head in result.heads if head.name == name)
    good = stands_out(head.induction, result.levels.induction)
    does = "completes repeats" if good else "does not stand out"
    what = f"its induction score by the convention of {result.convention} is {head.induction:.2f}"
    if result.convention == "paper":
        what = (
            f"it puts {head.induction:.2f} of its weight on the token after the earlier copy of the present "
            "one"
        )
    level = f"where even spreading gives {result.levels.induction:.3f}"
    sentences = [f"Head {name} {does}: {what}, {level}."]
    if good:
        sentences += _how_it_finds(result, head)
    return sentences + _what_breaks(result, name)


def _about_others(result: ModelResult, others: list[str]) -> list[str]:
    """The further induction heads in one sentence, and what happens without all of them."""
    if not others:
        return []
    scores = {head.name: head.induction for head in result.heads}
    listed = ", ".join(f"{name} ({scores[name]:.2f})" for name in others)
    more = "1 more head completes" if len(others) == 1 else f"{len(others)} more heads complete"
    sentences = [f"{more} repeats, by {'its' if len(others) == 1 else 'their'} score: {listed}."]
    for each in result.ablations[1:]:
        if each.heads == result.induction_heads and len(others) + 1 == len(each.heads):
            loss = f"{each.loss[-1]:.2f} instead of {result.ablations[0].loss[-1]:.2f} nats"
            sentences.append(f"Without all of these heads the loss on the last copy is {loss}.")
    return sentences


def _how_it_finds(result: ModelResult, head: HeadResult) -> list[str]:
    """By which part of its score: a head's note in the key (K-composition), its own shift, or a pointer."""
    key, query = _lift(result, head.name, "key"), _lift(result, head.name, "query")
    if key is None or query is None:
        return []
    top, asking = key.parts[0], query.parts[0]
    share = _share(top, key)
    if top.shift:
        place = "the token before" if top.shift == 1 else f"the token {top.shift} places before"
        what = f"what head {top.writer} wrote into" if top.writer else f"the {top.name} of"
        return [f"It finds the place by its own shifted key: {share} is {what} {place} the source."]
    if top.writer:
        weights = _composition(result, head.name, "K", top.writer)
        sentences = [
            f"It finds the place by K-composition: {share} comes from what head {top.writer} wrote into the "
            f"source{weights}."
        ]
        if asking.writer:
            weights = _composition(result, head.name, "Q", asking.writer)
            sentences.append(
                f"Its query is composed as well: {_share(asking, query)} comes from what head "
                f"{asking.writer} wrote at the present position{weights}."
            )
        return sentences
    if asking.writer:
        weights = _composition(result, head.name, "Q", asking.writer)
        return [
            f"It follows a pointer (Q-composition), by this measure: {share} is the {top.name} of the "
            f"source, and {_share(asking, query)} on the query's side comes from head "
            f"{asking.writer}{weights}."
        ]
    return [f"How it finds the place is not clear: {share} is the {top.name} of the source."]


def _share(part: Part, lift: LiftResult) -> str:
    whole = sum(each.lift for each in lift.parts)
    amount = "most" if part.lift > whole / 2 > 0 else "the largest part"
    return f"{amount} of the lift at the target ({part.lift:+.2f}, all parts together {whole:+.2f})"


def _composition(result: ModelResult, into: str, kind: str, other: str) -> str:
    for each in result.compositions:
        if each.into == into and each.kind == kind and other in each.scores:
            return (
                f" (from weights alone, its {kind}-composition with {other} is {each.scores[other]:.3f}; "
                f"random matrices give {each.baseline:.3f})"
            )
    return ""


def _what_breaks(result: ModelResult, name: str) -> list[str]:
    """The loss without the head itself, and score and loss without the earlier heads that it relies on."""
    whole = result.ablations[0]
    feeding = {
        "previous-token head": "the previous-token head",
        f"writes the query of {name}": "head",
    }
    sentences: list[str] = []
    for each in result.ablations[1:]:
        loss = f"{each.loss[-1]:.2f} instead of {whole.loss[-1]:.2f} nats"
        if each.heads == [name]:
            sentences.insert(0, f"Without head {name} the loss on the last copy is {loss}.")
        elif each.role in feeding and _layer(name) > _layer(each.heads[0]):
            sentences.append(
                f"Without {feeding[each.role]} {each.heads[0]} the induction score of {name} is "
                f"{each.induction[name]:.2f} instead of {whole.induction[name]:.2f}, and the loss {loss}."
            )
    return sentences


def _about_shift(result: ModelResult) -> list[str]:
    if not result.quadrants:
        return []
    counts = {(q.key_previous, q.value_previous): len(q.heads) for q in result.quadrants}
    sentences = [
        f"Sets of shift weights: {sum(counts.values())}. Counted as in the paper's table 4, α1 ≤ α2 with "
        f"β1 > β2: {counts[True, False]}; the token itself in both: {counts[False, False]}; the previous one "
        f"in both: {counts[True, True]}; only in the value: {counts[False, True]}."
    ]
    for each in result.correlations:
        if each.of == "both" and each.rho is not None and each.p_value is not None:
            what = "induction score" if each.against == "induction" else "loss increase without it"
            sentences.append(
                f"Over these {each.sets} sets, the share of |α| on the token before times the share of |β| "
                f"on the token itself has a rank correlation of {each.rho:+.2f} with the {what} "
                f"(p = {each.p_value:.2g}{', maybe chance' * (each.p_value > 0.05)})."
            )
    return sentences


def _lift(result: ModelResult, name: str, side: str) -> LiftResult | None:
    return next((each for each in result.lifts if each.head == name and each.side == side), None)


def _layer(name: str) -> int:
    return int(name.split(".")[0])
