"""Attention calls of a model, seen and changed where they happen: its own code runs, nothing is
re-implemented.

Shapes: B batch, T tokens, H query heads, G key/value heads, D width of queries and keys, V width of values.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from keyshift.errors import UserError

BLOCK_BYTES = 24 << 20
"""The most memory that one block of a pattern takes: patterns are read by blocks of rows."""


@dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention was given and what came out, as the model computed it.

    Attributes:
        module: the attention module.
        queries_BHTD, keys_BGTD, values_BGTV: what is attended with, after shift and rotation.
        output_BTHV: the result vector of every head: the input of the output projection.
        scaling: what scores are multiplied with.
        mask: None (causal), boolean (True: visible) or additive, broadcastable to [B, H, T, T].
        softcap: scores are s · tanh(score / s), where the model does that.
        sinks_H: a score that takes part in the softmax and is read from nowhere, where there is one.
        bias: added to the scores, broadcastable to [B, H, T, T].
        causal: whether ``mask=None`` means causal.
    """

    module: nn.Module
    queries_BHTD: Tensor
    keys_BGTD: Tensor
    values_BGTV: Tensor
    output_BTHV: Tensor
    scaling: float
    mask: Tensor | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = True

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The pattern by blocks of rows: the rows, and their weights [B, H, rows, T] (float32 at least)."""
        batch, heads, tokens, _ = self.queries_BHTD.shape
        size = max(1, BLOCK_BYTES // (4 * batch * heads * tokens))
        for first in range(0, tokens, size):
            rows = slice(first, min(first + size, tokens))
            yield rows, self.pattern(rows)

    def pattern(self, rows: slice = slice(None)) -> Tensor:
        """Attention weights of these rows, [B, H, rows, T], float32 at least."""
        scores = self.scores(rows).masked_fill(~self.visible(rows), -torch.inf)
        if self.sinks_H is not None:
            sinks = self.sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return weights.nan_to_num_(0.0)  # a padding row sees nothing

    def scores(self, rows: slice = slice(None)) -> Tensor:
        """Scores before the softmax [B, H, rows, T], those that are hidden by the mask included."""
        kept = torch.promote_types(self.queries_BHTD.dtype, torch.float32)
        queries = self.queries_BHTD[:, :, rows].to(kept)
        batch, heads, count, width = queries.shape
        groups = self.keys_BGTD.shape[1]
        by_group = queries.reshape(batch, groups, heads // groups * count, width)
        scores = (by_group @ self.keys_BGTD.to(kept).mT).view(batch, heads, count, -1) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        for added in (self.bias, self.mask):
            if added is not None and added.dtype != torch.bool:
                scores = scores + _rows(added, rows).to(kept).clamp(min=-1e9)
        return scores

    def visible(self, rows: slice = slice(None)) -> Tensor:
        """Which sources each row may look at: boolean, broadcastable to [B, H, rows, T]."""
        tokens, device = self.keys_BGTD.shape[2], self.keys_BGTD.device
        if self.mask is None:
            slots = torch.arange(tokens, device=device)
            hidden = slots[rows, None] < slots if self.causal else slots[rows, None] < 0
            return ~hidden[None, None]
        mask = _rows(self.mask, rows)
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _rows(mask: Tensor, rows: slice) -> Tensor:
    return mask[..., rows, :] if mask.shape[-2] > 1 else mask


Observer = Callable[[AttentionCall], Tensor | None]
"""Sees an attention call; what it returns, if anything, replaces the output [B, T, H, V]."""


_REGISTRY = threading.RLock()
"""transformers' table of attention functions is one for the process: one thread changes it at a time."""

Tap = Callable[[nn.Module, Observer], AbstractContextManager[None]]
"""How the attention of a kind of model is reached: within the context, every attention call inside the module
is shown to the observer."""


