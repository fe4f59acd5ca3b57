"""One checkpoint's scores of ``keyshift eval``: from its eval.json, or from what --json printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keyshift.errors import UserError, first_line
from keyshift.evaluation.results import EvalReport


@dataclass(frozen=True)
class Measured:
    """One score, as `keyshift.evaluation.results.Score` describes it."""

    task: str
    metric: str
    shots: int | None
    value: float
    error: float | None
    questions: int


def read_scores(file: Path, folder: Path) -> list[Measured]:
    """The scores of the checkpoint ``folder`` in a file, without parts of groups.

    Raises:
        UserError: no such file, another kind of file, or no scores of this checkpoint in it.
    """
    try:
        content = json.loads(file.read_text())
        rows = (
            _rows(content) if isinstance(content, list) else _report_rows(EvalReport.model_validate(content))
        )
    except OSError as error:
        raise UserError(f"--results {str(file)!r} cannot be read ({error.strerror})") from error
    except (ValueError, ValidationError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--results {str(file)!r} is neither the eval.json of keyshift eval nor what --json prints "
            f"({first_line(error)})"
        ) from error
    own = [score for checkpoint, score in rows if _same(checkpoint, folder)]
    if not own:
        others = sorted({checkpoint for checkpoint, _ in rows})
        raise UserError(
            f"--results {str(file)!r} has no scores of FOLDER {str(folder)!r}; it has those of "
            f"{', '.join(others[:3]) or 'nothing'}"
        )
    return own


def _report_rows(report: EvalReport) -> list[tuple[str, Measured]]:
    return [
        (
            each.checkpoint,
            Measured(each.task, each.metric, each.shots, each.value, each.error, each.questions),
        )
        for each in report.scores
        if each.part_of is None
    ]


def _rows(printed: list[dict[str, Any]]) -> list[tuple[str, Measured]]:
    """From `keyshift.evaluation.report.summary`: a row has a value per checkpoint."""
    return [
        (
            checkpoint,
            Measured(
                row["task"], row["metric"], row["shots"], value, row["errors"][checkpoint], row["questions"]
            ),
        )
        for row in printed
        if row["part_of"] is None
        for checkpoint, value in row["values"].items()
    ]


def _same(checkpoint: str, folder: Path) -> bool:
    """Whether a path as it was given to ``keyshift eval``, perhaps in another folder, is this one."""
    return Path(checkpoint).expanduser().resolve() == folder.resolve()
