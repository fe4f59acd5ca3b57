"""The page of circuits: one HTML file that holds everything and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from keyshift.circuits.report.figures import Figures, composed_heads, draw_model, filled_lifts
from keyshift.circuits.report.maps import heat_maps
from keyshift.circuits.report.patterns import Patterns, fit, payload, visible
from keyshift.circuits.results import CircuitsReport, ModelFacts, ModelResult, QuadrantResult
from keyshift.report.cells import EMPTY
from keyshift.report.formats import as_loss, as_moment, as_percent, as_score, as_signed
from keyshift.report.template import fill

VIEWER = "viewer.js"
SHARES = {"key": "key (share on earlier tokens)", "value": "value (share on its own token)", "both": "both"}
EFFECTS = {"induction": "induction score", "loss_increase": "effect of ablation"}
CONVENTIONS = {
    "paper": "as the text on induction heads defines them",
    "arena": "as ARENA's course defines them",
    "transformer_lens": "as TransformerLens's head detector defines them",
}


def render_circuits(report: CircuitsReport, patterns: Sequence[Patterns | None]) -> str:
    """The whole page as text."""
    script = Path(__file__).with_name(VIEWER).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    models = zip(report.models, fit(patterns), strict=True)
    return fill(
        Path(__file__).with_name("circuits.html.j2"),
        report=report,
        title=_title(report),
        created=as_moment(report.created),
        models=[_model(model, shown) for model, shown in models],
        script=script,
        script_hash=digest,
        formats={
            "loss": as_loss,
            "percent": as_percent,
            "score": _or_empty(as_score),
            "signed": _or_empty(as_signed),
            "token": visible,
        },
    )


def facts_line(facts: ModelFacts) -> str:
    """What was analysed, in one line."""
    shared = "" if facts.key_value_heads == facts.heads else f" ({facts.key_value_heads} of keys and values)"
    parts = [
        facts.kind,
        f"{_counted(facts.layers, 'layer')} of {_counted(facts.heads, 'head')}{shared}",
        f"hidden size {facts.hidden_size:,}",
        f"head width {facts.head_width}",
        f"vocabulary {facts.vocabulary:,}",
        f"context {facts.context:,}" if facts.context else "",
        f"position: {facts.position}",
        f"{facts.parameters:,} parameters",
        facts.dtype,
    ]
    return ", ".join(part for part in parts if part)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _or_empty(form: Callable[[float], str]) -> Callable[[float | None], str]:
    """``form`` for numbers that may be missing."""
    return lambda value: EMPTY if value is None else form(value)


def _title(report: CircuitsReport) -> str:
    names = [model.facts.name for model in report.models]
    return f"Circuits: {', '.join(names)}" if 0 < len(names) <= 2 else f"Circuits of {len(names)} models"


def _model(model: ModelResult, patterns: Patterns | None) -> dict[str, Any]:
    """What the template shows of one model."""
    drawn = draw_model(model)
    return {
        "result": model,
        "facts": facts_line(model.facts),
        "figures": drawn,
        "maps": heat_maps(model),
        "convention": CONVENTIONS[model.convention],
        "reading": _how_read(model),
        "not_drawn": _not_drawn(model, drawn),
        "patterns": payload(patterns) if patterns else None,
        "note": patterns.note if patterns else "",
        "choices": _choices(model),
        "chosen": _first_choice(model),
        "ablations": _ablation_table(model),
        "quadrants": _quadrants(model.quadrants),
        "shift": _shift_table(model),
        "correlations": [
            (SHARES.get(c.of, c.of), EFFECTS.get(c.against, c.against), c) for c in model.correlations
        ],
    }


def _how_read(model: ModelResult) -> str:
    """Under which conditions the numbers from weights hold."""
    gains = "with the gains of norms folded in" if model.norms_folded else "without the gains of norms"
    rotated = "" if model.offset is None else f"; rotary keys {model.offset} before their query"
    return f"Numbers from weights are taken {gains}{rotated}."


def _not_drawn(model: ModelResult, drawn: Figures) -> dict[str, str]:
    """A remark for each kind of figure of which there are more than the page shows."""
    there = {"compositions": len(composed_heads(model)), "lifts": len(filled_lifts(model))}
    shown = {"compositions": len(drawn.compositions), "lifts": len(drawn.lifts)}
    return {
        kind: f"{shown[kind]} of {there[kind]} are drawn; circuits.json has all."
        for kind in there
        if shown[kind] < there[kind]
    }


def _choices(model: ModelResult) -> list[tuple[int, list[str]]]:
    """The names of all heads, layer by layer."""
    return [
        (layer, [h.name for h in heads]) for layer, heads in groupby(model.heads, lambda head: head.layer)
    ]


def _first_choice(model: ModelResult) -> str:
    """The head that the viewer shows first: the clearest induction head there is."""
    if model.induction_heads:
        return model.induction_heads[0]
    return max(model.heads, key=lambda head: head.induction).name if model.heads else ""


def _quadrants(cells: Sequence[QuadrantResult]) -> list[list[QuadrantResult | None]]:
    """Rows β1 > β2 and β1 <= β2, columns α1 > α2 and α1 <= α2, as in the paper; [] without any."""
    found = {(cell.value_previous, cell.key_previous): cell for cell in cells}
    return [[found.get((row, column)) for column in (False, True)] for row in (False, True)] if cells else []


def _ablation_table(model: ModelResult) -> tuple[list[str], list[list[str]]] | None:
    """Titles and rows: every ablation's loss and accuracy on each copy, and what the induction heads did."""
    if not any(each.heads for each in model.ablations):
        return None
    copies = range(1, 1 + max(len(each.loss) for each in model.ablations))
    heads = list(dict.fromkeys(name for each in model.ablations for name in each.induction))
    titles = ["Ablated", *(f"Loss, copy {i}" for i in copies), *(f"Right, copy {i}" for i in copies)]
    rows = []
    for each in model.ablations:
        name = ", ".join(each.heads) or "nothing"
        cells = [_cell(each.loss, i, as_loss) for i in range(len(copies))]
        cells += [_cell(each.top1, i, as_percent) for i in range(len(copies))]
        cells += [as_score(each.induction[head]) if head in each.induction else EMPTY for head in heads]
        rows.append([f"{name} ({each.role})" if each.role else name, *cells])
    return [*titles, *(f"Induction {head}" for head in heads)], rows


def _cell(values: Sequence[float], index: int, form: Callable[[float], str]) -> str:
    return form(values[index]) if index < len(values) else EMPTY


def _shift_table(model: ModelResult) -> tuple[list[str], list[list[str]]] | None:
    """Titles and rows: the shift weights of every head that has some, with what the head does."""
    heads = [head for head in model.heads if head.key_shift or head.value_shift]
    if not heads:
        return None
    keys = max(len(head.key_shift or []) for head in heads)
    values = max(len(head.value_shift or []) for head in heads)
    titles = [f"α{i + 1}" for i in range(keys)] + [f"β{i + 1}" for i in range(values)]
    rows = []
    for head in heads:
        weights = [_cell(head.key_shift or [], i, "{:.3f}".format) for i in range(keys)]
        weights += [_cell(head.value_shift or [], i, "{:.3f}".format) for i in range(values)]
        effect = _or_empty(as_signed)(head.induction_loss_increase)
        rows.append([head.name, *weights, as_score(head.induction), effect])
    return ["Head", *titles, "Induction", "Δloss"], rows
