"""Gradient clipping: at a fixed norm, or where a norm stands out from those before (ZClip).

A clipper is told the norm of a step's whole gradient and answers with the factor to scale it by, so that it
is the same for one process, replicas and shards. Its state is plain numbers: a checkpoint keeps every bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from keyshift.errors import UserError


class Clipper(Protocol):
    """What the training loop asks of clipping."""

    def factor(self, norm: float) -> float:
        """What to scale a gradient of this norm by, from 0 to 1. A norm that is not finite is not clipped
        (1.0) and not learned from: what becomes of such a step is the caller's to decide."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists of them, as JSON keeps them."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        ...


class RunningMoments:
    """Mean and variance of a number over training, the past forgotten exponentially.

    The first ``warmup`` values give the plain mean and variance (divided by their number); every later one
    moves both by ``1 - alpha``, the variance to the squared distance from the mean as already moved (ZClip's
    code).

    Args:
        alpha: how much of the past a value leaves, from 0 to 1.
        warmup: values before there is a mean; at least 1.
    """

    EPSILON = 1e-6
    """Added to the standard deviation, so that equal values have a z-score of 0 (ZClip's code)."""

    def __init__(self, alpha: float = 0.97, warmup: int = 25):
        if not 0 <= alpha < 1:
            raise UserError(f"alpha={alpha} must be at least 0 and below 1")
        if warmup < 1:
            raise UserError(f"warmup={warmup} must be at least 1")
        self.alpha, self.warmup = alpha, warmup
        self.first: list[float] = []
        self.mean: float | None = None
        self.variance = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 during the warm-up."""
        return math.sqrt(self.variance)

    def z(self, value: float) -> float | None:
        """How many standard deviations ``value`` lies above the mean; None during the warm-up."""
        return None if self.mean is None else (value - self.mean) / (self.deviation + self.EPSILON)

    def update(self, value: float) -> None:
        """Learn from a value. One that is not finite is left out: it would stay for ever."""
        if not math.isfinite(value):
            return
        if self.mean is not None:
            self.mean = self.alpha * self.mean + (1 - self.alpha) * value
            self.variance = self.alpha * self.variance + (1 - self.alpha) * (value - self.mean) ** 2
            return
        self.first.append(value)
        if len(self.first) == self.warmup:
            self.mean = sum(self.first) / self.warmup
            self.variance = sum((each - self.mean) ** 2 for each in self.first) / self.warmup
            self.first = []

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self.first), "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `UserError` for a state that is not one of these."""
        if state.keys() != self.state_dict().keys():
            raise UserError(f"state of running moments has {sorted(state)}, not {sorted(self.state_dict())}")
        self.first, self.mean, self.variance = list(state["first"]), state["mean"], state["variance"]


class ZClip:
    """Scales down gradients whose norm is an outlier among the recent ones (arXiv 2504.02507).

    A norm more than ``threshold`` standard deviations above the running mean is brought down to
    ``mean + threshold² / z · deviation``: the further out, the nearer to the mean. What the clipped norm
    became enters the statistics, so that one outlier moves them little. A new level of norms is learned in
    time if it is less than ``threshold²`` deviations up; norms that jump further and stay there are held at
    the old level for good, since what is left of them makes the deviation smaller and smaller. The first
    ``warmup`` steps only give the first statistics.

    The paper's public code agrees and has more, not offered here: a fixed norm that is never exceeded, in the
    warm-up neither (1.0 in its code, None in its README); a factor on the threshold and a switch that keeps
    outliers out of the statistics, neither used there by default. It divides by the norm plus 1e-6; here a
    clipped norm is exact.

    Args:
        threshold: z-score from which a norm is an outlier.
        alpha, warmup: of `RunningMoments`; the paper's values.
    """

    def __init__(self, threshold: float = 2.5, *, alpha: float = 0.97, warmup: int = 25):
        if not threshold > 0:
            raise UserError(f"threshold={threshold} must be above 0")
        self.threshold = threshold
        self.moments = RunningMoments(alpha, warmup)

    def factor(self, norm: float) -> float:
        """See `Clipper.factor`."""
        if not math.isfinite(norm):
            return 1.0
        clipped = self._clipped(norm)
        self.moments.update(clipped)
        return clipped / norm if clipped < norm else 1.0

    def _clipped(self, norm: float) -> float:
        """The norm as the statistics want it."""
        mean, z = self.moments.mean, self.moments.z(norm)
        if mean is None or z is None or z <= self.threshold:
            return norm
        return mean + self.threshold**2 / z * self.moments.deviation

    def state_dict(self) -> dict[str, Any]:
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.load_state_dict(state)


class NormClip:
    """Scales a gradient down to ``max_norm``, as `torch.nn.utils.clip_grad_norm_` does. Has no state."""

    def __init__(self, max_norm: float):
        if not max_norm > 0:
            raise UserError(f"max_norm={max_norm} must be above 0")
        self.max_norm = max_norm

    def factor(self, norm: float) -> float:
        """See `Clipper.factor`."""
        return min(1.0, self.max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `UserError` for the state of another clipper."""
        if state:
            raise UserError(f"clipping at a fixed norm has no state, but was given {sorted(state)}")


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """The 2-norm of all gradients together; of sharded ones (FSDP2) that of the whole, on every rank.

    All ranks must call it: the norm of shards is summed over them.
    """
    shards, whole = _split(_gradients(parameters))
    return math.hypot(*(_total_norm(gradients) for gradients in (shards, whole) if gradients))


@torch.no_grad()
def scale_(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients by ``factor``, in place. A factor of 1 changes nothing and takes no time."""
    if factor == 1.0:
        return
    for gradients in _split(_gradients(parameters)):
        if gradients:
            torch._foreach_mul_(gradients, factor)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _split(gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Sharded gradients, and those that every rank has whole: an operation does not take both."""
    if not torch.distributed.is_available():
        return [], gradients
    from torch.distributed.tensor import DTensor

    shards: list[Tensor] = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    return shards, [gradient for gradient in gradients if not isinstance(gradient, DTensor)]


def _total_norm(gradients: list[Tensor]) -> float:
    norm = torch.nn.utils.get_total_norm(gradients)
    full = getattr(norm, "full_tensor", None)  # of a DTensor it is a sum that is still to be made
    return float(norm if full is None else full())
