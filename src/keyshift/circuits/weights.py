"""The effective matrices of heads, had by asking the attention module itself: unit vectors in, what arrives
at the attention function out. So biases, grouped heads, fused projections, reconstructed keys (K_h = V M_h,
or from a latent) and rotations are the model's own, and there is no second copy of any architecture's layout
to be wrong.

Row vectors: q = x W_Q, score = q · k, result = p v W_O. Shapes: D hidden size, H query heads, G key/value
heads, N width of queries and keys, M width of values, W shift window, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keyshift.attention.shift import Shift
from keyshift.circuits.capture import AttentionCall, hooked
from keyshift.circuits.model import CircuitModel, Layer
from keyshift.circuits.norms import Norm, inner_norms
from keyshift.errors import UserError


@dataclass(frozen=True)
class LayerWeights:
    """The matrices of one attention layer, float64, biases left out.

    Attributes:
        layer: its number.
        query_HDN, key_GDN: content part of W_Q and W_K. For reconstructed keys W_K is the whole map from the
            stream to the key, so that W_Q W_K^T is W_Q M^T W_V^T (GVA) or W_Q W_UK^T W_DKV^T (MLA).
        value_GDM, output_HMD: W_V and W_O.
        rotary_query_HDR, rotary_key_GDR: the decoupled rotary part, kept apart; None without one.
        query_shift_HW, key_shift_HW, value_shift_HW: γ, α and β of every query head; None without a shift.
        shift_sets: how many sets of shift weights the layer has, for equally many query heads each.
        offset: query minus key position that the matrices hold for; None where position does not enter.
        unscaled: a norm of queries, keys or a latent was replaced by its gain alone.
    """

    layer: int
    query_HDN: Tensor
    key_GDN: Tensor
    value_GDM: Tensor
    output_HMD: Tensor
    rotary_query_HDR: Tensor | None = None
    rotary_key_GDR: Tensor | None = None
    query_shift_HW: Tensor | None = None
    key_shift_HW: Tensor | None = None
    value_shift_HW: Tensor | None = None
    shift_sets: int = 0
    offset: int | None = None
    unscaled: bool = False

    def __repr__(self) -> str:
        shapes = {name: tuple(value.shape) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return f"LayerWeights(layer={self.layer}, offset={self.offset}, {shapes})"

    @property
    def heads(self) -> int:
        return len(self.query_HDN)

    def ov(self, head: int) -> tuple[Tensor, Tensor]:
        """W_OV = W_V W_O of a head as its factors, [D, M] and [M, D]; query head h reads h // (H/G)."""
        group = self._group(head)
        return self.value_GDM[group], self.output_HMD[head]

    def qk(self, head: int) -> tuple[Tensor, Tensor]:
        """W_QK = W_Q W_K^T of a head as its factors, [D, N] each."""
        group = self._group(head)
        return self.query_HDN[head], self.key_GDN[group]

    def alpha(self, head: int, back: int) -> float:
        """The weight of the key ``back`` places before the source: 1 and 0 without a shift."""
        return _shift_weight(self.key_shift_HW, head, back)

    def gamma(self, head: int) -> float:
        """The weight of the present token in the query: 1 without a shift of queries."""
        return _shift_weight(self.query_shift_HW, head, 0)

    def beta(self, head: int, back: int) -> float:
        """The weight of the value ``back`` places before the source: 1 and 0 without a shift."""
        return _shift_weight(self.value_shift_HW, head, back)

    def _group(self, head: int) -> int:
        if not 0 <= head < self.heads:
            raise UserError(f"head={head} is out of range: layer {self.layer} has 0 to {self.heads - 1}")
        return head // (self.heads // len(self.key_GDN))


def _shift_weight(weights_HW: Tensor | None, head: int, back: int) -> float:
    if weights_HW is None:
        return 1.0 if back == 0 else 0.0
    return float(weights_HW[head, back]) if back < weights_HW.shape[1] else 0.0


