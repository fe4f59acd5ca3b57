"""The columns of the results table, on the page and in the terminal, and what stands in their cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from keyshift.report.formats import as_compact, as_loss, as_percent, as_range
from keyshift.report.numbers import Row

EMPTY = "–"


class Cell(NamedTuple):
    """What a table shows: a value, and below it a smaller remark (a range, a count)."""

    text: str = EMPTY
    note: str = ""


class Column(NamedTuple):
    """A column of the page (``title``), of the terminal's table (``short``), or of both; "" leaves it out."""

    group: str
    title: str
    short: str
    cell: Callable[[Row], Cell]


def filled_columns(kind: str, rows: Sequence[Row]) -> list[Column]:
    """The columns for a report of ``kind`` in which at least one variant has something to show."""
    return [column for column in _columns(kind) if any(column.cell(row).text != EMPTY for row in rows)]


def _columns(kind: str) -> list[Column]:
    final = "Final, held out"
    steps = "Steps to accuracy"
    cached = "Cache, bytes/token"
    accuracy = Column(final, "Accuracy", "Acc.", lambda row: spread_cell(row["final_accuracy"], as_percent))
    task = [
        Column(steps, "90%", "→90%", lambda row: _steps(row["steps_to_90"])),
        Column(steps, "99%", "→99%", lambda row: _steps(row["steps_to_99"])),
        accuracy,
        Column(final, "Loss, nats", "", lambda row: spread_cell(row["final_loss"], as_loss)),
    ]
    text = [
        Column(final, "Loss, nats", "Loss", lambda row: spread_cell(row["final_loss"], as_loss)),
        Column(final, "Bits/byte", "Bits/B", lambda row: spread_cell(row["bits_per_byte"], as_loss)),
        accuracy,  # of a task that the text was mixed with
    ]
    decode, train = "decode_ms_per_token", "train_tokens_per_second"
    return [
        Column("", "Parameters", "", _parameters),
        Column("", "", "Params", lambda row: _number(row["parameters"], as_compact)),
        Column("", "Seeds", "", _seeds),
        Column("", "", "Seeds", lambda row: Cell(_seeds(row).text)),
        Column("", "Diverged", "Div.", _diverged),
        *(task if kind == "task" else text),
        Column(cached, "Predicted", "", lambda row: _number(row["cache_bytes_per_token_predicted"], _bytes)),
        Column(cached, "Measured", "", lambda row: _number(row["cache_bytes_per_token_measured"], _bytes)),
        Column("", "", "Cache B", _cache),
        Column(cached, "Ratio", "Ratio", lambda row: _number(row["cache_ratio"], "{:.2f}".format)),
        Column("Decoding", "ms/token", "ms/tok", lambda row: _number(row[decode], "{:.3g}".format)),
        Column("Training", "tokens/s", "", lambda row: _number(row[train], "{:,.0f}".format)),
        Column("", "", "tok/s", lambda row: _number(row[train], as_compact)),
    ]


def _number(value: float | None, form: Callable[[float], str]) -> Cell:
    return Cell() if value is None else Cell(form(value))


def _bytes(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _steps(steps: Row | None) -> Cell:
    if steps is None:
        return Cell()
    text = "never" if steps["median"] is None else f"{steps['median']:,g}"
    missed = steps["reached"] < steps["of"]
    return Cell(text, f"{steps['reached']} of {steps['of']}" if missed else as_range(steps))


def spread_cell(spread: Row | None, form: Callable[[float], str]) -> Cell:
    """A mean over seeds, and below it the standard deviation."""
    if spread is None:
        return Cell()
    return Cell(form(spread["mean"]), "" if spread["std"] is None else f"± {form(spread['std'])}")


def _seeds(row: Row) -> Cell:
    others = [part for part in row["status"].split(", ") if not part.endswith("finished")]
    return Cell(f"{row['seeds_finished']}/{row['seeds_total']}", "\n".join(others))


def _diverged(row: Row) -> Cell:
    counts = row["diverged"]
    if counts is None:
        return Cell()
    return Cell(f"{counts['runs']}/{counts['of']}", f"{100 * counts['low']:.0f}–{100 * counts['high']:.0f}%")


def _parameters(row: Row) -> Cell:
    shift = row["shift_parameters"]
    return Cell(f"{row['parameters']:,}", f"{shift:,} shift" if shift else "")


def _cache(row: Row) -> Cell:
    if row["cache_bytes_per_token_measured"] is None:
        return Cell(as_compact(row["cache_bytes_per_token_predicted"]), "predicted")
    return Cell(as_compact(row["cache_bytes_per_token_measured"]))
