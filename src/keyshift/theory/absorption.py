"""GVA: the map to keys moves into the query, q (v M)^T = (q M^T) v^T; with RoPE in between it cannot.

GVA paper, eq. 7 and what follows it. Shapes: B batch, T tokens, H heads, D width of a value, N width of a
content key, E hidden size. float64.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from keyshift.attention.module import Attention
from keyshift.attention.rotary import rotate, rotation
from keyshift.attention.value import MappedKeys


@torch.no_grad()
def score_difference(layer: Attention, tokens: int = 32) -> float:
    """Between q · (v M) and (q M^T) · v over all pairs of tokens, relative to the largest score."""
    generator = torch.Generator().manual_seed(1)
    config = layer.config
    queries = torch.randn(
        1, tokens, layer.heads, config.qk_nope_head_dim, dtype=torch.float64, generator=generator
    )
    x = torch.randn(1, tokens, config.hidden_size, dtype=torch.float64, generator=generator)
    keys, values = layer.source.expand(*layer.source.project(x))
    values = values.repeat_interleave(layer.heads // values.shape[2], dim=2)
    rebuilt = torch.einsum("bihn,bjhn->bhij", queries, keys)
    absorbed = torch.einsum("bihd,bjhd->bhij", layer.source.absorb(queries), values)
    return float((rebuilt - absorbed).abs().max() / rebuilt.abs().max())


@torch.no_grad()
def effective_matrices(layer: Attention, distances: int) -> Tensor:
    """What would have to be absorbed under whole-head RoPE: R_{j-t} M_h^T for t - j = 0, 1, …, [δ, H, N, D].

    Read off the layer's own rotation and map by sending unit vectors through both.
    """
    config = layer.config
    width = config.head_dim
    maps_HDN = cast(MappedKeys, layer.source).key_map
    at = [torch.full((width, 1), position) for position in (distances - 1, 0)]
    units = torch.eye(width).double()[:, None, None].expand(-1, 1, layer.heads, -1)
    query_turn = rotation(at[0], width, config.rope_theta, torch.float64)
    queries = rotate(units, query_turn)[:, 0]
    found = []
    for distance in range(distances):
        turn = rotation(at[0] - distance, width, config.rope_theta, torch.float64)
        keys = rotate(maps_HDN.permute(1, 0, 2)[:, None], turn)[:, 0]  # of one unit value per row
        found.append(torch.einsum("nha,dha->hnd", queries, keys))
    return torch.stack(found)


def unabsorbed_share(matrices: Tensor) -> float:
    """The RMS share of the matrices [δ, …] that the best single one, their mean, leaves out: 0 to 1."""
    return float((matrices - matrices.mean(0)).norm() / matrices.norm())
