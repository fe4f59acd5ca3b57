"""Circuits in the terminal: heads in a table, findings in words; and the same as plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keyshift.circuits.report.measures import MEASURES
from keyshift.circuits.report.page import facts_line
from keyshift.circuits.results import CircuitsReport, HeadResult, ModelResult
from keyshift.report.cells import EMPTY
from keyshift.report.formats import as_loss, as_percent, as_score, as_signed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_ROWS = 16  # up to this many heads all are shown
STRONGEST = 5  # beyond it, so many by each of these
RANKED_BY = ("induction", "previous_token", "induction_loss_increase")
SHIFT = (("α1", "key_shift", 0), ("α2", "key_shift", 1), ("β1", "value_shift", 0), ("β2", "value_shift", 1))


def summary(report: CircuitsReport) -> list[dict[str, Any]]:
    """One dictionary per model, of plain JSON values; None where something was not measured."""
    return [_row(model) for model in report.models]


def print_circuits(report: CircuitsReport, console: Console) -> None:
    """Print every model within 80 columns: what it is, its copies, its heads, its findings."""
    from rich.text import Text

    for model in report.models:
        console.print(Text(model.facts.name, style="bold"))
        console.print(Text(facts_line(model.facts), style="dim"))
        for copy in model.repeats.copies:
            console.print(
                Text(f"copy {copy.copy_index}: loss {as_loss(copy.loss)}, {as_percent(copy.top1)} right")
            )
        console.print()
        shown = _worth_showing(model.heads)
        console.print(_table(model, shown))
        if len(shown) < len(model.heads):
            console.print(Text(f"{len(shown)} of {len(model.heads)} heads; the others are in circuits.json"))
        console.print()
        for finding in model.findings:
            console.print(Text(f"• {finding}"))
        for note in model.notes:
            console.print(Text(f"• {note}", style="yellow"))
        console.print()


def _row(model: ModelResult) -> dict[str, Any]:
    copies = model.repeats.copies
    return {
        "model": model.facts.name,
        "kind": model.facts.kind,
        "layers": model.facts.layers,
        "heads_per_layer": model.facts.heads,
        "uniform_loss": model.repeats.uniform_loss,
        "loss_by_copy": [copy.loss for copy in copies],
        "top1_by_copy": [copy.top1 for copy in copies],
        "previous_token_head": model.previous_token_head,
        "induction_heads": list(model.induction_heads),
        "heads": [_head(head) for head in model.heads],
        "findings": list(model.findings),
        "notes": list(model.notes),
    }


def _head(head: HeadResult) -> dict[str, Any]:
    shift = {"key_shift": head.key_shift, "value_shift": head.value_shift}
    return {"head": head.name} | {measure.key: measure.value(head) for measure in MEASURES} | shift


def _worth_showing(heads: list[HeadResult]) -> list[HeadResult]:
    """All heads of a small model; of others the strongest by induction, previous token and effect."""
    if len(heads) <= MOST_ROWS:
        return heads
    kept: set[str] = set()
    for measure in MEASURES:
        if measure.key in RANKED_BY:
            known = [(value, head.name) for head in heads if (value := measure.value(head)) is not None]
            kept.update(name for _, name in sorted(known, reverse=True)[:STRONGEST])
    return [head for head in heads if head.name in kept]


def _table(model: ModelResult, shown: list[HeadResult]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = [column for column in _columns() if any(column[1](head) != EMPTY for head in shown)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 0), show_edge=False)
    table.add_column("Head", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for head in shown:
        style = "bold" if head.name in (model.previous_token_head, *model.induction_heads) else ""
        table.add_row(Text(head.name, style=style), *(Text(cell(head), style=style) for _, cell in columns))
    return table


def _columns() -> list[tuple[str, Callable[[HeadResult], str]]]:
    """Titles and cells; the shift weights come before the last, the effect."""
    columns = [(m.short, _cell(m.value, as_signed if m.signed else as_score)) for m in MEASURES if m.short]
    shift = [(title, _cell(_weight(field, place), as_signed)) for title, field, place in SHIFT]
    return [*columns[:-1], *shift, columns[-1]]


def _cell(
    value: Callable[[HeadResult], float | None], form: Callable[[float], str]
) -> Callable[[HeadResult], str]:
    def cell(head: HeadResult) -> str:
        number = value(head)
        return EMPTY if number is None else form(number)

    return cell


def _weight(field: str, place: int) -> Callable[[HeadResult], float | None]:
    def weight(head: HeadResult) -> float | None:
        weights = getattr(head, field) or []
        return weights[place] if place < len(weights) else None

    return weight
