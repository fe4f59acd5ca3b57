"""What ``keyshift scaling`` does: read, fit, write the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from keyshift.errors import UserError
from keyshift.provenance import command_line, environment, moment
from keyshift.scaling.law import FEWEST, fit
from keyshift.scaling.points import read_curves, read_reports
from keyshift.scaling.results import Curve, ScalingReport

Progress = Callable[[str, int, int], None]
"""Called with the variant that is fitted, how many are done, and of how many."""


def fit_scaling(folders: Sequence[Path], directory: Path, progress: Progress) -> ScalingReport:
    """Fit every variant's losses over its sizes; write ``scaling.json``, ``scaling.html`` and ``figures/``.

    Args:
        folders: of comparisons, each with its ``report.json``.

    Raises:
        UserError: folders that do not go together, no variant with two sizes, or a place that cannot be
            written.
    """
    reports = read_reports(folders)
    curves = read_curves(folders, reports)
    for done, curve in enumerate(curves):
        progress(curve.variant, done, len(curves))
        _add_law(curve)
    if all(curve.law is None for curve in curves):
        raise UserError(
            f"no variant of {', '.join(map(str, folders))} has finished runs at two sizes; compare at more"
        )
    report = ScalingReport(
        title=reports[0].title,
        folders=[str(folder) for folder in folders],
        command=command_line(),
        created=moment(),
        environment=environment(),
        curves=curves,
        remarks=_remarks(curves),
    )
    from keyshift.scaling.page import write_scaling

    try:
        write_scaling(report, directory)
    except OSError as error:
        raise UserError(
            f"out={directory} cannot be written ({error.strerror}); pass another --out"
        ) from error
    return report


def _add_law(curve: Curve) -> None:
    sizes = [size for size in curve.sizes if size.losses]
    if len(sizes) < 2:
        curve.remark = (
            f"{len(sizes)} size{'' if len(sizes) == 1 else 's'} with finished runs: a law needs two"
        )
        return
    curve.law = fit(sizes)
    if curve.law.exponent.low is None:
        curve.remark = "no size has two seeds: no intervals"


def _remarks(curves: Sequence[Curve]) -> list[str]:
    """What all readers should know before they compare the curves."""
    fitted = [curve for curve in curves if curve.law is not None]
    remarks = []
    if any(curve.law is not None and curve.law.kind == "power" for curve in fitted):
        remarks.append(
            f"Fewer than {FEWEST} sizes do not tell a floor from a slope: E = 0 there, a pure power law."
        )
    tokens = {size.tokens for curve in fitted for size in curve.sizes if size.losses}
    if len(tokens) > 1:
        remarks.append(
            f"Sizes were trained on different numbers of tokens, {min(tokens):,} to {max(tokens):,}: part of "
            "what looks like size is training."
        )
    lost = sum(size.lost for curve in curves for size in curve.sizes)
    if lost:
        remarks.append(
            f"{lost} run{'' if lost == 1 else 's'} diverged, failed or did not end, and are left out."
        )
    return remarks
