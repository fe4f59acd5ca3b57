"""The labels of a recipe's grid, as a report has them: who shares which, and what they set."""

from __future__ import annotations

from typing import Any

from keyshift.recipe import VARIANT
from keyshift.results import Report, VariantResult


def place_of(variant: VariantResult) -> dict[str, str]:
    """The labels of a variant on the axes beside the variants' own."""
    return {axis: label for axis, label in variant.labels.items() if axis != VARIANT}


def own_name(variant: VariantResult) -> str:
    """The variant's own label, which it shares with the others of its kind in the grid."""
    return variant.labels.get(VARIANT, variant.name)


def own_names(report: Report) -> list[str]:
    """The variants' own labels, in the recipe's order."""
    return list(dict.fromkeys(own_name(variant) for variant in report.variants))


def places(report: Report) -> list[dict[str, str]]:
    """Every combination of labels beside the variants' own; a recipe without axes has one, which is empty."""
    found: list[dict[str, str]] = []
    for variant in report.variants:
        if place_of(variant) not in found:
            found.append(place_of(variant))
    return found


def settings_of(report: Report, variant: VariantResult, table: str) -> dict[str, Any]:
    """The recipe's ``table``, with what the variant's labels change in it.

    It is read here and not with `keyshift.recipe.Recipe`, since a report may be older than what that accepts.
    """
    recipe = report.recipe
    axes = {VARIANT: recipe.get("variants", {}), **recipe.get("axes", {})}
    found = dict(recipe.get(table) or {})
    for axis, label in variant.labels.items():
        found.update(axes.get(axis, {}).get(label, {}).get(table, {}))
    return found
