"""What a forward pass keeps for the backward pass, counted without memory and without computing.

The model runs on fake tensors, which have shapes but no content, and what autograd saves is added up. A model
of one block and one of two tell what a block takes, so that all sizes are counted in no time.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keyshift.configuration import KeyshiftConfig


class Saved(NamedTuple):
    """Bytes that one process keeps between the forward pass and the backward pass.

    Attributes:
        activations: what grows with the rows of a micro-batch.
        casts: what does not: weights in bfloat16, which autocast makes of float32 ones.
    """

    activations: int
    casts: int


def saved_bytes(
    config: KeyshiftConfig, *, rows: int, sequence_length: int, half: bool, sharded: bool, recompute: bool
) -> Saved:
    """What training keeps of one micro-batch of ``rows``, from the embedding to the loss.

    Args:
        half: products in bfloat16; by autocast, or, if ``sharded`` (FSDP2), of weights gathered so.
        recompute: gradient checkpointing: every block's input is kept, and the whole of one block.
    """
    by_blocks = []
    for blocks in (1, 2):
        model = _FakeModel(config, blocks, half, sharded)
        once, twice = model.saved(rows, sequence_length), model.saved(2 * rows, sequence_length)
        by_blocks.append(Saved(twice - once, 2 * once - twice))
    one, two = by_blocks
    block = Saved(two.activations - one.activations, two.casts - one.casts)
    around = Saved(one.activations - block.activations, one.casts - block.casts)
    layers, kept = config.num_hidden_layers, 0
    if recompute:
        kept = layers * rows * sequence_length * config.hidden_size * (2 if half and sharded else 4)
        layers = 1
    return Saved(around.activations + layers * block.activations + kept, around.casts + layers * block.casts)


def recompute_activations_(model: PreTrainedModel) -> None:
    """Let every block keep its input alone and compute the rest again for the backward pass."""
    # transformers renamed it between the ends of the range that is supported.
    enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()


class _FakeModel:
    """The model with so many blocks, in shapes only."""

    def __init__(self, config: KeyshiftConfig, blocks: int, half: bool, sharded: bool):
        from torch._subclasses.fake_tensor import FakeTensorMode

        from keyshift.modeling import KeyshiftForCausalLM

        changes: dict[str, Any] = {"num_hidden_layers": blocks}
        if config.position == "learned":  # its look-up asks for content; its sum keeps nothing
            changes["position"] = "none"
        with torch.device("meta"):
            model = KeyshiftForCausalLM(KeyshiftConfig.from_dict({**config.to_dict(), **changes}))
        self.mode = FakeTensorMode()
        self.autocast = half and not sharded
        self.model = model.train()
        with self.mode:
            _replace_parameters(model, torch.bfloat16 if half and sharded else torch.float32)

    def saved(self, rows: int, sequence_length: int) -> int:
        own = {_key(parameter) for parameter in self.model.parameters()}
        seen: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _key(tensor) not in own:
                seen[_key(tensor)] = tensor  # held, or its place would be given away
            return tensor

        cast = torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()
        watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with warnings.catch_warnings(), self.mode, watched, cast:
            warnings.filterwarnings("ignore", "Mismatch dtype")  # a slower norm: nothing is computed here
            ids = torch.zeros(rows, sequence_length, dtype=torch.long)
            self.model(input_ids=ids, labels=ids, use_cache=False)
        return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def _key(tensor: Tensor) -> int:
    """The same for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def _replace_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """New parameters of the same shapes, in the mode that is on; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
            setattr(module, name, made[id(parameter)])
