"""Losses and log-likelihoods straight from a model's logits. Shapes: S sequences, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keyshift.opened import Opened

Tick = Callable[[int, int], None]
"""Called with how many sequences are done, and of how many."""


@torch.inference_mode()
def token_losses(opened: Opened, ids_ST: Tensor, batch_size: int, tick: Tick) -> Tensor:
    """Loss in nats, [S, T - 1] float32; entry t is of token t + 1."""
    found = []
    for ids in ids_ST.split(batch_size):
        found.append(_losses(opened, ids))
        tick(sum(map(len, found)), len(ids_ST))
    return torch.cat(found)


@torch.inference_mode()
def log_likelihoods(
    opened: Opened, pairs: Sequence[tuple[list[int], list[int]]], batch_size: int
) -> list[float]:
    """Log-likelihood of every continuation after its context, in nats. Rows are padded on the right, which
    a causal model does not see."""
    found: list[float] = []
    for first in range(0, len(pairs), batch_size):
        batch = pairs[first : first + batch_size]
        rows = [torch.tensor(context + continuation) for context, continuation in batch]
        losses = _losses(opened, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
        for row, (context, continuation) in zip(losses, batch, strict=True):
            start = len(context) - 1
            found.append(-float(row[start : start + len(continuation)].double().sum()))
    return found


def _losses(opened: Opened, ids_ST: Tensor) -> Tensor:
    ids_ST = ids_ST.to(opened.model.device)
    logits = opened.model(ids_ST[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.mT, ids_ST[:, 1:], reduction="none").cpu()
