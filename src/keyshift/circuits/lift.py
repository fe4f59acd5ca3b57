"""Where a head's match comes from: its score at the induction target, split by the pieces of the stream.

A score is bilinear in the streams of query and key, once the norms' scales are taken as they were. So it is
a sum of one part per piece of the key's stream (and, where keys are shifted, per token that the key is mixed
of), and likewise of the query's. Lift = a part's share at the target minus its mean share over the sources
allowed.

Shapes: B batch, T tokens, D hidden size, N width of queries and keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from keyshift.attention.shift import Shift, shift_sequence
from keyshift.circuits.capture import AttentionCall, hooked
from keyshift.circuits.marks import KINDS, Marks
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.norms import inner_norms
from keyshift.circuits.repeats import Repeats
from keyshift.circuits.results import LiftResult, Part
from keyshift.circuits.streams import Streams, read_streams, stream_pieces
from keyshift.circuits.weights import content_width
from keyshift.errors import UserError

Side = Literal["key", "query"]


def lift(
    model: CircuitModel,
    sequences: Repeats,
    layer: int,
    head: int,
    side: Side = "key",
    streams: Streams | None = None,
) -> LiftResult:
    """The parts of a head's score at the induction targets of the second and later copies.

    Args:
        sequences: a few; all their activations are in memory.
        side: whose stream is split. The key's parts tell what the head looks for *in* the source; the
            query's, what of the present token asks for it (a head that follows a pointer has its lift there).
        streams: of `read_streams` on the same sequences, if they are at hand.

    Returns:
        The parts, largest lift first. ``residual`` is the largest difference between their sum and the
        model's own score, over all the scores looked at: rounding, or the split is wrong.

    Raises:
        UserError: a layer or head out of range; a stream that is no sum of what heads wrote, or parts that do
            not add up; no induction target inside the layer's window.
    """
    model.check_head(layer, head)
    if side not in get_args(Side):
        raise UserError(f"side={side!r} is not known; valid names: key, query")
    streams = streams or read_streams(model, sequences.ids_ST)
    call = streams.calls[layer]
    marks = Marks(
        sequences.ids_ST, torch.ones_like(sequences.ids_ST, dtype=torch.bool), "paper", sequences.period
    )
    targets = marks.weights(slice(None))[..., KINDS.index("induction")].bool().to(model.device)
    visible = call.visible()
    allowed = visible[:, head if visible.shape[1] > 1 else 0].expand_as(targets)
    targets = targets & allowed
    rows = targets.any(-1)
    if not bool(rows.any()):
        raise UserError(f"layer {layer} of {model.name} sees no induction target: its window is too short")
    own = _scores(call, head, call.queries_BHTD, call.keys_BGTD)
    total = torch.zeros_like(own)
    parts = []
    for name, back, vectors in _parts(model, streams, layer, side):
        queries, keys = (call.queries_BHTD, vectors) if side == "key" else (vectors, call.keys_BGTD)
        scores = _scores(call, head, queries, keys)
        total += scores
        target = _mean_over(scores, targets, rows)
        average = _mean_over(scores, allowed, rows)
        parts.append(Part(name=name, shift=back, target=target, average=average, lift=target - average))
    looked_at = allowed & rows[..., None]
    residual = float((total - own)[looked_at].abs().max())
    if residual > model.tolerance * max(1.0, float(own[looked_at].abs().max())):
        raise UserError(
            f"the parts of the score of head {layer}.{head} of {model.name} miss it by {residual:.2g}: its "
            "stream is more than the pieces that were found"
        )
    return LiftResult(
        head=f"{layer}.{head}",
        side=side,
        parts=sorted(parts, key=lambda part: -part.lift),
        sequences=len(sequences.ids_ST),
        score=_mean_over(own, targets, rows),
        residual=residual,
    )


def _scores(call: AttentionCall, head: int, queries: Tensor, keys: Tensor) -> Tensor:
    """q · k times the scaling for one head, [B, T, T], float64: what a soft cap or a bias gets."""
    group = head // (queries.shape[1] // keys.shape[1])
    return queries[:, head].double() @ keys[:, group].double().mT * call.scaling


def _mean_over(scores_BTT: Tensor, sources_BTT: Tensor, rows_BT: Tensor) -> float:
    """The mean score over the marked sources of each row, then over rows."""
    kept = sources_BTT.double()
    return float(((scores_BTT * kept).sum(-1) / kept.sum(-1).clamp(min=1))[rows_BT].mean())


def _parts(
    model: CircuitModel, streams: Streams, layer: int, side: Side
) -> Iterator[tuple[str, int, Tensor]]:
    """Name, shift and the part of all keys [B, G, T, N] or queries [B, H, T, N] that comes from each
    piece."""
    attention = copy.deepcopy(model.layers[layer].attention).double()
    norm = model.layers[layer].norm
    shift = getattr(attention, "key_shift" if side == "key" else "query_shift", None)
    window = shift.window if isinstance(shift, Shift) else 1
    pieces = stream_pieces(model, streams, layer)
    nothing = torch.zeros_like(pieces["embedding"])
    inputs = {
        name: piece if norm is None else norm.linear(piece, streams.before[layer], streams.normed[layer])
        for name, piece in pieces.items()
    }
    if norm is not None and bool(norm.bias_D.any()):
        inputs["bias"] = inputs.get("bias", nothing) + norm.bias_D
    with _frozen_norms(model, attention, streams, layer):
        for back in range(window):
            with _only_shift(shift, back):
                constant = _vectors(model, attention, streams, layer, nothing, side)
                for name, given in inputs.items():
                    vectors = _vectors(model, attention, streams, layer, given, side) - constant
                    yield from _split_rotary(name, back, vectors, content_width(model.layers[layer]), side)
                if bool(constant.any()):
                    yield f"{side} bias", back, constant


def _split_rotary(
    name: str, back: int, vectors: Tensor, width: int, side: Side
) -> Iterator[tuple[str, int, Tensor]]:
    """The decoupled rotary columns apart from the content; the rotary key is not shifted, so it counts
    once."""
    if width == vectors.shape[-1] or side == "query":
        yield name, back, vectors
        return
    columns = torch.arange(vectors.shape[-1], device=vectors.device)
    yield name, back, vectors * (columns < width)
    if back == 0:
        yield f"{name} (rotary)", 0, vectors * (columns >= width)


def _vectors(
    model: CircuitModel, attention: nn.Module, streams: Streams, layer: int, hidden: Tensor, side: Side
) -> Tensor:
    call = model.attend_again(attention, streams.arguments[layer], hidden)
    assert isinstance(call, AttentionCall)
    return call.keys_BGTD if side == "key" else call.queries_BHTD


@contextmanager
def _only_shift(shift: nn.Module | None, back: int) -> Iterator[None]:
    """Of a shift's sum, only the term of the token ``back`` places before."""
    if not isinstance(shift, Shift):
        yield
        return

    def hook(module: Any, args: tuple[Any, ...], _output: Tensor) -> Tensor:
        x_BTGD, starts = args[0], args[1]
        weights = module.weights().detach()
        only = torch.zeros_like(weights)
        only[:, back] = weights[:, back]
        if len(only) < x_BTGD.shape[2]:
            only = only.repeat_interleave(x_BTGD.shape[2] // len(only), dim=0)
        return shift_sequence(x_BTGD, only, starts)

    with hooked([shift.register_forward_hook(hook)]):
        yield


@contextmanager
def _frozen_norms(model: CircuitModel, attention: nn.Module, streams: Streams, layer: int) -> Iterator[None]:
    """Norms inside attention (of queries, keys, a latent) at the scale that they had on the whole stream."""
    norms = inner_norms(attention)
    scales: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        scales[module] = args[0], output

    with hooked([module.register_forward_hook(record) for module in norms]):
        model.attend_again(attention, streams.arguments[layer], streams.normed[layer].double())

    def frozen(module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> Tensor:
        return norms[module].linear(args[0], *scales[module]) + norms[module].bias_D

    with hooked([module.register_forward_hook(frozen) for module in norms]):
        yield
