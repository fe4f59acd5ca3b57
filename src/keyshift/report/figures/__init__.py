"""The figures of a report; matplotlib is loaded only when they are drawn."""

from keyshift.report.figures.cache import draw_cache
from keyshift.report.figures.canvas import STYLE, Picture
from keyshift.report.figures.curves import draw_curves
from keyshift.report.figures.shift import draw_shift
from keyshift.results import Report

FIGURE_NAMES = ("accuracy", "loss", "cache", "shift")


def draw_figures(report: Report) -> list[Picture]:
    """Every figure for which there is something to show, whatever the user's own matplotlib settings."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        drawn = [
            draw_curves(report, "accuracy"),
            draw_curves(report, "loss"),
            draw_cache(report),
            draw_shift(report),
        ]
    return [picture for picture in drawn if picture is not None]
