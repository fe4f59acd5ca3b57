"""Scaling laws in the terminal: a row per variant; and the same as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keyshift.scaling.results import Estimate, ScalingReport

if TYPE_CHECKING:
    from rich.console import Console

EMPTY = "–"


def summary(report: ScalingReport) -> list[dict[str, Any]]:
    """One dictionary per variant, of plain JSON values."""
    return [curve.model_dump(mode="json") for curve in report.curves]


def print_scaling(report: ScalingReport, console: Console) -> None:
    """Print the laws as a table within 80 columns, and below it what to know of them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title=Text(report.title))
    table.add_column("Variant", overflow="fold", min_width=10)
    for title in ("Sizes", "Floor E, nats", "Exponent a", "Error"):
        table.add_column(title, justify="right")
    for curve in report.curves:
        law = curve.law
        table.add_row(
            Text(curve.variant),
            str(len(curve.sizes)),
            EMPTY if law is None or law.floor is None else with_interval(law.floor),
            EMPTY if law is None else with_interval(law.exponent),
            EMPTY if law is None else f"{law.error:.2%}",
        )
    console.print(table)
    console.print()
    for line in [*remarks_of(report), "L(N) = E + A N^-a, N without embeddings; in brackets 95% intervals."]:
        console.print(Text(line))


def remarks_of(report: ScalingReport) -> list[str]:
    """What is to be known of single variants, and of all."""
    own = [f"{curve.variant}: {curve.remark}." for curve in report.curves if curve.remark]
    return [*own, *report.remarks]


def with_interval(estimate: Estimate) -> str:
    """The number with as many digits as its interval gives reason for: ``0.076 [0.071, 0.082]``."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if low is None or high is None:
        return f"{value:.3g}"
    if abs(value) >= 1e4:
        return f"{value:.2g} [{low:.2g}, {high:.2g}]"
    digits = 3 if high - low < 0.2 else 2
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]".replace("-", "−")
