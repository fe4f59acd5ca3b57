"""Tensor parallelism: which heads a process has, and its share of each of a layer's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.utils import set_weight_attrs

from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError


def share_of(config: KeyshiftConfig, processes: int) -> KeyshiftConfig:
    """The configuration of one process's part of an attention layer: its query heads and their groups.

    Raises:
        UserError: heads or groups that cannot be shared out; a norm over the values of all groups.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % processes or (groups % processes and processes % groups):
        raise UserError(
            f"tensor_parallel_size={processes} cannot share out {heads} heads and {groups} groups; use a "
            "divisor of both"
        )
    if processes > 1 and config.stream_norm and config.attention != "mla":
        raise UserError(
            f"tensor_parallel_size={processes}: stream_norm=True is over the values of all groups, and each "
            "process has some of them; serve it on one, or on many in data parallel"
        )
    fields = config.to_dict() | {
        "num_attention_heads": heads // processes,
        "num_key_value_heads": max(1, groups // processes),
    }
    return KeyshiftConfig(**fields)


def take_shares_(attention: nn.Module, shapes: Mapping[str, torch.Size], rank: int, processes: int) -> None:
    """Let vLLM's loader copy this process's slice of every weight of its part of an attention layer.

    Args:
        shapes: of the whole layer's weights, see `whole_shapes`. The loader refuses others by `UserError`.
    """
    for name, parameter in attention.named_parameters():
        # All processes' outputs are added up, and the bias must be in there once.
        lent = name == "o_proj.bias" and rank > 0
        share = partial(_take_, name=name, shape=shapes[name], lent=lent, rank=rank, processes=processes)
        set_weight_attrs(parameter, {"weight_loader": share})


def whole_shapes(layer: Callable[[], nn.Module]) -> dict[str, torch.Size]:
    """The shapes of a layer's weights, without memory for them."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in layer().named_parameters()}


@torch.no_grad()
def _take_(
    into: nn.Parameter,
    whole: Tensor,
    *,
    name: str,
    shape: torch.Size,
    lent: bool,
    rank: int,
    processes: int,
) -> None:
    """Of the one size that is smaller here than there, the slice that is this process's; fewer slices than
    processes are each held by several."""
    if whole.shape != shape:
        raise UserError(
            f"the checkpoint's {name} is {tuple(whole.shape)} and its config.json asks for {tuple(shape)}; "
            "serve it with the config.json that it was saved with"
        )
    for axis, size in enumerate(into.shape):
        slices = shape[axis] // size
        whole = whole.narrow(axis, rank * slices // processes * size, size)
    into.copy_(torch.zeros_like(whole) if lent else whole)
