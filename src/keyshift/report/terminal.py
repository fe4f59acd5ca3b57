"""The comparison in the terminal: a table, and below it what did not finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyshift.report.cells import filled_columns
from keyshift.report.numbers import reference_variant, summary_rows
from keyshift.report.sentences import diverged, unfinished
from keyshift.results import Report

if TYPE_CHECKING:
    from rich.console import Console


def print_summary(report: Report, console: Console) -> None:
    """Print the comparison as a table that fits 80 columns, and below it what did not finish."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = summary_rows(report)
    columns = [column for column in filled_columns(report.kind, rows) if column.short]
    gap = 1 if console.width >= 100 else 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, gap), show_edge=False, title=Text(report.title))
    table.add_column("Variant", overflow="fold", min_width=10)
    for column in columns:
        table.add_column(column.short, justify="right", no_wrap=True)
    for row in rows:
        cells = [column.cell(row) for column in columns]
        texts = [Text.assemble(cell.text, (f"\n{cell.note}" if cell.note else "", "dim")) for cell in cells]
        table.add_row(Text(row["variant"]), *texts)
    console.print(table)
    console.print()
    for remark in _remarks(report):
        console.print(Text(remark, style="yellow"))


def _remarks(report: Report) -> list[str]:
    remarks = diverged(report)
    if not report.complete:
        remarks.append(f"incomplete: {unfinished(report) or 'not every run has ended'}")
    reference = reference_variant(report)
    if reference is not None:
        remarks.append(f"Ratio: cache relative to {reference.name}")
    return remarks
