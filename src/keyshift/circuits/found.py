"""What one forward pass showed, module by module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from keyshift.circuits.capture import AttentionCall

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module was called with."""


@dataclass
class Found:
    """One forward pass.

    Attributes:
        outputs: every module with its first tensor argument and its (first) output, in the order in which
            they were done.
        inputs: by ``id`` of a module, what it was called with.
        calls: the attention calls, in order.
    """

    outputs: list[tuple[nn.Module, Tensor | None, Tensor]] = field(default_factory=list)
    inputs: dict[int, Arguments] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)

    def hidden(self, module: nn.Module) -> Tensor:
        """The hidden states that a module was called with, [B, T, D]."""
        args, kwargs = self.inputs[id(module)]
        return args[0] if args else kwargs["hidden_states"]

    def input_of(self, module: nn.Module) -> Tensor:
        """The first tensor that a module was given."""
        given = next(given for each, given, _ in self.outputs if each is module)
        assert given is not None
        return given

    def output_of(self, module: nn.Module) -> Tensor:
        """What a module returned."""
        return next(output for each, _, output in self.outputs if each is module)
