"""`stream_attention`: what it computes, what it accepts.

Shapes: B batch, H query heads, G stream heads (query head h reads g(h) = h // (H/G)), Q new tokens, T cached
tokens (the new ones included), W shift window, S stream width, V value width, R rotary width.
"""

from __future__ import annotations

from torch import Tensor

from keyshift.ops.stream_attention.reference import stream_attention_reference


def stream_attention(
    queries: Tensor,
    keys_BGTS: Tensor,
    values_BGTV: Tensor | None,
    *,
    first_slot: int,
    scale: float,
    starts_BQ: Tensor | None = None,
    rope_queries_BHQR: Tensor | None = None,
    rope_keys_BTR: Tensor | None = None,
    key_weights_HW: Tensor | None = None,
    value_weights_HW: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of Q new tokens, at slots ``first_slot`` onwards, over a cache that holds raw streams.

    For a query at slot i whose document starts at slot s, over the slots s <= j <= i::

        u_j     = Σ_m a_m q · k_{j-m}                 m = 0 … W-1, terms with j-m < s dropped
        score_j = scale (u_j + q_rope · k_rope_j) - slope (i - j)
        p       = softmax(score)
        out     = Σ_j (Σ_m b_m p_{j+m}) v_j           p is 0 beyond i, nothing lands before s

    which equals attention over keys and values that were shifted before (spec: "Cached decoding: keep the
    cache raw"). Slots after a query's own are never read into its result, so the cache may be longer than
    what is used.

    Args:
        queries: [B, H, Q, S]; or [B, H, W, Q, S], one query per window step with a_m already in it, for keys
            that carry a rotation (the query is rotated m places back instead of the key).
        keys_BGTS: the cached stream, any strides.
        values_BGTV: the value stream; None reads ``keys_BGTS`` as the values too.
        first_slot: the slot of the first query, in tokens from the cache's beginning; first_slot + Q <= T.
        scale: factor of the scores, 1 / sqrt(d_n + d_r).
        starts_BQ: the slot where each query's document starts, integer, at most the query's own; None: all 0.
        rope_queries_BHQR, rope_keys_BTR: the decoupled rotary part, both rotated; both or neither.
        key_weights_HW: a (α); None is (1, 0, …). Not with five-dimensional queries.
        value_weights_HW: b (β); None is (1, 0, …).
        slopes_H: ALiBi's slopes; None is 0.

    Returns:
        [B, H, Q, V] in the dtype of ``queries``; scores and softmax are float32 at least.

    Raises:
        ValueError: a shape that does not fit, naming the argument.
    """
    _check_streams(queries, keys_BGTS, values_BGTV, first_slot)
    batch, heads, new = queries.shape[0], queries.shape[1], queries.shape[-2]
    if (rope_queries_BHQR is None) != (rope_keys_BTR is None):
        raise ValueError("rope_queries_BHQR and rope_keys_BTR come together: pass both or neither")
    if queries.dim() == 5 and key_weights_HW is not None:
        raise ValueError("key_weights_HW must be None with five-dimensional queries: they carry the weights")
    _check_shape("starts_BQ", starts_BQ, (batch, new))
    _check_shape("rope_queries_BHQR", rope_queries_BHQR, (batch, heads, new, None))
    if rope_queries_BHQR is not None:
        _check_shape("rope_keys_BTR", rope_keys_BTR, (batch, keys_BGTS.shape[2], rope_queries_BHQR.shape[-1]))
    _check_shape("key_weights_HW", key_weights_HW, (heads, None))
    _check_shape("value_weights_HW", value_weights_HW, (heads, None))
    _check_shape("slopes_H", slopes_H, (heads,))
    used = first_slot + new
    keys = keys_BGTS[:, :, :used]
    return stream_attention_reference(
        queries,
        keys,
        keys if values_BGTV is None else values_BGTV[:, :, :used],
        first_slot=first_slot,
        scale=scale,
        starts_BQ=starts_BQ,
        rope_queries_BHQR=rope_queries_BHQR,
        rope_keys_BTR=None if rope_keys_BTR is None else rope_keys_BTR[:, :used],
        key_weights_HW=key_weights_HW,
        value_weights_HW=value_weights_HW,
        slopes_H=slopes_H,
    )


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int | None, ...]) -> None:
    """Where there is a tensor, it has this shape; None is any size."""
    if tensor is None:
        return
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} {tuple(tensor.shape)} must be ({wanted})")


def _check_streams(queries: Tensor, keys: Tensor, values: Tensor | None, first_slot: int) -> None:
    if queries.dim() not in (4, 5) or keys.dim() != 4:
        raise ValueError(
            f"queries {tuple(queries.shape)} must have 4 or 5 dimensions and keys {tuple(keys.shape)} 4"
        )
    batch, heads, new, width = queries.shape[0], queries.shape[1], queries.shape[-2], queries.shape[-1]
    if keys.shape[0] != batch or keys.shape[-1] != width:
        raise ValueError(
            f"keys_BGTS {tuple(keys.shape)} does not fit queries {tuple(queries.shape)}: B and S must agree"
        )
    if heads % keys.shape[1]:
        raise ValueError(f"queries have {heads} heads, not a multiple of the {keys.shape[1]} of keys_BGTS")
    if values is not None and values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"values_BGTV {tuple(values.shape)} does not fit keys_BGTS {tuple(keys.shape)} in B, G, T"
        )
    if first_slot + new > keys.shape[2]:
        raise ValueError(
            f"first_slot={first_slot} plus {new} queries is beyond the {keys.shape[2]} cached tokens"
        )
