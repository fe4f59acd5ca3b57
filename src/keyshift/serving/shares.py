"""Tensor parallelism: which heads a process has, and its share of each of a layer's weights."""

from __future__ import annotations

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


def take_shares_(attention: nn.Module, rank: int, processes: int) -> None:
    """Let vLLM's loader copy this process's slice of every weight of its part of an attention layer."""
    for name, parameter in attention.named_parameters():
        # All processes' outputs are added up, and the bias must be in there once.
        lent = name == "o_proj.bias" and rank > 0
        loader = _zero_ if lent else partial(_copy_share_, rank=rank, processes=processes)
        set_weight_attrs(parameter, {"weight_loader": loader})


@torch.no_grad()
def _copy_share_(into: nn.Parameter, whole: Tensor, rank: int, processes: int) -> None:
    """Of the one size that is smaller here than there, the slice that is this process's; fewer slices than
    processes are each held by several."""
    share = whole
    for axis, (size, all_of_it) in enumerate(zip(into.shape, whole.shape, strict=True)):
        if size != all_of_it:
            slices = all_of_it // size
            share = share.narrow(axis, rank * slices // processes * size, size)
    into.copy_(share)


@torch.no_grad()
def _zero_(into: nn.Parameter, whole: Tensor) -> None:
    into.zero_()
