"""KV shifting: each key and value is mixed with the previous tokens' by learned scalars.

x̂_t = w_0 x_t + w_1 x_{t-1} + … with zero before a sequence's or document's first token (KV shifting paper,
eq. 4-6). Shapes: B batch, T tokens, G heads of the input, H heads of the output, D width of a head, W window.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ROLES = ("key", "value", "query")
"""What can be mixed."""


class Shift(nn.Module):
    """The learned mixing weights of one layer for one of query, key, value: ``heads`` x ``window`` scalars.

    Args:
        heads: how many heads have weights of their own.
        window: W, how many tokens are mixed (2 in the paper).
        kind: ``free``; ``gate`` (softmax with the last logit fixed at 0: a sigmoid for W = 2); ``clip`` (as
            free, and `constrain_` clamps to [0, 1]).
        init: where the weights start, ``shift_init`` of `KeyshiftConfig`.
        role: which of `ROLES` is mixed.
        layer_idx: of the layer, from 0.
    """

    def __init__(
        self, heads: int, window: int, kind: str, init: str = "uniform", role: str = "key", layer_idx: int = 0
    ):
        super().__init__()
        self.window = window
        self.kind = kind
        self.init = init
        self.role = role
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.empty(heads, window - 1 if kind == "gate" else window))

    def initial_weight(self) -> Tensor:
        """A fresh start [heads, W] (for a gate its logits [heads, W - 1]).

        ``uniform`` and ``leaning`` are random, by a generator of their own: it starts from the global one's
        state and leaves that as it was, so that a model with a shift draws all its other weights as the same
        model without one does.
        """
        first = self._initial_first()
        if self.kind == "gate":
            return torch.logit(first, eps=1e-4)
        weight = torch.cat((first, 1 - first.sum(-1, keepdim=True)), dim=-1)
        return weight.clamp(0, 1) if self.kind == "clip" else weight

    def _initial_first(self) -> Tensor:
        """All mixing weights but the last, [heads, W - 1]; the last is 1 minus their sum."""
        heads, steps = self.weight.shape[0], self.window - 1
        if self.init == "uniform":
            return self._draws(heads, steps)
        if self.init == "spread":
            return spread(self.layer_idx * heads, heads, self.role, steps)
        first = torch.zeros(heads, steps)
        first[:, 0] = 1.0
        if self.init == "leaning":
            first[:, :1] -= self._draws(heads, 1) / 2
            first[:, 1:2] = 1 - first[:, :1]
        return first

    def _draws(self, *shape: int) -> Tensor:
        """From U(0, 1), float32 on the CPU, other ones for every layer and role."""
        with torch.random.fork_rng(devices=[]):
            seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(self.layer_idx + 1, len(ROLES), *shape, generator=generator, device="cpu")
        return draws[self.layer_idx, ROLES.index(self.role)]

    def weights(self) -> Tensor:
        """The mixing weights [heads, W]; column m multiplies the token m places back."""
        if self.kind == "gate":
            return nn.functional.pad(self.weight, (0, 1)).softmax(-1)
        return self.weight

    @torch.no_grad()
    def constrain_(self) -> None:
        """For ``clip``: clamp the weights to [0, 1]. Call after each optimiser step; does nothing
        otherwise."""
        if self.kind == "clip":
            self.weight.clamp_(0, 1)

    def forward(self, x_BTGD: Tensor, starts_BT: Tensor | None, first_slot: int = 0) -> Tensor:
        """`shift_sequence` with this module's weights; fewer weights than heads serve equal groups of
        heads."""
        weights = self.weights()
        if weights.shape[0] < x_BTGD.shape[2]:
            weights = weights.repeat_interleave(x_BTGD.shape[2] // weights.shape[0], dim=0)
        return shift_sequence(x_BTGD, weights, starts_BT, first_slot)


def shift_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights of every shift in a model."""
    return [module.weight for module in model.modules() if isinstance(module, Shift)]


def train_only_shifts_(model: nn.Module) -> None:
    """Keep all other weights as they are."""
    model.requires_grad_(False)
    for weight in shift_parameters(model):
        weight.requires_grad_(True)


