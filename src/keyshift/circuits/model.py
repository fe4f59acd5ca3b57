"""A causal language model opened for measurement: where its attention, norms and embeddings are, found by
watching one forward pass, so that no architecture is named here.

Shapes: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keyshift.circuits.capture import AttentionCall, Observer, Tap, hooked, tap_interface, tap_lens
from keyshift.circuits.found import Found
from keyshift.circuits.norms import Norm, read_norm
from keyshift.errors import UserError

PROBE_TOKENS = 8
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far pattern × values may be from the model's own result vectors, relative to their size."""


@dataclass(frozen=True)
class Layer:
    """One attention layer.

    Attributes:
        attention: the module.
        norm: what normalises its input, None if nothing does.
        post_norm: what normalises its output before it is added to the stream, None as a rule.
        heads, key_heads: query heads H and key/value heads G.
        shape: widths of queries/keys and of values.
    """

    attention: nn.Module
    norm: Norm | None
    post_norm: Norm | None
    heads: int
    key_heads: int
    shape: tuple[int, int]

    def key_head(self, head: int) -> int:
        """The key/value head that query head ``head`` reads through."""
        return head // (self.heads // self.key_heads)


class _Enough(Exception):
    """What was wanted of a forward pass has been seen."""


class CircuitModel:
    """A model in evaluation mode with its parts by name. Weights are never written to.

    ``logit_scale`` is what the model multiplies its unembedding's output with; 1 as a rule, and where it does
    something else to it, such as a soft cap.

    Args:
        model: a transformers causal language model (ours included), or a TransformerLens bridge around a
            native model.
        tokenizer: for text; None where token ids are enough.
        name: for messages and reports.

    Raises:
        UserError: weights that are not finite; attention that cannot be watched (a model without any, one
            whose attention does not go through transformers' interface, fused kernels other than SDPA);
            logits that watching would change, or that depend on later tokens; a tokenizer with more tokens
            than the model; something else than a language model.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, name: str = "model"):
        self.name = name
        self.tokenizer = tokenizer
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        native = hasattr(model, "original_model")
        if not native and not hasattr(model, "get_output_embeddings"):
            raise UserError(
                f"{name} is a {type(model).__name__}, not a causal language model of transformers"
            )
        self.module: nn.Module = model.original_model if native else model  # type: ignore[assignment]
        self.module.eval()
        self.native = native
        self.tap: Tap = tap_lens if native else tap_interface
        self.config: Any = model.cfg if native else model.config.get_text_config()  # type: ignore[union-attr,operator]
        self._check_weights()
        self._find_embeddings()
        self._check_tokenizer()
        found = self._found()
        self.layers = self._layers(found)
        self.no_sum = self._why_no_sum(found)
        self.position_table = self._position_table(found)
        self.final_norm = self._final_norm(found)
        self._check_watching(found)
        self._check_causal()

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def tolerance(self) -> float:
        """How far off, relative to its size, something computed in the model's dtype may be."""
        return TOLERANCE.get(self.dtype, 1e-4)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def vocabulary(self) -> int:
        return self.embed.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embed.weight.shape[1]

    @property
    def context(self) -> int | None:
        """The most tokens that the model takes, where its configuration says so."""
        for field_name in ("max_position_embeddings", "n_positions", "n_ctx"):
            value = getattr(self.config, field_name, None)
            if isinstance(value, int) and value > 0:
                return value
        return None

    @property
    def bos(self) -> int | None:
        """The token that begins a sequence, by the tokenizer or the configuration."""
        for source in (self.tokenizer, self.config):
            value = getattr(source, "bos_token_id", None)
            if isinstance(value, int) and 0 <= value < self.vocabulary:
                return value
        return None

    def check_stream(self) -> None:
        """Raise `UserError` where the stream is no sum of what heads wrote, or cannot be told."""
        if self.no_sum:
            raise UserError(f"{self.name} {self.no_sum}")

    def _why_no_sum(self, found: Found) -> str:
        """Why the stream is no sum of what heads wrote; empty where it is one."""
        post = "normalises the residual stream itself (post-LN), so that it is no sum of what heads wrote"
        if self.layers[0].norm is None and any(layer.norm is not None for layer in self.layers):
            return post
        made = {id(output) for _, _, output in found.outputs}
        for index, layer in enumerate(self.layers):
            hidden = found.hidden(layer.attention)
            if layer.norm is None and index and id(hidden) not in made:
                return "changes the stream on its way into attention, so that what attention reads is unknown"
            written = found.output_of(layer.attention)
            if layer.norm is not None and any(
                given is not None and given.shape == hidden.shape and torch.equal(given, hidden + written)
                for _, given, _ in found.outputs
            ):
                return post
        return ""

    def head_names(self) -> list[str]:
        return [f"{index}.{head}" for index, layer in enumerate(self.layers) for head in range(layer.heads)]

    def head(self, name: str) -> tuple[int, int]:
        """Layer and head of a name such as ``1.6``.

        Raises:
            UserError: not a name, or out of range.
        """
        layer, dot, head = name.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"head={name!r} must look like 1.6: layer 1, head 6, both from 0")
        self.check_head(int(layer), int(head))
        return int(layer), int(head)

    def check_head(self, layer: int, head: int) -> None:
        """Raise `UserError` for a layer or head that the model does not have."""
        if not 0 <= layer < len(self.layers):
            raise UserError(
                f"layer={layer} is out of range: {self.name} has layers 0 to {len(self.layers) - 1}"
            )
        if not 0 <= head < self.layers[layer].heads:
            raise UserError(
                f"head={head} is out of range: layer {layer} of {self.name} has heads 0 to "
                f"{self.layers[layer].heads - 1}"
            )

    @torch.no_grad()
    def logits(
        self, ids_BT: Tensor, mask_BT: Tensor | None = None, observer: Observer | None = None
    ) -> Tensor:
        """The model's logits [B, T, V]; ``observer`` sees, and may change, every attention call.

        Args:
            mask_BT: 0 for padding, which may stand on the left or on the right.

        Raises:
            UserError: more tokens than the model has positions for.
        """
        self.check_tokens(ids_BT)
        self.module.eval()
        with nullcontext() if observer is None else self.tap(self.module, observer):
            output = self.module(ids_BT.to(self.device), **self._inputs(mask_BT))
        return output if isinstance(output, Tensor) else output.logits

    @torch.no_grad()
    def watch(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor | None = None,
        observer: Observer | None = None,
        position_ids: Tensor | None = None,
    ) -> None:
        """Run the model for what observers and hooks see of it, without the cost of logits."""

        def stop(*_: Any) -> None:
            raise _Enough

        inputs = self._inputs(mask_BT)
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        self.check_tokens(ids_BT)
        self.module.eval()
        with (
            hooked([self.head_module.register_forward_pre_hook(stop)]),
            nullcontext() if observer is None else self.tap(self.module, observer),
            suppress(_Enough),
        ):
            self.module(ids_BT.to(self.device), **inputs)

    @torch.no_grad()
    def look(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Found:
        """One forward pass with everything kept that modules returned: for few, short sequences."""
        found = Found()

        def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.inputs[id(module)] = args, kwargs

        def left(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            result = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(result, Tensor):
                found.outputs.append((module, given, result))

        handles = []
        for module in self.module.modules():
            handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
            handles.append(module.register_forward_hook(left, with_kwargs=True))
        with hooked(handles):
            self.logits(ids_BT, mask_BT, lambda call: found.calls.append(call))
        return found

    def attend_again(
        self,
        attention: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        hidden_BTD: Tensor,
        replace: Callable[[AttentionCall], Tensor] | None = None,
    ) -> AttentionCall | Tensor:
        """Call an attention module once more, on other hidden states.

        Args:
            attention: the module or a copy of it.
            given: the arguments of its call in a forward pass: positions, masks.
            replace: result vectors [B, T, H, V] in place of the computed ones; then the module's output is
                returned, [B, T, D]. Without it the call is, as soon as it is made.
        """
        seen: list[AttentionCall] = []

        def observer(call: AttentionCall) -> Tensor | None:
            if replace is not None:
                return replace(call)
            seen.append(call)
            raise _Enough

        args, kwargs = _with_hidden(given, hidden_BTD)
        with torch.no_grad(), self.tap(attention, observer):
            try:
                output = attention(*args, **kwargs)
            except _Enough:
                return seen[0]
        return output[0] if isinstance(output, tuple) else output

    def encode(self, text: str) -> Tensor:
        """Token ids [1, T] of a text, BOS first where the model has one.

        Raises:
            UserError: no tokenizer.
        """
        if self.tokenizer is None:
            raise UserError(f"text needs a tokenizer, and {self.name} has none; pass token ids")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([ids if self.bos is None else [self.bos, *ids]])

    def encode_all(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids [S, T] of several texts, padded on the left, and their mask: 0 for padding, else 1."""
        rows = [self.encode(text)[0] for text in texts]
        longest = max(map(len, rows))
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
        for each, row, real in zip(rows, ids, mask, strict=True):
            row[longest - len(each) :] = each
            real[longest - len(each) :] = 1
        return ids, mask

    def token(self, token_id: int) -> str:
        """How a token reads; its number where there is no tokenizer."""
        return str(token_id) if self.tokenizer is None else self.tokenizer.decode([token_id])

    def _inputs(self, mask_BT: Tensor | None) -> dict[str, Any]:
        inputs: dict[str, Any] = {} if self.native else {"use_cache": False}
        if mask_BT is not None and not bool(mask_BT.all()):
            mask = mask_BT.to(self.device)
            inputs["attention_mask"] = mask.long()
            inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return inputs

    def check_tokens(self, ids_BT: Tensor) -> None:
        """Raise `UserError` for what is no [B, T] of token ids, more tokens than positions, or a token that
        is not in the vocabulary."""
        shape = getattr(ids_BT, "shape", ())
        if len(shape) != 2 or 0 in shape or ids_BT.is_floating_point():
            raise UserError(
                f"token ids must be integers of shape [sequences, tokens], not {type(ids_BT).__name__} of "
                f"shape {tuple(shape)}; encode() makes them from text"
            )
        if self.context is not None and ids_BT.shape[1] > self.context:
            raise UserError(
                f"{ids_BT.shape[1]} tokens are more than {self.name} has positions for "
                f"({self.context}); "
                "use shorter sequences"
            )
        for token in (int(ids_BT.min()), int(ids_BT.max())):
            if not 0 <= token < self.vocabulary:
                raise UserError(
                    f"token {token} is outside the vocabulary of {self.name} ({self.vocabulary} tokens)"
                )

    def _check_weights(self) -> None:
        for name, parameter in self.module.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise UserError(
                    f"weight {name} of {self.name} has NaN or infinite entries: nothing to analyse"
                )

    def _find_embeddings(self) -> None:
        if self.native:
            if not hasattr(self.module, "tok_embed"):
                raise UserError(
                    f"{self.name} is a TransformerLens bridge around {type(self.module).__name__}: pass that "
                    "model itself, before it is wrapped, or a bridge of TransformerLens' own models"
                )
            self.embed, self.head_module = _inside(self.module.tok_embed), _inside(self.module.head)
        else:
            self.embed = self.module.get_input_embeddings()  # type: ignore[operator]
            self.head_module = self.module.get_output_embeddings()  # type: ignore[operator]
        if self.head_module is None:
            raise UserError(f"{self.name} has no output embedding: not a causal language model")

    def _check_tokenizer(self) -> None:
        if self.tokenizer is not None and len(self.tokenizer) > self.vocabulary:
            raise UserError(
                f"the tokenizer of {self.name} has {len(self.tokenizer)} tokens, the model "
                f"{self.vocabulary}: they do not belong together"
            )

    def _found(self) -> Found:
        tokens = min(PROBE_TOKENS, self.context or PROBE_TOKENS)
        self.probe_ids = torch.arange(tokens, device=self.device)[None] % self.vocabulary
        found = self.look(self.probe_ids)
        if not found.calls:
            raise UserError(
                f"{self.name} ({type(self.module).__name__}) has no attention weights that can be watched: "
                "its attention does not go through transformers' interface with 'sdpa' or 'eager'"
            )
        if len({id(call.module) for call in found.calls}) < len(found.calls):
            raise UserError(f"{self.name} calls an attention module twice: its layers cannot be told apart")
        return found

    def _layers(self, found: Found) -> list[Layer]:
        layers = []
        for call in found.calls:
            hidden = found.hidden(call.module)
            if hidden.shape[-1] != self.hidden_size:
                raise UserError(
                    f"{self.name} embeds tokens in {self.hidden_size} numbers and its layers read "
                    f"{hidden.shape[-1]}: models with a projection between the two are not supported"
                )
            written = found.output_of(call.module)
            layers.append(
                Layer(
                    attention=call.module,
                    norm=self._norm(found, makes=hidden),
                    post_norm=self._norm(found, reads=written),
                    heads=call.queries_BHTD.shape[1],
                    key_heads=call.keys_BGTD.shape[1],
                    shape=(call.queries_BHTD.shape[-1], call.values_BGTV.shape[-1]),
                )
            )
        return layers

    def _norm(self, found: Found, *, makes: Tensor | None = None, reads: Tensor | None = None) -> Norm | None:
        """The norm whose output ``makes`` is a view of, or whose input ``reads`` is."""
        for module, given, output in found.outputs:
            fits = given is reads if makes is None else output.data_ptr() == makes.data_ptr()
            norm = read_norm(_inside(module), self.hidden_size, self.device) if fits else None
            if norm is not None:
                return replace(norm, module=module)
        return None

    def _final_norm(self, found: Found) -> Norm | None:
        head_input = found.hidden(self.head_module)
        return self._norm(found, makes=head_input)

    def _position_table(self, found: Found) -> nn.Module | None:
        """The embedding of positions that is added to the stream, if there is one."""
        tables = (m for m, _, output in found.outputs if isinstance(m, nn.Embedding) and m is not self.embed)
        return next((m for m in tables if m.weight.shape[1] == self.hidden_size), None)

    def _logit_scale(self, found: Found, logits: Tensor) -> float:
        read = found.output_of(self.head_module).double()
        scale = float((logits * read).sum() / read.square().sum().clamp(min=1e-300))
        tolerance = self.tolerance
        linear = torch.allclose(logits.double(), scale * read, tolerance, tolerance * float(read.abs().max()))
        return scale if linear and abs(scale - 1) > tolerance else 1.0

    def _check_watching(self, found: Found) -> None:
        """Watching must not change a bit of the logits, and the patterns must be the model's."""
        plain = self.logits(self.probe_ids)
        if not bool(torch.isfinite(plain).all()):
            raise UserError(f"the logits of {self.name} have NaN or infinite entries: nothing to analyse")
        self.logit_scale = self._logit_scale(found, plain)
        worst = 0.0

        def check(call: AttentionCall) -> None:
            nonlocal worst
            values = call.values_BGTV.float()
            values = values.repeat_interleave(call.queries_BHTD.shape[1] // values.shape[1], 1)
            mine = (call.pattern() @ values).transpose(1, 2)
            theirs = call.output_BTHV.float()
            off = (mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-9)
            worst = max(float(off.nan_to_num(torch.inf)), worst)

        if not torch.equal(self.logits(self.probe_ids, observer=check), plain):
            raise UserError(f"watching {self.name} changes its logits: refused")
        if not worst <= self.tolerance:
            raise UserError(
                f"the attention of {self.name} does more than softmax(scores) × values (off by {worst:.1e}): "
                "its patterns cannot be had from queries and keys"
            )

    def _check_causal(self) -> None:
        """Refuse a model whose logits depend on later tokens: an encoder loads as a causal one, too."""
        ids = self.probe_ids.clone()
        before = self.logits(ids)[:, :-1]
        ids[:, -1] = (ids[:, -1] + 1) % self.vocabulary
        changed = float((self.logits(ids)[:, :-1] - before).abs().max()) if before.numel() else 0.0
        if changed > self.tolerance * float(before.abs().max()):
            raise UserError(f"{self.name} reads later tokens: an encoder, not a causal language model")


def _inside(module: Any) -> Any:
    """What a TransformerLens component is wrapped around; any other module itself."""
    return getattr(module, "original_component", None) or module


def _with_hidden(
    given: tuple[tuple[Any, ...], dict[str, Any]], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = given
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
