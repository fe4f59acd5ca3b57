"""Losses and sizes out of the reports of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError
from keyshift.recipe import build_task
from keyshift.report.labels import own_name, place_of, settings_of
from keyshift.report.outcomes import final_value
from keyshift.results import Report, VariantResult
from keyshift.scaling.results import Curve, Size


def read_reports(folders: Sequence[Path]) -> list[Report]:
    """The reports of comparisons whose losses can be put on one curve.

    Raises:
        UserError: a folder without a report that can be read, or losses that are not of the same thing.
    """
    reports = [_read(folder) for folder in folders]
    scale = _scale(reports[0], reports[0].variants[0])
    for folder, report in zip(folders, reports, strict=True):
        for variant in report.variants:
            own = _scale(report, variant)
            for what, value in own.items():
                if value != scale[what]:
                    raise UserError(
                        f"{folder}: {variant.name!r} has {what}={value}, and {folders[0]} {scale[what]}: "
                        "their losses are not on one scale; give comparisons on the same data"
                    )
    return reports


def read_curves(folders: Sequence[Path], reports: Sequence[Report]) -> list[Curve]:
    """Every variant's sizes, by parameters.

    Where a variant has one size several times (at other learning rates, or in several folders), the one of
    the lowest mean loss counts: every size at its best.
    """
    found: dict[str, dict[int, Size]] = {}
    for folder, report in zip(folders, reports, strict=True):
        for variant in report.variants:
            sizes = found.setdefault(own_name(variant), {})
            size = _size(folder, report, variant)
            if size.parameters not in sizes or _better(size, sizes[size.parameters]):
                sizes[size.parameters] = size
    return [
        Curve(variant=name, sizes=[size for _, size in sorted(sizes.items())])
        for name, sizes in found.items()
    ]


def non_embedding_parameters(report: Report, variant: VariantResult) -> int:
    """Parameters without token embeddings, output layer and learned positions (Kaplan et al., 2020)."""
    config = KeyshiftConfig(vocab_size=_vocabulary(report, variant), **variant.config)
    rows = config.vocab_size * (1 if config.tie_word_embeddings else 2)
    if config.position == "learned":
        rows += variant.config.get("max_position_embeddings") or _sequence_length(report, variant)
    return variant.parameters - rows * config.hidden_size


def _read(folder: Path) -> Report:
    path = folder / "report.json"
    if not path.is_file():
        raise UserError(f"{folder} has no report.json; give folders that keyshift compare wrote")
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a comparison's report; run keyshift compare again") from error


def _size(folder: Path, report: Report, variant: VariantResult) -> Size:
    losses = [final_value(report, variant, run, "loss") for run in variant.runs]
    known = [loss for loss in losses if loss is not None]
    return Size(
        parameters=non_embedding_parameters(report, variant),
        tokens=max((point.tokens for run in variant.runs for point in run.curve), default=0),
        losses=known,
        lost=len(losses) - len(known),
        where=", ".join([str(folder), *(f"{axis} {label}" for axis, label in place_of(variant).items())]),
    )


def _better(size: Size, other: Size) -> bool:
    return bool(size.losses) and (not other.losses or fmean(size.losses) < fmean(other.losses))


def _scale(report: Report, variant: VariantResult) -> dict[str, object]:
    """What losses depend on beside the model."""
    return {
        "kind": report.kind,
        "vocab_size": _vocabulary(report, variant),
        "sequence_length": _sequence_length(report, variant),
    }


def _vocabulary(report: Report, variant: VariantResult) -> int:
    size = report.data.get("vocab_size")  # of text; a task that is mixed with it has the same
    if size is None:
        task = settings_of(report, variant, "task")
        size = task.get("vocab_size") or build_task(task).vocab_size
    return int(size)


def _sequence_length(report: Report, variant: VariantResult) -> int:
    data = settings_of(report, variant, "data")
    if "sequence_length" in data:
        return int(data["sequence_length"])
    return build_task(settings_of(report, variant, "task")).sequence_length
