"""The comparison in the terminal: results, differences, and below them what did not finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keyshift.report.cells import filled_columns
from keyshift.report.numbers import Row, reference_variant, summary_rows
from keyshift.report.paired import differences
from keyshift.report.sentences import lost, unfinished
from keyshift.report.tables import difference_lines, results_remark
from keyshift.results import Report

if TYPE_CHECKING:
    from rich.console import Console


def print_summary(report: Report, console: Console) -> None:
    """Print the comparison as tables that fit 80 columns, and below them what did not finish."""
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
    _print_differences(report, console)
    for remark in _remarks(report, rows):
        console.print(Text(remark, style="yellow"))


def _print_differences(report: Report, console: Console) -> None:
    """Print the recipe's comparisons as a table of their own, if there are any."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = difference_lines(differences(report), short=True)
    if not lines:
        return
    title = "Differences over pairs of equal seeds, with 95% intervals"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title=title)
    table.add_column("Compared", overflow="fold", min_width=16)
    table.add_column("Difference", overflow="fold", min_width=14, justify="right")
    table.add_column("95% interval", overflow="fold", min_width=10, justify="right")
    table.add_column("Pairs", overflow="fold", min_width=5, justify="right")
    for line in lines:
        names = Text(f"{line.compared}, {line.measure}") if line.compared else Text()
        if names and line.where:
            table.add_row(names)
        label = Text(f"  {line.where}") if line.where else names
        if line.left_out:
            label.append(f"\n  {line.left_out}", style="dim")
        table.add_row(label, line.mean, line.interval, line.pairs)
    console.print(table)
    console.print()


def _remarks(report: Report, rows: Sequence[Row]) -> list[str]:
    remarks = lost(report)
    if not report.complete:
        remarks.append(f"incomplete: {unfinished(report) or 'not every run has ended'}")
    reference = reference_variant(report)
    if reference is not None:
        remarks.append(f"Ratio: cache relative to {reference.name}")
    if counted := results_remark(report, rows):
        remarks.append(counted)
    return remarks
