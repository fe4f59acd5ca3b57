"""`stream_attention`: what it computes, what it accepts, and which backend computes it.

Shapes: B batch, H query heads, G stream heads (query head h reads g(h) = h // (H/G)), Q new tokens, T cached
tokens (the new ones included), W shift window, S stream width, V value width, R rotary width, N scales per
stream head, P pages of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from keyshift.ops.stream_attention.backends import BACKENDS
from keyshift.ops.stream_attention.library import OPERATOR, OPTIONS
from keyshift.ops.stream_attention.quantised import channels
from keyshift.ops.stream_attention.reference import run as run_reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def stream_attention(
    queries: Tensor,
    keys_BGTS: Tensor,
    values_BGTV: Tensor | None,
    *,
    scale: float,
    starts_BQ: Tensor | None = None,
    lengths_B: Tensor | None = None,
    rope_queries_BHQR: Tensor | None = None,
    rope_keys_BTR: Tensor | None = None,
    key_weights_HW: Tensor | None = None,
    value_weights_HW: Tensor | None = None,
    slopes_H: Tensor | None = None,
    key_scales_BGTN: Tensor | None = None,
    value_scales_BGTN: Tensor | None = None,
    block_tables_BP: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of the last Q tokens of every sequence over a cache that holds raw streams.

    For a query at slot i whose document starts at slot s, over the slots s <= j <= i::

        u_j     = Σ_m a_m q · k_{j-m}                 m = 0 … W-1, terms with j-m < s dropped
        score_j = scale (u_j + q_rope · k_rope_j) - slope (i - j)
        p       = softmax(score)
        out     = Σ_j (Σ_m b_m p_{j+m}) v_j           p is 0 beyond i, nothing lands before s

    which equals attention over keys and values that were shifted before (docs/decoding.md). With
    ``values_BGTV=None`` the keys' stream is also the values' and is read once. What lies before the first
    start or at and after a sequence's length is never read.

    Args:
        queries: [B, H, Q, S]; or [B, H, W, Q, S], one query per window step with a_m already in it, for keys
            that carry a rotation (the query is rotated m places back instead of the key).
        keys_BGTS: the cached stream, float32, bfloat16, float16 or float64 like the queries, any strides; or
            quantised, int8 or two numbers per uint8 (last size S/2), with ``key_scales_BGTN``, as
            `keyshift.ops.stream_attention.quantised.quantise` makes them.
        values_BGTV: the value stream, likewise; None reads ``keys_BGTS`` as the values too.
        scale: factor of the scores, 1 / sqrt(d_n + d_r).
        starts_BQ: the slot where each query's document starts, integer, at most the query's own; None: all 0.
        lengths_B: how many slots each sequence uses, integer, its Q new tokens included and last; None: all
            T. Query q of sequence b sits at slot lengths_B[b] - Q + q.
        rope_queries_BHQR, rope_keys_BTR: the decoupled rotary part, both rotated; both or neither.
        key_weights_HW: a (α); None is (1, 0, …). Not with five-dimensional queries.
        value_weights_HW: b (β); None is (1, 0, …).
        slopes_H: ALiBi's slopes; None is 0.
        key_scales_BGTN, value_scales_BGTN: one factor per token, stream head and block of S/N (V/N) channels,
            for a quantised stream; any float dtype.
        block_tables_BP: integer, for streams and scales that are cut into pages: their first axis is then
            the page, of any number, and T the slots of a page. Slot t of sequence b lies in page
            block_tables_BP[b, t // T] at t % T. ``lengths_B`` must be given; entries for slots that are never
            read may be anything, and several sequences may have the same page. None: sequence b has page b.
        backend: "cpu" (the fused kernel), "triton", "reference", or "auto": the fused one that this machine
            and these tensors have, and the reference where there is none (float64, and whenever gradients
            are wanted, which only the reference has). A backend asked for by name is used or refused.

    Returns:
        [B, H, Q, V] in the dtype of ``queries``; scores, softmax and sums are float32 at least, weights may
        be rounded to the streams' dtype before they meet the values.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument; a backend that is
            unknown or cannot do this.
        RuntimeError: a backend that this machine does not have, with the reason (``keyshift doctor`` lists
            them).
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of auto, {', '.join(BACKENDS)}")
    _check_streams(queries, keys_BGTS, values_BGTV, key_scales_BGTN, value_scales_BGTN)
    batch, heads, new = queries.shape[0], queries.shape[1], queries.shape[-2]
    _check_pages(queries, keys_BGTS, lengths_B, block_tables_BP)
    rotary = None if rope_queries_BHQR is None else rope_queries_BHQR.shape[-1]
    if (rope_queries_BHQR is None) != (rope_keys_BTR is None):
        raise ValueError("rope_queries_BHQR and rope_keys_BTR come together: pass both or neither")
    if queries.dim() == 5 and key_weights_HW is not None:
        raise ValueError("key_weights_HW must be None with five-dimensional queries: they carry the weights")
    _check("starts_BQ", starts_BQ, (batch, new), floating=False)
    _check("lengths_B", lengths_B, (batch,), floating=False)
    _check("rope_queries_BHQR", rope_queries_BHQR, (batch, heads, new, None))
    if rope_queries_BHQR is not None and rope_queries_BHQR.dtype != queries.dtype:
        raise ValueError(f"rope_queries_BHQR is {rope_queries_BHQR.dtype} and queries are {queries.dtype}")
    _check("rope_keys_BTR", rope_keys_BTR, (keys_BGTS.shape[0], keys_BGTS.shape[2], rotary))
    _check("key_weights_HW", key_weights_HW, (heads, None))
    _check("value_weights_HW", value_weights_HW, (heads, None))
    _check("slopes_H", slopes_H, (heads,))
    options = {
        "starts_BQ": starts_BQ,
        "lengths_B": lengths_B,
        "rope_queries_BHQR": rope_queries_BHQR,
        "rope_keys_BTR": rope_keys_BTR,
        "key_weights_HW": key_weights_HW,
        "value_weights_HW": value_weights_HW,
        "slopes_H": slopes_H,
        "key_scales_BGTN": key_scales_BGTN,
        "value_scales_BGTN": value_scales_BGTN,
        "block_tables_BP": block_tables_BP,
    }
    tensors = {"queries": queries, "keys_BGTS": keys_BGTS, "values_BGTV": values_BGTV, **options}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if tensor.device != queries.device:
            raise ValueError(f"{name} is on {tensor.device} and queries are on {queries.device}")
    if _wants_gradients(list(given.values())):
        if backend not in ("auto", "reference"):
            raise ValueError(f"backend={backend!r} has no gradients; use 'reference', or torch.no_grad()")
        return run_reference(queries, keys_BGTS, values_BGTV, scale=scale, **options)
    return OPERATOR(queries, keys_BGTS, values_BGTV, *(options[name] for name in OPTIONS), scale, backend)


def _wants_gradients(tensors: list[Tensor]) -> bool:
    """Whether autograd follows these tensors, backwards or forwards."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _check(name: str, tensor: Tensor | None, shape: tuple[int | None, ...], floating: bool = True) -> None:
    """Where there is a tensor, it has this shape (None: any size but 0) and is of floats, or of integers."""
    if tensor is None:
        return
    fits = tensor.dim() == len(shape) and all(
        have == want or (want is None and have > 0) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} {tuple(tensor.shape)} must be ({wanted})")
    if (tensor.dtype not in FLOATS) if floating else (tensor.dtype not in (torch.int32, torch.int64)):
        wanted = ", ".join(str(kind) for kind in FLOATS) if floating else "torch.int64 or torch.int32"
        raise ValueError(f"{name} is {tensor.dtype}; it must be {wanted}")


