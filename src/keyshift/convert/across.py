"""GQA into GVA or MLA: what a smaller cache has to hold, found by least squares on calibration text.

Keys turn with RoPE, so no fixed map gives them from a stream that stands still. Of every pair of channels
complex combinations of the groups' keys, those with most energy, can go into the one rotary key that all
heads share. What remains stands still, and the query is turned by what RoPE would do on average over
distances. Content keys and values then get the stream that predicts both best, those of a group one of its
own (GVA), those of all groups a common one (MLA): reduced-rank regression, errors of keys weighed by the
queries that meet them, errors of values by the output projection.

Shapes: E hidden size, G groups, g some of them, H heads, D width of a head, S width of a stream, P = D / 2
pairs of channels. Inputs have a constant behind them, for biases (0 where a model has none): E + 1.
Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from keyshift.attention.latent import LatentKeys
from keyshift.attention.module import Attention, attentions
from keyshift.attention.rope_scaling import scaled
from keyshift.attention.value import MappedKeys
from keyshift.configuration import KeyshiftConfig
from keyshift.modeling import KeyshiftForCausalLM

RIDGE = 1e-9
"""Added to second moments, relative to their mean diagonal: calibration text may not span everything."""


@dataclass
class Moments:
    """Second moments of one layer over calibration tokens, summed.

    Attributes:
        xx: of inputs with a constant behind, [E + 1, E + 1].
        xt: of these with keys and values [E + 1, 2, G, D], keys not rotated.
        qq: of queries, [H, D, D], not rotated.
        tokens: how many.
    """

    xx: Tensor
    xt: Tensor
    qq: Tensor
    tokens: int = 0

    def maps(self) -> Tensor:
        """The best linear maps from inputs to keys and values, [E + 1, 2, G, D]."""
        ridge = RIDGE * self.xx.diagonal().mean() * torch.eye(len(self.xx), dtype=self.xx.dtype)
        return torch.linalg.solve(self.xx + ridge, self.xt.flatten(1)).view_as(self.xt)


@torch.inference_mode()
def collect(
    model: KeyshiftForCausalLM,
    batches: Sequence[Tensor],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Moments]:
    """Moments of every layer over ``batches`` of token numbers [B, T]."""
    config = model.config
    width, groups, heads = config.head_dim, config.num_key_value_heads, config.num_attention_heads
    size = config.hidden_size + 1
    constant = 0.0 if config.projection_bias == "none" else 1.0  # what has no bias is to be fitted without
    found = [
        Moments(
            torch.zeros(size, size, dtype=torch.float64),
            torch.zeros(size, 2, groups, width, dtype=torch.float64),
            torch.zeros(heads, width, width, dtype=torch.float64),
        )
        for _ in model.model.layers
    ]

    def see(layer: Attention, args: tuple[Tensor, ...]) -> None:
        moments, x = found[layer.layer_idx], args[0]
        keys, values = layer.source.expand(*layer.source.project(x))
        queries = layer._raw_queries(x).flatten(0, 1).double()
        inputs = torch.nn.functional.pad(x.flatten(0, 1).double(), (0, 1), value=constant)
        targets = torch.stack((keys, values), 2).flatten(0, 1).double()
        moments.xx += inputs.T @ inputs
        moments.xt += torch.einsum("ne,nkgd->ekgd", inputs, targets)
        moments.qq += torch.einsum("nhd,nhc->hdc", queries, queries)
        moments.tokens += len(inputs)

    hooks = [layer.register_forward_pre_hook(see) for layer in attentions(model)]
    try:
        for done, ids in enumerate(batches, 1):
            model.model(ids, use_cache=False)
            progress("calibration text", done, len(batches))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def average_turns(config: KeyshiftConfig, context: int) -> Tensor:
    """What RoPE multiplies a pair by on average over distances, complex [P].

    Distances are those up to ``context``, each counted by 1 / (distance + 1): attention is mostly near.
    """
    speeds = config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    )
    size = 1.0
    if config.scaled_rope is not None:
        speeds, size = scaled(speeds, config.rope_theta, config.scaled_rope)
    distances = torch.arange(context, dtype=torch.float64)
    weights = 1 / (distances + 1)
    turns = torch.polar(torch.ones(()).double(), distances[:, None] * speeds)
    return (weights[:, None] * turns).sum(0) / weights.sum() * size**2  # of the query and of the key


def as_complex(x: Tensor) -> Tensor:
    """Channels as pairs: i with i + D / 2, as RoPE turns them."""
    real, imaginary = x.chunk(2, -1)
    return torch.complex(real, imaginary)


def as_real(z: Tensor) -> Tensor:
    """The reverse."""
    return torch.cat((z.real, z.imag), -1)


@dataclass(frozen=True)
class Directions:
    """Combinations of the groups' keys, of every pair of one layer as many as groups, most energy first.

    Attributes:
        read: complex [P, G, G]; a rotary key is the sum over groups, the last, of conj(read) times the key.
        give: complex [P, G, G]; what that key stands for in a group: the key there is the sum of give times
            it over the combinations, the middle ones.
        energy: of the scores that go through it, [P, G].
    """

    read: Tensor
    give: Tensor
    energy: Tensor


def directions(moments: Moments, maps: Tensor) -> Directions:
    """See `Directions`; the keys of a group count as much as its queries are large."""
    keys = as_complex(maps[:, 0])  # [E + 1, G, P]
    outer = torch.einsum("egp,ef,fkp->pgk", keys, moments.xx.to(keys.dtype), keys.conj())
    per_group = moments.qq.unflatten(0, (maps.shape[2], -1)).sum(1).diagonal(dim1=1, dim2=2)
    weight = sum(per_group.chunk(2, -1)).sqrt().T.clamp(min=1e-12).to(keys.dtype)  # [P, G]
    energies, vectors = torch.linalg.eigh(weight[:, :, None] * outer * weight[:, None, :])
    ordered = vectors.flip(-1).mT
    return Directions(ordered * weight[:, None], ordered / weight[:, None], energies.flip(-1))


def choose_pairs(layers: Sequence[Directions], turns: Tensor, count: int) -> list[int]:
    """The pairs that lose most without rotation, the same in all layers; one is there once for each of its
    combinations that are taken."""
    lost = sum(layer.energy / layer.energy.sum() for layer in layers) * (1 - turns.abs() ** 2)[:, None]
    return sorted((lost.flatten().topk(count).indices // lost.shape[1]).tolist())


@torch.no_grad()
def fill_(target: Attention, source: Attention, moments: Moments, turns: Tensor) -> None:
    """Weights of a GVA or MLA layer, whose rotary pairs are chosen, from a GQA layer; ``turns``:
    `average_turns`."""
    maps = moments.maps()
    keys, values = _turn_(target, source, moments, turns, maps), maps[:, 1]
    costs = _costs(source, moments, turns)
    target.o_proj.load_state_dict(source.o_proj.state_dict())
    if isinstance(target.source, LatentKeys):
        _fill_latent_(target.source, moments.xx, keys, values, costs)
        return
    assert isinstance(target.source, MappedKeys)
    output = _output(source)
    for group, heads in enumerate(torch.arange(target.heads).chunk(len(costs))):
        here = slice(group, group + 1)
        width = values.shape[-1]
        stream = _stream(moments.xx, keys[:, here], values[:, here], costs[here], width)
        _set(target.source.v_proj, stream.into, slice(group * width, (group + 1) * width))
        target.source.key_map[heads] = stream.keys.to(target.source.key_map.dtype)
        output[:, heads] = output[:, heads] @ stream.values[0].T
    target.o_proj.weight.copy_(output.flatten(1))


def _turn_(target: Attention, source: Attention, moments: Moments, turns: Tensor, maps: Tensor) -> Tensor:
    """Set the queries and the rotary key; the map to what remains of the keys, [E + 1, G, D]."""
    config = target.config
    pairs = list(config.rope_pairs or ())
    numbers = [pairs[:at].count(pair) for at, pair in enumerate(pairs)]
    found = directions(moments, maps)
    read, give = found.read[pairs, numbers], found.give[pairs, numbers]
    keys = as_complex(maps[:, 0])
    rotary = torch.einsum("pg,egp->ep", read.conj(), keys[..., pairs])
    keys = keys.index_add(2, torch.tensor(pairs), -torch.einsum("ep,pg->egp", rotary, give))
    queries = as_complex(_rows(source.q_proj).unflatten(1, (target.heads, -1)))  # [E + 1, H, P]
    give = give.T.repeat_interleave(target.heads // maps.shape[2], 0)
    grown = (config.qk_head_dim / config.head_dim) ** 0.5  # the scores are divided by the wider head's root
    content, turning = queries * turns, queries[..., pairs] * give.conj()
    # Of queries and rotary key only the product counts. Training needs them to be of one size.
    size = (_energy(moments.xx, turning).mean(0) / _energy(moments.xx, rotary)).pow(0.25)
    rotary, turning = rotary * size, turning / size
    _set(target.rope_key, as_real(rotary))
    _set(target.q_proj, torch.cat((as_real(content), as_real(turning)), -1).flatten(1) * grown)
    return as_real(keys)


def _energy(xx: Tensor, maps: Tensor) -> Tensor:
    """Mean squares of complex maps of inputs, [E + 1, ...], never 0."""
    return torch.einsum("e...,ef,f...->...", maps.conj(), xx.to(maps.dtype), maps).real.clamp(min=1e-30)


def _costs(source: Attention, moments: Moments, turns: Tensor) -> list[tuple[Tensor, Tensor]]:
    """How much errors of content keys and of values of every group cost, [D, D] each, positive semidefinite:
    by the queries that meet them, and by what the output projection makes of them."""
    width, groups = source.config.head_dim, source.config.num_key_value_heads
    stands = as_real(turns[None] * as_complex(torch.eye(width, dtype=torch.float64)))
    output = _output(source)
    return [
        (
            torch.einsum("dc,hde,ef->cf", stands, moments.qq[heads], stands) / width,
            torch.einsum("ehd,ehc->dc", output[:, heads], output[:, heads]) * moments.tokens,
        )
        for heads in torch.arange(source.heads).chunk(groups)
    ]


def _output(source: Attention) -> Tensor:
    """The output projection head by head, [E, H, D]."""
    return source.o_proj.weight.double().unflatten(1, (source.heads, -1))


def _fill_latent_(
    target: LatentKeys, xx: Tensor, keys: Tensor, values: Tensor, costs: list[tuple[Tensor, Tensor]]
) -> None:
    """Weights of MLA: one latent for content keys and values of all groups, [E + 1, G, D] each."""
    stream = _stream(xx, keys, values, costs, target.down_proj.out_features)
    _set(target.down_proj, stream.into)
    for up, maps in ((target.key_up, stream.keys), (target.value_up, stream.values)):
        per_head = maps.repeat_interleave(target.heads // len(maps), 0)
        up.weight.copy_(per_head.mT.flatten(0, 1))


class Stream(NamedTuple):
    """A stream of width S: the map from inputs to it, [E + 1, S], and from it to keys and to values,
    [g, S, D]."""

    into: Tensor
    keys: Tensor
    values: Tensor


def _stream(
    xx: Tensor, keys: Tensor, values: Tensor, costs: Sequence[tuple[Tensor, Tensor]], width: int
) -> Stream:
    """The stream of this width that predicts the content keys and values of some groups best.

    Args:
        keys, values: maps from inputs, [E + 1, g, D].
        costs: of errors, see `_costs`.
    """
    wanted = [*keys.unbind(1), *values.unbind(1)]
    roots = [_root(cost) for cost in (*(score for score, _ in costs), *(effect for _, effect in costs))]
    weighed = torch.cat([each @ root for each, (root, _) in zip(wanted, roots, strict=True)], 1)
    energies, vectors = torch.linalg.eigh(weighed.T @ xx @ weighed)
    top, energy = vectors[:, -width:], energies[-width:].clamp(min=RIDGE * energies[-1].clamp(min=1e-30))
    as_values = torch.einsum("egd,ef,fgd->", values, xx, values) / values[0].numel()
    size = (as_values / energy).sqrt()  # every channel becomes as large as values are
    back = (top / size).T.unflatten(1, (len(wanted), -1)).unbind(1)
    maps = torch.stack([each @ inverse for each, (_, inverse) in zip(back, roots, strict=True)])
    return Stream(weighed @ top * size, *maps.chunk(2))


def _root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The root of a positive semidefinite matrix and its inverse."""
    energies, vectors = torch.linalg.eigh(matrix)
    root = energies.clamp(min=RIDGE * energies.max().clamp(min=1e-30)).sqrt()
    return vectors * root @ vectors.T, vectors / root @ vectors.T


def _rows(linear: nn.Linear) -> Tensor:
    """A layer as a map from inputs with a constant behind, [E + 1, out]."""
    weight = linear.weight.double()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.double()
    return torch.cat((weight.T, bias[None]))


def _set(linear: nn.Linear | None, rows: Tensor, at: slice = slice(None)) -> None:
    """The reverse of `_rows`; without a bias the constant is lost."""
    assert linear is not None
    linear.weight[at] = rows[:-1].T.to(linear.weight.dtype)
    if linear.bias is not None:
        linear.bias[at] = rows[-1].to(linear.bias.dtype)
