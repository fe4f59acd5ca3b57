"""GQA into GVA: what a cache of half the size has to hold, found by least squares on calibration text.

Keys turn with RoPE, so no fixed map gives them from a stream that stands still. Of every pair of channels one
complex combination of the groups' keys, the one with most energy, can go into the one rotary key that all
heads share. What remains stands still, and the query is turned by what RoPE would do on average over
distances. Content keys and values of a group then get the stream that predicts both best: reduced-rank
regression, errors of keys weighed by the queries that meet them, errors of values by the output projection.

Shapes: E hidden size, G groups, H heads, D width of a head and of a group's stream, P = D / 2 pairs of
channels. Inputs have a constant behind them, for biases (0 where a model has none): E + 1. Everything is
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    """The combination of the groups' keys with most energy, of every pair of one layer.

    Attributes:
        read: complex [P, G]; the rotary key is the sum over groups of conj(read) times the key.
        give: complex [P, G]; what that key stands for in a group: the key there is about give times it.
        energy: of the scores that go through it, [P].
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
    top = vectors[..., -1]
    return Directions(top * weight, top / weight, energies[:, -1])


def choose_pairs(layers: Sequence[Directions], turns: Tensor, count: int) -> list[int]:
    """The pairs that lose most without rotation, the same in all layers."""
    lost = sum(layer.energy / layer.energy.sum() for layer in layers) * (1 - turns.abs() ** 2)
    return sorted(lost.topk(count).indices.tolist())


@torch.no_grad()
def fill_(target: Attention, source: Attention, moments: Moments, turns: Tensor) -> None:
    """Weights of a GVA layer, whose rotary pairs are chosen, from a GQA layer; ``turns``: `average_turns`."""
    assert isinstance(target.source, MappedKeys)
    config, maps = target.config, moments.maps()
    pairs = list(config.rope_pairs or ())
    found = directions(moments, maps)
    keys = as_complex(maps[:, 0])
    rotary = torch.einsum("pg,egp->ep", found.read[pairs].conj(), keys[..., pairs])
    keys[..., pairs] -= torch.einsum("ep,pg->egp", rotary, found.give[pairs])
    _set(target.rope_key, as_real(rotary))
    queries = as_complex(_rows(source.q_proj).unflatten(1, (target.heads, -1)))  # [E + 1, H, P]
    give = found.give[pairs].T.repeat_interleave(target.heads // maps.shape[2], 0)
    grown = (config.qk_head_dim / config.head_dim) ** 0.5  # the scores are divided by the wider head's root
    content, turning = queries * turns, queries[..., pairs] * give.conj()
    _set(target.q_proj, torch.cat((as_real(content), as_real(turning)), -1).flatten(1) * grown)
    stands = as_real(turns[None] * as_complex(torch.eye(config.head_dim, dtype=torch.float64)))
    output = source.o_proj.weight.double().unflatten(1, (target.heads, -1))  # [E, H, D]
    group_of = [group.tolist() for group in torch.arange(target.heads).chunk(maps.shape[2])]
    for group, heads in enumerate(group_of):
        score = torch.einsum("dc,hde,ef->cf", stands, moments.qq[heads], stands) / config.head_dim
        effect = torch.einsum("ehd,ehc->dc", output[:, heads], output[:, heads]) * moments.tokens
        into, to_keys, to_values = _stream(
            moments.xx, as_real(keys[:, group]), maps[:, 1, group], score, effect
        )
        rows = slice(group * config.head_dim, (group + 1) * config.head_dim)
        _set(target.source.v_proj, into, rows)
        target.source.key_map[heads] = to_keys.to(target.source.key_map.dtype)
        output[:, heads] = output[:, heads] @ to_values.T
    target.o_proj.weight.copy_(output.flatten(1))
    if source.o_proj.bias is not None:
        target.o_proj.bias.copy_(source.o_proj.bias)


def _stream(
    xx: Tensor, keys: Tensor, values: Tensor, score: Tensor, effect: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream that predicts a group's content keys and values best, as wide as either.

    Args:
        keys, values: maps from inputs, [E + 1, D].
        score, effect: how much errors of keys and of values cost, [D, D], positive semidefinite.

    Returns:
        The map from inputs to the stream [E + 1, D], and from the stream to keys and to values, [D, D].
    """
    width = keys.shape[1]
    roots = [_root(each) for each in (score, effect)]
    weighed = torch.cat((keys @ roots[0][0], values @ roots[1][0]), 1)
    energies, vectors = torch.linalg.eigh(weighed.T @ xx @ weighed)
    top, energy = vectors[:, -width:], energies[-width:].clamp(min=1e-30)
    as_values = (values.T @ xx @ values).diagonal().mean()
    size = (as_values / energy).sqrt()  # every channel becomes as large as values are
    into = weighed @ top * size
    back = (top / size).T
    return into, back[:, :width] @ roots[0][1], back[:, width:] @ roots[1][1]


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
