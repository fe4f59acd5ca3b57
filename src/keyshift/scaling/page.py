"""The page of scaling laws, one HTML file that asks the network for nothing, and the files beside it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from keyshift.report.figures.canvas import Picture, look_of
from keyshift.report.files import write
from keyshift.report.formats import as_loss, as_moment
from keyshift.report.template import fill
from keyshift.scaling.figure import draw_scaling
from keyshift.scaling.results import ScalingReport, Size
from keyshift.scaling.terminal import EMPTY, remarks_of, with_interval


def write_scaling(report: ScalingReport, directory: Path) -> None:
    """Write ``scaling.json``, ``figures/scaling.png`` and ``scaling.html``, each atomically.

    The numbers are written first, so that they are kept whatever happens to the drawing.
    """
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    write(directory / "scaling.json", report.model_dump_json(indent=2).encode() + b"\n")
    picture = draw_scaling(report)
    write(directory / "figures" / f"{picture.name}.png", picture.png)
    write(directory / "scaling.html", render_scaling(report, picture).encode())


def render_scaling(report: ScalingReport, picture: Picture) -> str:
    """The whole page as text."""
    return fill(
        Path(__file__).with_name("scaling.html.j2"),
        report=report,
        created=as_moment(report.created),
        picture=picture,
        remarks=remarks_of(report),
        curves=[(curve, look_of(index).colour) for index, curve in enumerate(report.curves)],
        empty=EMPTY,
        with_interval=with_interval,
        loss_of=_loss_of,
    )


def _loss_of(size: Size) -> str:
    return as_loss(fmean(size.losses)) if size.losses else EMPTY
