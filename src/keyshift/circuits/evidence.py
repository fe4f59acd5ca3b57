"""What shows how the induction heads of a model work, and that they do: composition, key lift, ablations, a
short string, a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keyshift.circuits.ablation import Head, ablate
from keyshift.circuits.composition import Composition, composition, random_composition
from keyshift.circuits.lift import Side, lift
from keyshift.circuits.prompt import MADE_UP_NAME, read_prompt
from keyshift.circuits.repeats import Repeats
from keyshift.circuits.results import (
    AblationResult,
    CompositionResult,
    CopyingExample,
    LiftResult,
    ParkingResult,
    PromptResult,
)
from keyshift.circuits.scores import patterns, strongest
from keyshift.circuits.streams import read_streams
from keyshift.circuits.study import Study
from keyshift.errors import UserError, first_line

LIFT_SEQUENCES = 8
SHORT_PERIOD = 8
KINDS: tuple[Composition, ...] = ("K", "Q")
SIDES: tuple[Side, ...] = ("key", "query")


def compositions(study: Study) -> list[CompositionResult]:
    """K- and Q-composition of every induction head with all earlier heads."""
    found = []
    for layer, head in study.induction:
        weights = study.weights(layer)
        earlier = {index: each for index in range(layer) if (each := study.weights(index)) is not None}
        if weights is None or not earlier:
            continue
        for kind in KINDS:
            scores = {
                name((index, other)): composition(kind, weights, head, each, other)
                for index, each in earlier.items()
                for other in range(each.heads)
            }
            baseline = random_composition(kind, weights, next(iter(earlier.values())))
            found.append(
                CompositionResult(into=name((layer, head)), kind=kind, scores=scores, baseline=baseline)
            )
    return found


def lifts(study: Study) -> list[LiftResult]:
    """The parts of every induction head's score, of its key and of its query, on a few of the sequences."""
    if not study.induction:
        return []
    settings = study.settings
    few = Repeats(study.sequences.ids_ST[:LIFT_SEQUENCES], settings.period, settings.repeats)
    streams = read_streams(study.model, few.ids_ST)
    found = []
    for number, (layer, head) in enumerate(study.induction):
        study.progress("key lift", number, len(study.induction))
        try:
            found += [lift(study.model, few, layer, head, side, streams) for side in SIDES]
        except (UserError, RuntimeError) as error:
            study.note(f"head {layer}.{head}: no key lift: {first_line(error)}")
    return found


def ablations(study: Study, lifted: Sequence[LiftResult]) -> list[AblationResult]:
    """The repeated sequences without the heads of the circuit, and without others as a control.

    Args:
        lifted: of `lifts`: which heads the induction heads rely on.
    """
    trials = _trials(study, lifted)
    results = []
    for number, (role, heads) in enumerate(trials):
        study.progress("ablations", number, len(trials))
        results.append(
            ablate(
                study.model,
                study.sequences,
                heads,
                role=role,
                method=study.settings.method,
                means=study.means,
                watched=study.induction,
                convention=study.settings.convention,
            )
        )
    return results


def _trials(study: Study, lifted: Sequence[LiftResult]) -> list[tuple[str, list[Head]]]:
    """Roles and heads: nothing first, then the circuit's, then controls: heads that no lift relies on."""
    trials: list[tuple[str, list[Head]]] = [("nothing ablated", [])]
    relied_on = {part.writer for each in lifted for part in each.parts if part.lift > 0.1 * _whole(each)}
    if study.previous is not None:
        trials.append(("previous-token head", [study.previous]))
        trials += _beside(study, study.previous, relied_on)
    trials += _askers(study, lifted)
    called = "chosen head" if study.settings.heads else "induction head"
    for number, each in enumerate(study.induction, start=1):
        trials.append((called if number == 1 else f"{called}, no. {number}", [each]))
    if study.induction:
        ranked = strongest(study.scores, "induction", [study.induction[0][0]])
        others = [(layer, head) for layer, head, _ in ranked if (layer, head) not in study.induction]
        trials += [("control: least induction head of its layer", others[-1:])] if others else []
    if len(study.induction) > 1:
        trials.append((f"all {called}s", list(study.induction)))
    return trials


def _beside(study: Study, previous: Head, relied_on: set[str | None]) -> list[tuple[str, list[Head]]]:
    """The next previous-token head of the layer, and the least that no induction head relies on."""
    same = [(layer, head) for layer, head, _ in strongest(study.scores, "previous_token", [previous[0]])]
    trials = [("next previous-token head", same[1:2])]
    controls = [head for head in same[2:] if name(head) not in relied_on]
    trials.append(("control: least previous-token head of its layer", controls[-1:]))
    return [(role, heads) for role, heads in trials if heads]


def _askers(study: Study, lifted: Sequence[LiftResult]) -> list[tuple[str, list[Head]]]:
    """The head, if it is one, that writes most of what the strongest induction head's query lifts."""
    for each in lifted:
        if each.side == "query" and study.induction and each.head == name(study.induction[0]):
            top = each.parts[0].writer
            if top is not None and (study.previous is None or top != name(study.previous)):
                return [(f"writes the query of {each.head}", [study.model.head(top)])]
    return []


def _whole(lifted: LiftResult) -> float:
    return abs(sum(part.lift for part in lifted.parts))


def parking(study: Study) -> list[ParkingResult]:
    """Where the induction heads look on a short string: on its first copy there is nothing to find."""
    if not study.induction:
        return []
    short = study.settings.sample(study.model, period=SHORT_PERIOD, sequences=1)
    found, period = patterns(study.model, short.ids_ST), short.period
    place = torch.arange(period + 1, 2 * period + 1)
    return [
        ParkingResult(
            head=name((layer, head)),
            period=period,
            first_copy_first_token=float(found[layer][0, head, 2 : period + 1, 0].mean()),
            second_copy_target=float(found[layer][0, head, place, place - period + 1].mean()),
        )
        for layer, head in study.induction
    ]


def copying(study: Study) -> list[CopyingExample]:
    """For the strongest induction head, what it raises when it reads a token or two of real text."""
    model = study.model
    weights = study.weights(study.induction[0][0]) if study.induction else None
    if weights is None or model.tokenizer is None:
        return []
    head = study.induction[0][1]
    ids = model.tokenizer(" Paris class", add_special_tokens=False)["input_ids"][:2]
    return [
        CopyingExample(
            head=name(study.induction[0]),
            token=model.token(token),
            raises=[model.token(raised) for raised in study.vocabulary.raised(weights, head, token)],
        )
        for token in ids
    ]


def prompt(study: Study) -> PromptResult | None:
    """The prompt as the strongest induction head reads it; None, with a note, where it cannot be read."""
    text = study.settings.text
    if text is None and study.model.tokenizer is None:
        study.note("no tokenizer: no prompt was read")
        return None
    heads = study.induction[:1] or [strongest(study.scores, "induction")[0][:2]]
    try:
        return read_prompt(study.model, MADE_UP_NAME if text is None else text, heads)
    except (UserError, RuntimeError) as error:
        study.note(f"no prompt was read: {first_line(error)}")
        return None


def name(head: Sequence[int]) -> str:
    """``layer.head``."""
    return f"{head[0]}.{head[1]}"
