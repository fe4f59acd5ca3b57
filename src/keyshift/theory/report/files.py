"""What a check of the theory leaves on disk."""

from __future__ import annotations

from pathlib import Path

from keyshift.report.files import write
from keyshift.theory.report.figures import draw_theory
from keyshift.theory.report.page import render_theory
from keyshift.theory.results import TheoryReport


def write_theory(report: TheoryReport, directory: Path) -> None:
    """Write ``theory.json``, ``figures/*.png`` and ``theory.html`` into ``directory``, each file atomically.

    The numbers are written first, so that they are kept whatever happens to the drawing.
    """
    pictures = directory / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    write(directory / "theory.json", report.model_dump_json(indent=2).encode() + b"\n")
    drawn = draw_theory(report)
    for picture in drawn:
        write(pictures / f"{picture.name}.png", picture.png)
    write(directory / "theory.html", render_theory(report, drawn).encode())
