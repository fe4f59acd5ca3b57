"""The residual stream of a forward pass and the pieces that it is a sum of.

Shapes: B batch, T tokens, D hidden size, H heads, M width of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyshift.circuits.capture import AttentionCall
from keyshift.circuits.found import Found
from keyshift.circuits.model import CircuitModel, Layer
from keyshift.circuits.weights import layer_weights
from keyshift.errors import UserError


@dataclass(frozen=True)
class Streams:
    """What one forward pass computed, layer by layer: for few, short sequences.

    Attributes:
        embedded_BTD, positions_BTD: the token's and the position's part of the first layer's input.
        rest_BTD: what else stands before the first layer with attention (other layers); zero as a rule.
        before: the stream that enters each layer, [B, T, D].
        normed: what its attention reads.
        written: what its attention adds, biases included, after a post-norm if there is one.
        calls: the attention calls.
        arguments: what each attention module was called with.
        factors: what ``written`` was multiplied with on its way to the stream; 1 as a rule.
        last, last_normed: the stream at the end, and what the unembedding reads.
    """

    embedded_BTD: Tensor
    positions_BTD: Tensor
    rest_BTD: Tensor
    before: list[Tensor]
    normed: list[Tensor]
    attended: list[Tensor]
    written: list[Tensor]
    calls: list[AttentionCall]
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]
    factors: list[float]
    last: Tensor
    last_normed: Tensor


def read_streams(model: CircuitModel, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Streams:
    """Run the model once and keep its residual stream."""
    found = model.look(ids_BT, mask_BT)
    before, normed, attended, written, factors = [], [], [], [], []
    for layer in model.layers:
        normed.append(found.hidden(layer.attention))
        before.append(normed[-1] if layer.norm is None else found.input_of(layer.norm.module))
        attended.append(found.output_of(layer.attention))
        written.append(attended[-1] if layer.post_norm is None else found.output_of(layer.post_norm.module))
        factors.append(_factor(found, layer.attention, before[-1], written[-1]))
        if factors[-1] != 1:
            written[-1] = written[-1] * factors[-1]
    last_normed = found.hidden(model.head_module)
    table = model.position_table
    positions = torch.zeros_like(before[0]) if table is None else found.output_of(table).expand_as(before[0])
    embedded = _embedded(found.output_of(model.embed), before[0] - positions)
    return Streams(
        embedded_BTD=embedded,
        positions_BTD=positions,
        rest_BTD=before[0] - positions - embedded,
        before=before,
        normed=normed,
        attended=attended,
        written=written,
        calls=found.calls,
        arguments=[found.inputs[id(layer.attention)] for layer in model.layers],
        factors=factors,
        last=last_normed if model.final_norm is None else found.input_of(model.final_norm.module),
        last_normed=last_normed,
    )


def stream_pieces(model: CircuitModel, streams: Streams, layer: int) -> dict[str, Tensor]:
    """The summands of the stream that enters ``layer``, by name, float64 [B, T, D].

    ``embedding``, ``position``, every earlier head (``0.3``), ``bias`` (of output projections and
    post-norms; ``rounding`` where there is none and the model computes in few bits) and for each earlier
    layer ``mlp 0``: all else that it added. They add up to
    ``streams.before[layer]`` (after the last layer, to ``streams.last``) but for rounding.

    Raises:
        UserError: a stream that is no sum of what heads wrote, or heads whose part of it cannot be told.
    """
    model.check_stream()
    pieces = {"embedding": streams.embedded_BTD.double()}
    if model.position_table is not None:
        pieces["position"] = streams.positions_BTD.double()
    if bool(streams.rest_BTD.any()):
        pieces["layers before"] = streams.rest_BTD.double()
    bias, biased = torch.zeros_like(pieces["embedding"]), False
    for index in range(layer):
        heads = head_writes(model, streams, index)
        for head, wrote in enumerate(heads.unbind(2)):
            pieces[f"{index}.{head}"] = wrote
        bias = bias + streams.written[index].double() - heads.sum(2)
        biased = biased or _writes_bias(model.layers[index])
        after = (*streams.before, streams.last)[index + 1].double()
        rest = after - streams.before[index].double() - streams.written[index].double()
        if float(rest.abs().max()) > 1e-5 * float(after.abs().max()):
            pieces[f"mlp {index}"] = rest
    entering = (*streams.before, streams.last)[layer]
    if biased or float(bias.abs().max()) > 1e-5 * float(entering.abs().max()):
        pieces["bias" if biased else "rounding"] = bias
    return pieces


def head_writes(model: CircuitModel, streams: Streams, layer: int) -> Tensor:
    """What each head of a layer adds to the stream, without biases: float64 [B, T, H, D].

    Raises:
        UserError: an output that is more than the heads' results through W_O, and a bias.
    """
    output_HMD = layer_weights(model, layer, offset=0, fold_norms=False).output_HMD
    results = streams.calls[layer].output_BTHV.double()
    wrote = torch.einsum("bthm,hmd->bthd", results, output_HMD)
    bias = (streams.attended[layer].double() - wrote.sum(2)).flatten(0, 1)
    size = float(streams.attended[layer].abs().max())
    if float((bias - bias.mean(0)).abs().max()) > model.tolerance * size:
        raise UserError(
            f"the attention of {model.name} does more to its heads' results than project them (a norm or a "
            "gate before W_O): what each head writes cannot be told apart"
        )
    norm, factor = model.layers[layer].post_norm, streams.factors[layer]
    if norm is None:
        return wrote * factor
    attended, written = streams.attended[layer][:, :, None], streams.written[layer][:, :, None] / factor
    return norm.linear(wrote, attended.expand_as(wrote), written.expand_as(wrote)) * factor


def _embedded(embeds: Tensor, stream: Tensor) -> Tensor:
    """The embedding as it stands in a stream: at most scaled, and then all of it; else by itself."""
    if embeds.shape != stream.shape:
        return stream
    scale = (stream.double() * embeds.double()).sum() / embeds.double().square().sum().clamp(min=1e-300)
    off = (stream.double() - scale * embeds.double()).norm()
    return stream if float(off) < 0.01 * float(stream.norm()) else embeds


def _factor(found: Found, attention: Any, before: Tensor, written: Tensor) -> float:
    """What the model multiplies attention's output with before it is added (Granite does), seen in the input
    of what reads the sum next; 1 where nothing does, as when attention and MLP are added at once."""
    done = next(i for i, (module, _, _) in enumerate(found.outputs) if module is attention)
    for module, given, _ in found.outputs[done + 1 :]:
        if any(module is call.module for call in found.calls):
            break
        if given is None or given.shape != before.shape:
            continue
        added, wrote = given.double() - before.double(), written.double()
        size = float(wrote.square().sum().clamp(min=1e-300))
        factor = float((added * wrote).sum()) / size
        off = float((added - factor * wrote).norm())
        rounding = torch.finfo(before.dtype).eps * float(before.double().norm())
        if off == 0 or off > 0.05 * float(added.norm()) + rounding:
            continue
        unsure = 3 * rounding / (size * before.numel()) ** 0.5
        return 1.0 if abs(factor - 1) < max(0.01, unsure) else factor
    return 1.0


def _writes_bias(layer: Layer) -> bool:
    """Whether a layer's output projection or post-norm may add a bias."""
    found = (getattr(module, "bias", None) for module in layer.attention.modules())
    biases = [bias for bias in found if isinstance(bias, Tensor)]
    if layer.post_norm is not None:
        biases.append(layer.post_norm.bias_D)
    return any(bool(bias.any()) for bias in biases)
