"""What is done with a step's gradients before they are used: clipped, left out, or the end of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keyshift.recipe import Training
from keyshift.training.clipping import NormClip, RunningMoments, ZClip, gradient_norm, scale_

PATIENCE = 50
"""So many steps left out in a row end the run: what is broken does not mend itself."""


@dataclass(frozen=True)
class Verdict:
    """Of one step: the norm of its gradients before clipping, whether to leave it out, or why to stop."""

    norm: float
    skip: bool = False
    stop: str | None = None


class Guard:
    """Judges steps as `Training` says: ``clipping``, ``unstable``, ``spike_zscore``.

    ``skipped`` counts the steps that were left out.
    """

    def __init__(self, settings: Training):
        self.settings = settings
        self.clipper = ZClip() if settings.clipping == "zclip" else NormClip(settings.max_grad_norm)
        self.losses = RunningMoments()
        self.skipped = self.in_a_row = 0

    def judge(self, loss: float, parameters: Sequence[Tensor], step: int) -> Verdict:
        """Clip the gradients of a step in place, unless there is something wrong with it.

        Args:
            loss: the step's mean over all processes, in nats.
            parameters: those with gradients, complete ones.
        """
        norm = gradient_norm(parameters)
        problem = self._problem(loss, norm)
        if problem is None:
            self.in_a_row = 0
            self.losses.update(loss)
            scale_(parameters, self.clipper.factor(norm))
            return Verdict(norm)
        self.skipped += 1
        self.in_a_row += 1
        if self.settings.unstable == "stop":
            return Verdict(norm, stop=problem)
        if self.in_a_row >= PATIENCE:
            return Verdict(norm, stop=f"{problem}, as in the {PATIENCE - 1} steps before")
        return Verdict(norm, skip=True)

    def _problem(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if not math.isfinite(norm):
            return f"norm of the gradients is {norm}"
        threshold, z = self.settings.spike_zscore, self.losses.z(loss)
        if threshold is not None and z is not None and z > threshold:
            return f"loss {loss:.4g} is {z:.1f} standard deviations above its recent mean"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Numbers, for JSON."""
        return {
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "losses": self.losses.state_dict(),
            "clipper": self.clipper.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
        self.losses.load_state_dict(state["losses"])
        self.clipper.load_state_dict(state["clipper"])
