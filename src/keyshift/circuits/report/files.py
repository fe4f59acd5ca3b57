"""What a report of circuits leaves on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keyshift.circuits.report.page import render_circuits
from keyshift.circuits.report.patterns import Patterns
from keyshift.circuits.results import CircuitsReport
from keyshift.report.files import write


def write_circuits(report: CircuitsReport, patterns: Sequence[Patterns | None], directory: Path) -> None:
    """Write ``circuits.json`` and ``circuits.html`` into ``directory``, each file atomically.

    ``patterns`` has one entry per model of the report: what its pattern viewer shows, or None for no viewer.
    The numbers are written first, so that they are kept whatever happens to the drawing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "circuits.json", report.model_dump_json(indent=2).encode() + b"\n")
    write(directory / "circuits.html", render_circuits(report, patterns).encode())