def spread(first: int, heads: int, role: str, steps: int) -> Tensor:
    """Heads ``first`` … ``first + heads - 1`` of a scrambled Sobol sequence, always the same, [heads, steps].

    The sequence has a dimension for every weight of keys, values and queries, and any stretch of heads fills
    its cube far more evenly than draws do. float32.
    """
    qmc = importlib.import_module("scipy.stats").qmc  # which a checkpoint's copy of this file does without
    points = qmc.Sobol(len(ROLES) * steps, scramble=True, rng=0).random_base2(
        (first + heads - 1).bit_length()
    )
    columns = points[first : first + heads, ROLES.index(role) * steps :][:, :steps]
    return torch.from_numpy(columns).float()


def shift_sequence(
    x_BTGD: Tensor, weights_HW: Tensor, starts_BT: Tensor | None, first_slot: int = 0
) -> Tensor:
    """Mix every token with those before it in its document.

    One multiply and, for each further token of the window, one fused multiply-add over views; the same
    backward.

    Args:
        x_BTGD: queries, keys or values.
        weights_HW: weights per output head, H a multiple of G: head h mixes input head h // (H/G).
        starts_BT: for every token, the slot at which its document starts; None if all start at slot 0.
        first_slot: the slot of ``x_BTGD[:, 0]``.

    Returns:
        [B, T, H, D], the dtype of ``x_BTGD``.
    """
    inside = None
    if starts_BT is not None:
        slots = torch.arange(first_slot, first_slot + x_BTGD.shape[1], device=x_BTGD.device)
        inside = torch.stack([slots - back >= starts_BT for back in range(weights_HW.shape[1])])
    return _Mix.apply(x_BTGD, weights_HW, inside)


class _Mix(torch.autograd.Function):
    """x̂_t = Σ_m w_m x_{t-m}, with a backward of the same few passes.

    ``inside`` [W, B, T] is False where the token m places back is in another document; None where none is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, inside: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights, inside)
        x_BTGRD, weights_WGRD = _by_group(x, weights)
        mixed = x_BTGRD * weights_WGRD[0]
        for back in range(1, min(len(weights_WGRD), x.shape[1])):
            mixed[:, back:].addcmul_(_kept(x_BTGRD[:, :-back], inside, back), weights_WGRD[back])
        return mixed.flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights, inside = ctx.saved_tensors
        x_BTGRD, weights_WGRD = _by_group(x, weights)
        grad = grad.unflatten(2, weights_WGRD.shape[1:3])
        grad_x = grad * weights_WGRD[0]
        grad_weights = torch.zeros_like(weights_WGRD)
        grad_weights[0] = (grad * x_BTGRD).flatten(0, 1).sum(0)
        for back in range(1, min(len(weights_WGRD), x.shape[1])):
            reached = _kept(grad[:, back:], inside, back)
            grad_x[:, :-back].addcmul_(reached, weights_WGRD[back])
            grad_weights[back] = (reached * x_BTGRD[:, :-back]).flatten(0, 1).sum(0)
        grad_x = grad_x[:, :, :, 0] if grad_x.shape[3] == 1 else grad_x.sum(3)
        grad_WH = grad_weights.sum(-1).flatten(1).to(weights.dtype)
        return grad_x, grad_WH.T.clone(memory_format=torch.contiguous_format), None  # DDP wants these strides


def _by_group(x_BTGD: Tensor, weights_HW: Tensor) -> tuple[Tensor, Tensor]:
    """The input [B, T, G, 1, D] and the weights [W, G, H/G, D] that multiply it.

    The weights are written out over D: a factor that is constant along the last dimension keeps PyTorch's
    kernels from vectorising, which costs more than all the rest.
    """
    groups, width = x_BTGD.shape[2:]
    weights_WGR1 = weights_HW.to(x_BTGD.dtype).T.reshape(weights_HW.shape[1], groups, -1, 1)
    return x_BTGD[:, :, :, None], weights_WGR1.expand(-1, -1, -1, width).contiguous()


def _kept(x: Tensor, inside: Tensor | None, back: int) -> Tensor:
    """``x`` [B, T - back, …] of the later or earlier of two tokens, 0 where they share no document."""
    return x if inside is None else x * inside[back, :, back:, None, None, None]
