"""What an evaluation leaves on disk: ``eval.json`` and ``eval.md``, each written atomically."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from keyshift.errors import RunError
from keyshift.evaluation.paper_tables import PaperTable
from keyshift.evaluation.report.terminal import published, titles
from keyshift.evaluation.report.values import Mean, detail, named, number, paper_rows, truncation
from keyshift.evaluation.results import EvalReport
from keyshift.report.files import write
from keyshift.report.markdown import escaped

DETAIL = ("task", "metric", "model", "mean", "95% interval", "seeds", "questions", "error over questions")


def write_eval(report: EvalReport, tables: Sequence[PaperTable], folder: Path) -> None:
    """Write the report. Raises `RunError` if the disk does not take it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "eval.json", report.model_dump_json(indent=2).encode() + b"\n")
        write(folder / "eval.md", render(report, tables).encode())
    except OSError as error:
        raise RunError(
            f"cannot write {folder} ({error.strerror}); free some space and run it again"
        ) from error


def render(report: EvalReport, tables: Sequence[PaperTable]) -> str:
    """The report as GitHub Markdown."""
    versions = ", ".join(f"{name} {escaped(value)}" for name, value in report.environment.items())
    parts = ["# Evaluation", f"```bash\n{report.command}\n```", f"{report.created[:10]}, {versions}."]
    for table in tables:
        parts += [f"## {table.title}", _paper(report, table)]
        parts.append(f"\\* {published(table)} {escaped(table.note)}")
    parts += ["## Every task", _table(DETAIL, map(_line, detail(report)), words=3)]
    parts.append(
        "Mean over checkpoints with its 95% t interval over seeds; none where all seeds are equal. Error "
        "over questions: the standard error of a checkpoint's share of right answers, the largest over seeds."
    )
    if remarks := [*report.remarks, *truncation(report)]:
        parts.append("\n".join(f"- {escaped(line)}" for line in remarks))
    return "\n\n".join(parts) + "\n"


def _line(row: dict[str, Any]) -> list[str]:
    """The cells of a row, in the order of `DETAIL`."""
    known = [error for error in row["errors"].values() if error is not None]
    return [
        named(row["task"], row["shots"]),
        row["metric"],
        row["model"],
        number(row, row["mean"]),
        interval_text(row),
        str(row["seeds"]),
        str(row["questions"]),
        f"{100 * max(known):.2f}%" if known else "",
    ]


def _paper(report: EvalReport, table: PaperTable) -> str:
    ours = [[model, *map(_cell, row)] for model, row in paper_rows(report, table).items()]
    theirs = [[f"{name} *", *(f"{value:.2f}" for value in row)] for name, row in table.rows.items()]
    return _table(["model", *titles(table)], [*ours, *theirs], words=1)


def _cell(mean: Mean | None) -> str:
    if mean is None:
        return "–"
    return f"{mean.value:.2f}" + ("" if mean.reach is None else f" ± {mean.reach:.2f}")


def interval_text(row: dict[str, Any]) -> str:
    """The 95% t interval over seeds; "" for one seed, or where all are equal."""
    if row["low"] is None:
        return ""
    return f"{number(row, row['low'])} … {number(row, row['high'])}"


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]], words: int) -> str:
    """A table whose first ``words`` columns are words and the others numbers."""
    rule = ["---" if place < words else "---:" for place in range(len(titles))]
    rows = [titles, rule, *([escaped(cell) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
