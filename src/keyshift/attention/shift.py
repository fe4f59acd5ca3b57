"""KV shifting: each key and value is mixed with the previous tokens' by learned scalars.

x̂_t = w_0 x_t + w_1 x_{t-1} + … with zero before a sequence's or document's first token (KV shifting paper,
eq. 4-6). Shapes: B batch, T tokens, G heads of the input, H heads of the output, D width of a head, W window.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Shift(nn.Module):
    """The learned mixing weights of one layer for one of query, key, value: ``heads`` x ``window`` scalars.

    Args:
        heads: how many heads have weights of their own.
        window: W, how many tokens are mixed (2 in the paper).
        kind: ``free``; ``gate`` (softmax with the last logit fixed at 0: a sigmoid for W = 2); ``clip`` (as free,
            and `constrain_` clamps to [0, 1]).
    """

    def __init__(self, heads: int, window: int, kind: str):
        super().__init__()
        self.window = window
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(heads, window - 1 if kind == "gate" else window))

    def initial_weight(self) -> Tensor:
        """A fresh draw: the first W - 1 weights from U(0, 1), the last 1 minus their sum (for a gate: its logits)."""
        heads, window = self.weight.shape[0], self.window
        drawn = torch.rand(heads, window - 1, dtype=torch.float32, device=self.weight.device)
        if self.kind == "gate":
            return torch.logit(drawn, eps=1e-4)
        weight = torch.cat((drawn, 1 - drawn.sum(-1, keepdim=True)), dim=-1)
        return weight.clamp(0, 1) if self.kind == "clip" else weight

    def weights(self) -> Tensor:
        """The mixing weights [heads, W]; column m multiplies the token m places back."""
        if self.kind == "gate":
            return nn.functional.pad(self.weight, (0, 1)).softmax(-1)
        return self.weight

    @torch.no_grad()
    def constrain_(self) -> None:
        """For ``clip``: clamp the weights to [0, 1]. Call after each optimiser step; does nothing otherwise."""
        if self.kind == "clip":
            self.weight.clamp_(0, 1)

    def forward(self, x_BTGD: Tensor, starts_BT: Tensor | None, first_slot: int = 0) -> Tensor:
        """`shift_sequence` with this module's weights; fewer weights than heads serve equal groups of heads."""
        weights = self.weights()
        repeats = max(1, x_BTGD.shape[2] // weights.shape[0])
        return shift_sequence(x_BTGD, weights.repeat_interleave(repeats, dim=0), starts_BT, first_slot)


def shift_sequence(
    x_BTGD: Tensor, weights_HW: Tensor, starts_BT: Tensor | None, first_slot: int = 0
) -> Tensor:
    """Mix every token with those before it in its document.

    One multiply and, for each further token of the window, one fused multiply-add over views.

    Args:
        x_BTGD: queries, keys or values.
        weights_HW: weights per output head, H a multiple of G: head h mixes input head h // (H/G).
        starts_BT: for every token, the slot at which its document starts; None if all start at slot 0.
        first_slot: the slot of ``x_BTGD[:, 0]``.

    Returns:
        [B, T, H, D], the dtype of ``x_BTGD``.
    """
    batch, tokens, groups, width = x_BTGD.shape
    heads, window = weights_HW.shape
    x = x_BTGD[:, :, :, None]
    weights = weights_HW.to(x.dtype).view(groups, heads // groups, 1, window)
    mixed = x * weights[..., 0]
    for back in range(1, min(window, tokens)):
        weight = weights[..., back]
        if starts_BT is not None:
            slots = torch.arange(first_slot, first_slot + tokens, device=x.device)
            inside = (slots - back >= starts_BT)[:, back:].to(x.dtype)
            weight = weight * inside[:, :, None, None, None]
        mixed[:, back:].addcmul_(x[:, :-back], weight)
    return mixed.view(batch, tokens, heads, width)
