"""The evaluation in the terminal, within 80 columns: the papers' tables, then every task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keyshift.evaluation.paper_tables import PaperTable
from keyshift.evaluation.report.values import Mean, detail, named, number, paper_rows, truncation
from keyshift.evaluation.results import EvalReport

if TYPE_CHECKING:
    from rich.console import Console


def print_eval(report: EvalReport, tables: Sequence[PaperTable], console: Console) -> None:
    """Print the report: published rows are marked with *."""
    from rich.text import Text

    for table in tables:
        _print_paper(report, table, console)
    _print_detail(report, console)
    for line in [*report.remarks, *truncation(report)]:
        console.print(Text(line, style="yellow"))


def _print_paper(report: EvalReport, table: PaperTable, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False, title=Text(table.title))
    shown.add_column("Model", overflow="fold", min_width=12)
    for title in titles(table):
        shown.add_column(Text(title), justify="right", no_wrap=True)
    for model, row in paper_rows(report, table).items():
        shown.add_row(Text(model), *(_cell(mean) for mean in row))
    shown.add_section()
    for name, values in table.rows.items():
        shown.add_row(Text(f"{name}*"), *(f"{value:.2f}" for value in values), style="dim")
    console.print(shown)
    console.print(Text(f"* {published(table)} {table.note}"))
    console.print()


def published(table: PaperTable) -> str:
    """Whose rows are marked."""
    return f"as published, {table.source}: other data, other sizes. In percent."


def titles(table: PaperTable) -> list[str]:
    """The titles of the columns of numbers."""
    return [*(column.title for column in table.columns), *(["Avg"] if table.average else [])]


def _cell(mean: Mean | None) -> Any:
    from rich.text import Text

    if mean is None:
        return "–"
    reach = "" if mean.reach is None else f"\n±{mean.reach:.2f}"
    return Text.assemble(f"{mean.value:.2f}", (reach, "dim"))


def _print_detail(report: EvalReport, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown.add_column("Task", overflow="fold", min_width=12)
    shown.add_column("Metric", overflow="fold", min_width=8)
    shown.add_column("Model", overflow="fold", min_width=8)
    shown.add_column("Mean", justify="right", no_wrap=True)
    shown.add_column("±", justify="right", no_wrap=True)
    shown.add_column("Seeds", justify="right", no_wrap=True)
    before: tuple[str, str] = ("", "")
    rows = detail(report)
    for row in rows:
        names = named(row["task"], row["shots"]), row["metric"]
        texts = [Text("" if name == last else name) for name, last in zip(names, before, strict=True)]
        if names[0] != before[0]:
            texts[1] = Text(names[1])
        reach = "" if row["high"] is None else number(row, row["high"] - row["mean"])
        shown.add_row(*texts, Text(row["model"]), number(row, row["mean"]), reach, str(row["seeds"]))
        before = names
    console.print(shown)
    if any(row["seeds"] > 1 for row in rows):
        console.print("±: half the width of the 95% t interval over seeds")
    console.print()