@torch.no_grad()
def layer_weights(
    model: CircuitModel, layer: int, *, offset: int | None = None, fold_norms: bool = True
) -> LayerWeights:
    """The matrices of a layer.

    Args:
        offset: query minus key position. A rotary model has no weight-only QK without one.
        fold_norms: read the raw stream: multiply in the gain of the norm before (and after) the layer and
            take away the mean where it does, leaving out its scale, which no matrix can have.

    Raises:
        UserError: a layer out of range; a rotary model without ``offset``; attention whose queries, keys or
            values are not linear in its normalised input, or whose output is more than heads' results
            projected (gates); with ``fold_norms`` a stream that is normalised itself.
    """
    model.check_head(layer, 0)
    if fold_norms:
        model.check_stream()
    found = model.layers[layer]
    exact = copy.deepcopy(found.attention).double()
    identity = torch.eye(model.hidden_size, dtype=torch.float64, device=model.device)
    with _linear(exact) as unscaled:
        near = _attended(model, found, exact, identity, position=0)
        far = _attended(model, found, exact, identity, position=1)
        rotary = not torch.allclose(near["query"], far["query"], rtol=1e-6, atol=1e-9)
        if rotary:
            if offset is None and content_width(found) == found.shape[0]:
                raise UserError(
                    f"{model.name} rotates queries and keys (RoPE), so a weight-only QK needs an offset: "
                    "query minus key position, such as offset=49"
                )
            if offset:
                near["query"] = _attended(model, found, exact, identity, position=offset)["query"]
        output = _outputs(model, found, exact)
    offset = offset if rotary and content_width(found) == found.shape[0] else None
    return _assembled(layer, found, near, output, offset, unscaled, fold_norms)


def _attended(
    model: CircuitModel, layer: Layer, attention: nn.Module, rows_XD: Tensor, position: int
) -> dict[str, Tensor]:
    """What each row of the input becomes at one position, heads first, without biases: W_Q, W_K, W_V."""
    given = _arguments_at(model, layer, position)
    zero, check = torch.zeros_like(rows_XD[:1]), torch.linspace(-1, 1, rows_XD.shape[1]).double()[None]
    rows = torch.cat((zero, check.to(rows_XD.device), rows_XD))
    call = model.attend_again(attention, given, rows[:, None])
    assert isinstance(call, AttentionCall)
    parts = {"query": call.queries_BHTD, "key": call.keys_BGTD, "value": call.values_BGTV}
    matrices = {}
    for name, part_XHTN in parts.items():
        part = part_XHTN[:, :, 0].double()
        matrix = (part[2:] - part[:1]).transpose(0, 1)
        expected = check.to(part) @ matrix
        if not torch.allclose(
            (part[1] - part[0])[:, None], expected, rtol=1e-4, atol=1e-4 * float(part.abs().max())
        ):
            raise UserError(f"the {name} of {model.name} is not linear in its input: no matrix stands for it")
        matrices[name] = matrix
    return matrices


def _outputs(model: CircuitModel, layer: Layer, attention: nn.Module) -> Tensor:
    """W_O of every head, [H, M, D]: what the output projection makes of unit result vectors."""
    heads, width = layer.heads, layer.shape[1]
    basis = torch.eye(heads * width, dtype=torch.float64, device=model.device)
    basis = torch.cat((torch.zeros_like(basis[:1]), basis)).view(-1, 1, heads, width)
    hidden = torch.zeros(len(basis), 1, model.hidden_size, dtype=torch.float64, device=model.device)
    given = _arguments_at(model, layer, 0)
    attended, projected = False, False

    def replace(call: AttentionCall) -> Tensor:
        nonlocal attended
        attended = True
        return basis

    def left(*_: Any) -> None:
        nonlocal projected
        projected = projected or attended

    inside = [module for module in attention.modules() if module is not attention]
    with hooked([module.register_forward_hook(left) for module in inside]):
        written = model.attend_again(attention, given, hidden, replace=replace)
    other = model.attend_again(attention, given, hidden + 1, replace=lambda call: basis)
    assert isinstance(written, Tensor)
    assert isinstance(other, Tensor)
    if not projected:
        raise UserError(
            f"the attention module of {model.name} has no output projection of its own: what its heads write "
            "cannot be told"
        )
    if not torch.allclose(written, other, rtol=1e-4, atol=1e-4 * float(written.abs().max())):
        raise UserError(f"{model.name} gates what its heads write by the stream: no matrix stands for W_O")
    return (written[1:, 0] - written[:1, 0]).double().view(heads, width, -1)


