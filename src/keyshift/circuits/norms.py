"""The norms around attention, read by asking the module itself: gains of any convention come out right.

Shapes: D hidden size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LARGE = 1e3
"""Size of the inputs that a norm is asked with: its epsilon does not show."""


@dataclass(frozen=True)
class Norm:
    """y = (x - mean) / scale · gain + bias; without ``centres`` no mean is taken away (RMSNorm).

    gain_D, bias_D: float64.
    """

    module: nn.Module
    gain_D: Tensor
    bias_D: Tensor
    centres: bool

    def fold(self, matrix_DX: Tensor) -> Tensor:
        """A matrix that reads normalised rows, as one that reads the stream: the norm without its scale."""
        folded = self.gain_D[:, None] * matrix_DX
        return folded - folded.mean(0) if self.centres else folded

    def fold_output(self, matrix_XD: Tensor) -> Tensor:
        """A matrix whose output is normalised, as one that writes what comes out, without the scale."""
        return self._unscaled(matrix_XD)

    def linear(self, part: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """What the norm makes of a part of its input, at the scale it had on the whole input.

        Args:
            part: [..., D], a summand of ``before``.
            before, after: the norm's input and output, [..., D].

        Returns:
            [..., D], float64, without the bias: the parts of ``before`` give ``after`` less the bias.
        """
        direction = self._unscaled(before)
        shown = ((after.double() - self.bias_D) * direction).sum(-1, keepdim=True)
        return self._unscaled(part) * shown / direction.square().sum(-1, keepdim=True).clamp(min=1e-300)

    def _unscaled(self, x: Tensor) -> Tensor:
        x = x.double()
        return (x - x.mean(-1, keepdim=True) if self.centres else x) * self.gain_D


@torch.no_grad()
def read_norm(module: nn.Module, width: int, device: torch.device | None = None) -> Norm | None:
    """LayerNorm, RMSNorm or the like as its gain, bias and kind; None if the module is no such norm.

    Args:
        device: where a norm without parameters works.
    """
    parameters = list(module.parameters())
    if (
        len(list(module.children())) > 0
        or len(parameters) > 2
        or any(p.shape != (width,) for p in parameters)
    ):
        return None
    exact = copy.deepcopy(module).double()
    device = parameters[0].device if parameters else device
    x = LARGE * torch.where(torch.arange(width, device=device) % 2 == 0, 1.0, -0.5).double()
    try:
        once, twice, constant, nothing = (
            exact(row).double() for row in (x, 2 * x, torch.full_like(x, LARGE), torch.zeros_like(x))
        )
    except (TypeError, RuntimeError):  # wants something else than a tensor of this width
        return None
    if not torch.allclose(once, twice, rtol=1e-5, atol=1e-6) or torch.equal(once, nothing):
        return None
    centres = torch.allclose(constant, nothing, rtol=1e-4, atol=1e-5)
    moved = x - x.mean() if centres else x
    return Norm(module, (once - nothing) * moved.square().mean().sqrt() / moved, nothing, centres)


def inner_norms(attention: nn.Module) -> dict[nn.Module, Norm]:
    """The norms inside an attention module: of queries, keys or a latent."""
    found = {}
    for module in attention.modules():
        widths = {parameter.shape[-1] for parameter in module.parameters(recurse=False)}
        if module is not attention and len(widths) == 1 and (norm := read_norm(module, widths.pop())):
            found[module] = norm
    return found
