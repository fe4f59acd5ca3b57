"""The page of the theory: one HTML file that holds everything and asks the network for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from keyshift.report.figures.canvas import Picture
from keyshift.report.formats import as_moment
from keyshift.report.template import fill
from keyshift.theory.report.numbers import number, uncertainty
from keyshift.theory.results import TheoryReport

FIGURE_OF = {
    "Theorem 1": "copy",
    "Theorem 3": "limit",
    "Figure 2": "flow",
    "GVA, scale": "scale",
    "GVA, start": "start",
}
"""The figure below the table of a part."""


def render_theory(report: TheoryReport, pictures: Sequence[Picture]) -> str:
    """The whole page as text."""
    by_name = {picture.name: picture for picture in pictures}
    parts = [(part, list(rows)) for part, rows in groupby(report.checks, lambda check: check.part)]
    return fill(
        Path(__file__).with_name("theory.html.j2"),
        report=report,
        created=as_moment(report.created),
        parts=[(part, rows, by_name.get(FIGURE_OF.get(part, ""))) for part, rows in parts],
        number=number,
        uncertainty=uncertainty,
    )
