"""The theory in the terminal: a row per statement; and the same as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keyshift.theory.report.numbers import number
from keyshift.theory.results import TheoryReport

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"holds": "green", "corrected": "yellow", "wrong": "red"}


def summary(report: TheoryReport) -> list[dict[str, Any]]:
    """One dictionary per statement, of plain JSON values."""
    return [check.model_dump() for check in report.checks]


def print_theory(report: TheoryReport, console: Console) -> None:
    """Print every statement within 80 columns: what is claimed, what was measured, number and verdict."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("Statement", overflow="fold", max_width=28)
    table.add_column("Measured", overflow="fold", max_width=22)
    table.add_column("Number", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    part = ""
    for check in report.checks:
        if check.part != part:
            part = check.part
            table.add_row(Text(part, style="bold"))
        verdict = Text(check.verdict, style=STYLES[check.verdict])
        table.add_row(Text(check.statement), Text(check.measured), Text(number(check)), verdict)
    console.print(table)
    console.print()
    counts = {name: sum(check.verdict == name for check in report.checks) for name in STYLES}
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    console.print(Text(f"{len(report.checks)} statements: {words}; reasons are in the report."))
    console.print(Text("± is the standard error, for slopes the 95% confidence interval."))
