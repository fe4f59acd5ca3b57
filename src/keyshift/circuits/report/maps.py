"""Heat maps of all heads, layer by head, as tables."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from keyshift.circuits.report.measures import MEASURES, Measure
from keyshift.circuits.results import HeadResult, Levels, ModelResult
from keyshift.report.cells import EMPTY

LEAST = 0.1  # nats for full colour: differences that say nothing should not look strong
DARK = 0.85  # from this strength of colour on, white text is the easier to read


class Tile(NamedTuple):
    """One head: a few digits, the rest on hover, and how strongly it is coloured, with a sign."""

    head: str
    text: str
    title: str
    strength: float

    @property
    def kind(self) -> str:
        """The classes of the cell."""
        return ("minus" if self.strength < 0 else "plus") + (" dark" if abs(self.strength) > DARK else "")


class HeatMap(NamedTuple):
    """One measure of all heads."""

    key: str
    title: str
    caption: str
    rows: list[list[Tile]]

    @property
    def heads(self) -> int:
        """Columns: the heads of the layer that has most."""
        return max(len(row) for row in self.rows)


def heat_maps(model: ModelResult) -> list[HeatMap]:
    """A map for every measure that at least one head has."""
    shown = [m for m in MEASURES if any(m.value(head) is not None for head in model.heads)]
    return [_heat_map(measure, model.heads, model.levels) for measure in shown]


def _heat_map(measure: Measure, heads: list[HeadResult], levels: Levels) -> HeatMap:
    values = [value for head in heads if (value := measure.value(head)) is not None]
    scale = max(LEAST, *map(abs, values)) if measure.unit else 1.0
    level = getattr(levels, measure.key, None)
    even = "" if level is None else f" An even spread would score {level:.3f}."
    full = f" Full colour: {scale:.2f} {measure.unit}." if measure.unit else ""
    layers = groupby(heads, lambda head: head.layer)
    rows = [[_tile(measure, head, scale) for head in layer] for _, layer in layers]
    return HeatMap(measure.key, measure.title, measure.caption + even + full, rows)


def _tile(measure: Measure, head: HeadResult, scale: float) -> Tile:
    value = measure.value(head)
    if value is None:
        return Tile(head.name, EMPTY, f"head {head.name}: not measured", 0.0)
    exact = f"{value:+.4f}" if measure.signed else f"{value:.4f}"
    detail = measure.detail(head)
    title = f"head {head.name}: {exact} {measure.unit}".rstrip() + (f", {detail}" if detail else "")
    return Tile(head.name, _digits(value), title, round(value / scale, 3))


def _digits(value: float) -> str:
    """As many digits as fit a narrow cell, whose colour shows the sign again: .66, −.94, 9.6, 13."""
    places = 0 if abs(value) >= 9.95 else 1 if abs(value) >= 0.995 else 2
    text = f"{round(value, places) + 0.0:.{places}f}".replace("-", "−")  # + 0.0: no sign for what rounds to 0
    return text.replace("0.", ".", 1) if places == 2 else text