def _check_streams(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    if queries.dim() not in (4, 5) or keys.dim() != 4:
        raise ValueError(
            f"queries {tuple(queries.shape)} must have 4 or 5 dimensions and keys_BGTS {tuple(keys.shape)} 4"
        )
    if queries.dtype not in FLOATS:
        raise ValueError(
            f"queries are {queries.dtype}; they must be {', '.join(str(kind) for kind in FLOATS)}"
        )
    heads, width = queries.shape[1], queries.shape[-1]
    if channels(keys) != width:
        raise ValueError(
            f"keys_BGTS {tuple(keys.shape)} does not fit queries {tuple(queries.shape)}: S must agree"
        )
    if min(queries.shape) < 1:
        raise ValueError(f"queries {tuple(queries.shape)} are empty; every size must be at least 1")
    if keys.shape[1] == 0 or heads % keys.shape[1]:
        raise ValueError(f"queries have {heads} heads, not a multiple of the {keys.shape[1]} of keys_BGTS")
    if values is not None and (values.shape[:3] != keys.shape[:3] or not channels(values)):
        raise ValueError(
            f"values_BGTV {tuple(values.shape)} does not fit keys_BGTS {tuple(keys.shape)} in B, G, T"
        )
    _check_scales("key_scales_BGTN", key_scales, "keys_BGTS", keys, queries)
    if values is None and value_scales is not None:
        raise ValueError("value_scales_BGTN must be None where values_BGTV is")
    if values is not None:
        _check_scales("value_scales_BGTN", value_scales, "values_BGTV", values, queries)


def _check_pages(queries: Tensor, keys: Tensor, lengths: Tensor | None, tables: Tensor | None) -> None:
    """Every sequence has its slots, in pages or in a row of its own, and they hold its new tokens."""
    batch, new, slots = queries.shape[0], queries.shape[-2], keys.shape[2]
    if tables is None:
        if keys.shape[0] != batch:
            raise ValueError(
                f"keys_BGTS {tuple(keys.shape)} does not fit queries {tuple(queries.shape)}: B must agree"
            )
    else:
        _check("block_tables_BP", tables, (batch, None), floating=False)
        if lengths is None:
            raise ValueError("lengths_B must be given with block_tables_BP")
        if keys.shape[0] == 0 or slots == 0:
            raise ValueError(f"keys_BGTS {tuple(keys.shape)} has no pages, or pages of no slots")
        slots *= tables.shape[1]
    if new > slots:
        pages = "" if tables is None else f" in the P={tables.shape[1]} pages of block_tables_BP"
        raise ValueError(
            f"queries {tuple(queries.shape)}: Q={new} is more than the T={slots} of keys_BGTS{pages}, "
            "which hold the new tokens too"
        )


def _check_scales(name: str, scales: Tensor | None, of: str, stream: Tensor, queries: Tensor) -> None:
    """A quantised stream has scales, and one of floats has the dtype of the queries."""
    if stream.dtype not in (torch.int8, torch.uint8):
        if stream.dtype != queries.dtype:
            raise ValueError(f"{of} is {stream.dtype} and queries are {queries.dtype}; they must be the same")
        if scales is not None:
            raise ValueError(f"{name} must be None: {of} is {stream.dtype}, not quantised")
        return
    if scales is None:
        raise ValueError(f"{of} is {stream.dtype}, quantised: {name} must be given")
    _check(name, scales, (*stream.shape[:3], None))
    if not scales.shape[3] or channels(stream) % scales.shape[3]:
        raise ValueError(
            f"{name} {tuple(scales.shape)}: its last size must divide the {channels(stream)} channels of {of}"
        )
