"""What runs measured over training, brought to common steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keyshift.results import RunResult


@dataclass(frozen=True)
class Track:
    """One value per evaluated step, in order; of a run that has ``ended``, the last one stays."""

    values: dict[int, float]
    ended: bool

    @property
    def last(self) -> int:
        """The last step that was evaluated."""
        return max(self.values)

    def at(self, step: int) -> float | None:
        """The value at ``step``; None if there is none."""
        if self.ended and step > self.last:
            return self.values[self.last]
        return self.values.get(step)


def track_of(run: RunResult, field: str, most: float = math.inf) -> Track | None:
    """The finite values of ``field`` at a run's evaluations, none above ``most``; None without any.

    ``induction`` is the best head's score, where heads were probed.
    """
    evaluated = ((point.step, getattr(point, field, None)) for point in run.curve)
    points = run.induction if field == "induction" else evaluated
    values = {step: min(value, most) for step, value in points if value is not None and math.isfinite(value)}
    return Track(values, run.status == "finished") if values else None


def aligned(tracks: Sequence[Track]) -> dict[int, list[float]]:
    """The values of all ``tracks`` at every step at which each of them has one."""
    steps = sorted({step for track in tracks for step in track.values})
    rows = {step: [track.at(step) for track in tracks] for step in steps}
    full = {step: [value for value in row if value is not None] for step, row in rows.items()}
    return {step: row for step, row in full.items() if len(row) == len(tracks)}
