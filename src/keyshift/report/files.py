"""What a report leaves on disk."""

from __future__ import annotations

import os
from pathlib import Path

from keyshift.report.figures import FIGURE_NAMES, draw_figures
from keyshift.report.markdown import render_markdown
from keyshift.report.page import render_page
from keyshift.results import Report


def write_report(report: Report, directory: Path) -> None:
    """Write ``report.json``, ``figures/*.png``, ``report.html`` and ``report.md``, each atomically.

    The numbers are written first, so that they are kept whatever happens to the drawing. A report may be
    partial: what was not measured is left out.
    """
    pictures = directory / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    write(directory / "report.json", report.model_dump_json(indent=2).encode() + b"\n")
    figures = draw_figures(report)
    for figure in figures:
        write(pictures / f"{figure.name}.png", figure.png)
    for name in set(FIGURE_NAMES) - {figure.name for figure in figures}:
        (pictures / f"{name}.png").unlink(missing_ok=True)
    write(directory / "report.html", render_page(report, figures).encode())
    write(directory / "report.md", render_markdown(report, figures).encode())


def write(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