@contextmanager
def tap_interface(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Through transformers' attention interface: the function that the model picked is called as ever, and
    what went in and came out is shown."""
    with _REGISTRY:
        yield from _tap_interface(model, observer)


def _tap_interface(model: nn.Module, observer: Observer) -> Iterator[None]:
    modules = {id(module) for module in model.modules()}
    names = {_implementation(module) for module in model.modules()} - {None}
    taps = {name: _tapped(name, modules, observer) for name in ("sdpa", "eager") if name in names}
    before = {name: ALL_ATTENTION_FUNCTIONS._local_mapping.get(name) for name in taps}
    for name, tap in taps.items():
        ALL_ATTENTION_FUNCTIONS[name] = tap
    try:
        yield
    finally:
        for name, function in before.items():
            del ALL_ATTENTION_FUNCTIONS[name]
            if function is not None:
                ALL_ATTENTION_FUNCTIONS[name] = function


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _tapped(name: str, modules: set[int], observer: Observer) -> Callable[..., Any]:
    fused = ALL_ATTENTION_FUNCTIONS.get(name)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        function = fused or _eager_of(module)
        result = function(module, query, key, value, mask, **kwargs)
        if id(module) not in modules:
            return result
        call = AttentionCall(
            module=module,
            queries_BHTD=query,
            keys_BGTD=key,
            values_BGTV=value,
            output_BTHV=result[0],
            scaling=query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"],
            mask=mask if mask is None else mask[..., : key.shape[2]],
            softcap=kwargs.get("softcap"),
            sinks_H=kwargs.get("s_aux"),
            bias=kwargs.get("position_bias"),
            causal=_is_causal(module, kwargs),
        )
        replaced = observer(call)
        return result if replaced is None else (replaced.to(result[0].dtype), *result[1:])

    return attend


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention beside the code that runs, as transformers lays models out; a subclass may stand in
    another file than the `forward` that it inherits."""
    for kind in type(module).__mro__:
        forward = inspect.unwrap(vars(kind).get("forward") or object)
        function = getattr(forward, "__globals__", {}).get("eager_attention_forward")
        if function is not None:
            return function
    raise UserError(
        f"{type(module).__name__} has no eager attention that can be watched; "
        "load the model with attn_implementation='sdpa'"
    )


@contextmanager
def tap_lens(model: nn.Module, observer: Observer) -> Iterator[None]:
    """At the projections of TransformerLens' own attention, which calls no interface."""
    from transformer_lens.model_bridge.sources.native.model import NativeAttention

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, NativeAttention):
                stack.enter_context(_watched(module, observer))
        yield


@contextmanager
def _watched(module: Any, observer: Observer) -> Iterator[None]:
    seen: dict[str, Any] = {}

    def entered(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["mask"], seen["positions"] = kwargs.get("attention_mask"), kwargs.get("position_ids")

    def projected(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: seen.__setitem__(name, output)

    def leaving(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        replaced = observer(_native_call(module, seen, args[0]))
        return None if replaced is None else (replaced.flatten(2).to(args[0].dtype),)

    handles = [module.register_forward_pre_hook(entered, with_kwargs=True)]
    handles += [getattr(module, name).register_forward_hook(projected(name)) for name in "qkv"]
    handles.append(module.o.register_forward_pre_hook(leaving))
    with hooked(handles):
        yield


def _native_call(module: Any, seen: dict[str, Any], output: Tensor) -> AttentionCall:
    queries, keys, values = (seen[name].unflatten(-1, (-1, module.d_head)).transpose(1, 2) for name in "qkv")
    if module.rotary is not None:
        queries, keys = module.rotary.apply_rope(queries, keys, position_ids=seen["positions"])
    mask = seen["mask"]
    if mask is not None:
        tokens = queries.shape[2]
        hidden = torch.zeros(tokens, tokens, dtype=torch.bool, device=queries.device)
        if module.causal:
            hidden = (~hidden).triu(1)
        mask = ~module._combine_attention_mask(hidden, mask, batch=queries.shape[0])
    return AttentionCall(
        module=module,
        queries_BHTD=queries,
        keys_BGTD=keys,
        values_BGTV=values,
        output_BTHV=output.unflatten(-1, (module.n_heads, -1)),
        scaling=1 / module.scale,
        mask=mask if mask is None or mask.dim() == 4 else mask[:, None],
        softcap=module.attn_scores_soft_cap if module.attn_scores_soft_cap > 0 else None,
        causal=module.causal,
    )


def observe_each(modules: Sequence[nn.Module], observers: dict[int, Observer]) -> Observer:
    """One observer out of one per layer: ``observers[layer]`` sees the calls of ``modules[layer]``."""
    layer_of = {id(module): layer for layer, module in enumerate(modules)}

    def observer(call: AttentionCall) -> Tensor | None:
        chosen = observers.get(layer_of.get(id(call.module), -1))
        return None if chosen is None else chosen(call)

    return observer


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Remove these hooks at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