def _arguments_at(model: CircuitModel, layer: Layer, position: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer's attention for one token at a position."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    handle = layer.attention.register_forward_pre_hook(entered, with_kwargs=True)
    with hooked([handle]):
        model.watch(ids, position_ids=torch.tensor([[position]], device=model.device))
    return seen[0]


@contextmanager
def _linear(attention: nn.Module) -> Iterator[bool]:
    """Norms inside attention become their gains, shifts the identity (their weights are kept apart).

    Yields whether there was such a norm.
    """
    norms = inner_norms(attention)
    handles = [module.register_forward_hook(_gain_only(norm)) for module, norm in norms.items()]
    for module in attention.modules():
        if isinstance(module, Shift):
            handles.append(module.register_forward_hook(lambda _module, args, _output: args[0]))
    with hooked(handles):
        yield bool(norms)


def _gain_only(norm: Norm) -> Any:
    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0]
        return (x - x.mean(-1, keepdim=True) if norm.centres else x) * norm.gain_D

    return hook


def content_width(layer: Layer) -> int:
    """Columns of a query that are content: all, unless the module keeps a rotary part beside them."""
    return getattr(layer.attention, "content_width", layer.shape[0])


def _assembled(
    number: int,
    layer: Layer,
    parts: dict[str, Tensor],
    output: Tensor,
    offset: int | None,
    unscaled: bool,
    fold_norms: bool,
) -> LayerWeights:
    if fold_norms and layer.norm is not None:
        parts = {name: torch.stack([layer.norm.fold(m) for m in matrix]) for name, matrix in parts.items()}
    if fold_norms and layer.post_norm is not None:
        output = torch.stack([layer.post_norm.fold_output(matrix) for matrix in output])
    width = content_width(layer)
    decoupled = width < layer.shape[0]
    whole = LayerWeights(
        layer=number,
        query_HDN=parts["query"][..., :width],
        key_GDN=parts["key"][..., :width],
        value_GDM=parts["value"],
        output_HMD=output,
        query_shift_HW=_per_head(layer, "query_shift"),
        key_shift_HW=_per_head(layer, "key_shift"),
        value_shift_HW=_per_head(layer, "value_shift"),
        shift_sets=max(_shift_sets(layer, "key_shift"), _shift_sets(layer, "value_shift")),
        offset=offset,
        unscaled=unscaled,
    )
    if not decoupled:
        return whole
    return dataclasses.replace(
        whole, rotary_query_HDR=parts["query"][..., width:], rotary_key_GDR=parts["key"][..., width:]
    )


def _shift_sets(layer: Layer, name: str) -> int:
    shift = getattr(layer.attention, name, None)
    return len(shift.weights()) if isinstance(shift, Shift) else 0


def _per_head(layer: Layer, name: str) -> Tensor | None:
    shift = getattr(layer.attention, name, None)
    if not isinstance(shift, Shift):
        return None
    weights = shift.weights().detach().double()
    return weights.repeat_interleave(layer.heads // len(weights), dim=0)


@torch.no_grad()
def unembedding(model: CircuitModel, fold_norms: bool = True) -> Tensor:
    """W_U as [V, D], float64; with ``fold_norms`` it reads the raw stream, up to the final norm's scale."""
    matrix = model.head_module.weight.double()
    if fold_norms and model.final_norm is not None:
        matrix = model.final_norm.fold(matrix.T).T
    return matrix


@torch.no_grad()
def embedding(model: CircuitModel) -> Tensor:
    """W_E as [V, D], float64."""
    return model.embed.weight.double()
