"""The figures of a report; matplotlib is loaded only when they are drawn."""

from keyshift.report.figures.cache import draw_cache
from keyshift.report.figures.canvas import STYLE, Picture
from keyshift.report.figures.curves import draw_curves
from keyshift.report.figures.grid import draw_grid
from keyshift.report.figures.paired import draw_paired
from keyshift.report.figures.scores import draw_errors, draw_scores
from keyshift.report.figures.shift import draw_shift
from keyshift.results import Report

FIGURE_NAMES = (
    "grid",
    "difference-accuracy",
    "difference-loss",
    "errors",
    "scores",
    "accuracy",
    "loss",
    "induction",
    "cache",
    "shift",
)


def draw_figures(report: Report) -> list[Picture]:
    """Every figure for which there is something to show, whatever the user's own matplotlib settings."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        drawn = [
            draw_grid(report),
            draw_paired(report, "accuracy"),
            draw_paired(report, "loss"),
            draw_errors(report),
            draw_scores(report),
            draw_curves(report, "accuracy"),
            draw_curves(report, "loss"),
            draw_curves(report, "induction"),
            draw_cache(report),
            draw_shift(report),
        ]
    return [picture for picture in drawn if picture is not None]
