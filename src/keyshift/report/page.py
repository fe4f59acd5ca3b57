"""The page: one HTML file that holds everything and asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from keyshift.report.cells import EMPTY, filled_columns
from keyshift.report.figures.canvas import Picture, looks
from keyshift.report.formats import as_moment
from keyshift.report.heads import heads_of
from keyshift.report.numbers import reference_variant, summary_rows
from keyshift.report.paired import differences
from keyshift.report.sentences import lost, lost_in_all, sentences, unfinished
from keyshift.report.tables import difference_lines, how_compared, results_remark, score_table
from keyshift.report.template import fill
from keyshift.results import Report, VariantResult


class ShiftTable(NamedTuple):
    """The shift weights of one variant, a line per seed, layer and head."""

    variant: str
    columns: list[str]
    rows: list[list[str]]


def render_page(report: Report, pictures: Sequence[Picture]) -> str:
    """The whole page as text."""
    rows, compared = summary_rows(report), differences(report)
    columns = [column for column in filled_columns(report.kind, rows) if column.title]
    reference = reference_variant(report)
    return fill(
        Path(__file__).with_name("report.html.j2"),
        report=report,
        variants=[
            {
                "name": row["variant"],
                "colour": look.colour,
                "sentence": sentence,
                "cells": [column.cell(row) for column in columns],
            }
            for row, look, sentence in zip(rows, looks(report), sentences(report, rows), strict=True)
        ],
        unfinished=unfinished(report),
        lost=lost(report),
        lost_in_all=lost_in_all(report),
        groups=[(group, len(list(below))) for group, below in groupby(columns, lambda column: column.group)],
        columns=columns,
        results_remark=results_remark(report, rows),
        reference=None if reference is None else reference.name,
        differences=difference_lines(compared),
        how_compared=how_compared(report, compared),
        scores=score_table(report, rows),
        pictures=pictures,
        shift_tables=[table for variant in report.variants if (table := _shift_table(variant))],
        created=as_moment(report.created),
        data={key.replace("_", " "): _fact(value) for key, value in report.data.items()},
        recipe=json.dumps(report.recipe, indent=2, ensure_ascii=False, default=str),
    )


def _shift_table(variant: VariantResult) -> ShiftTable | None:
    heads = [(run.seed, head) for run in variant.runs for head in heads_of(run)]
    if not heads:
        return None
    columns = [
        (of, symbol, place)
        for of, symbol in (("key", "α"), ("value", "β"), ("query", "γ"))
        for place in range(max(len(getattr(head, of)) for _, head in heads))
    ]
    lines = []
    for seed, head in heads:
        sides = [(getattr(head, of), place) for of, _, place in columns]
        weights = [f"{side[place]:.3f}" if place < len(side) else EMPTY for side, place in sides]
        lines.append([str(seed), str(head.layer), str(head.head), *weights])
    titles = [f"{symbol}{place + 1}" for _, symbol, place in columns]
    return ShiftTable(variant.name, ["Seed", "Layer", "Head", *titles], lines)


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_fact(each)} {key}" for key, each in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
