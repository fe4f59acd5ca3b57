"""The Triton kernels of `stream_attention`: flash decoding, split over the sequence.

A program of ``attend`` takes one stream head, a tile of its rows (query heads times new tokens) and one part
of the sequence; ``combine`` adds the parts up. The cache is read once: a block of the stream serves all rows,
and scores and outputs alike where the keys' stream is also the values'.

Shifts stay inside a block. It begins with a halo, the last W - 1 slots of the block before, and owns the
scores of its other slots. The unshifted scores that make up an owned score are then in the same block, and so
are the values that its weight goes to: a shift rotates the columns of a small matrix in registers, and
nothing but the running softmax passes from block to block. The price is a second read of W - 1 slots, from
L2. To load each block again one slot back would double the traffic there, and L2 is hardly faster than the
memory.

Shapes: M rows, N slots of a block; S, V and R as in api.py, padded to powers of two (BLOCK_S, …). A cached
stream comes as a tuple of its tensor and strides, and so does a block table; everything else is contiguous;
None is what a call does without.
"""

# Triton reads the annotations of kernels, and has none for tensors.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["total"])
def attend(
    queries,  # [B, H, 1 or KEY_WINDOW, Q, S]
    keys,
    key_scales,
    values,
    value_scales,
    rope_queries,  # [B, H, Q, R]
    rope_keys,
    starts,  # [B, Q]
    lengths,  # [B]
    tables,  # [B, P], the pages of each sequence; None: its own number is that of its only page
    key_weights,  # [H, KEY_WINDOW]; None: the queries have a step for every place of the window
    value_weights,  # [H, VALUE_WINDOW]
    slopes,  # [H]
    maxima,  # [B, H, Q, splits], of the scores, which are in base 2
    sums,  # [B, H, Q, splits], of the weights, which are relative to the maximum
    parts,  # [B, H, Q, splits, V], sums of weighted values
    scale,
    total,
    NEW,
    HEADS_PER_STREAM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    KEYS_PER_SCALE: tl.constexpr,
    VALUES_PER_SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_WINDOW: tl.constexpr,
    VALUE_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Softmax and output of every row over one part of the slots that its tile sees."""
    HALO: tl.constexpr = max(KEY_WINDOW, VALUE_WINDOW) - 1
    OWNED: tl.constexpr = BLOCK_N - HALO
    STEPS: tl.constexpr = KEY_WINDOW if key_weights is None else 1
    dtype: tl.constexpr = queries.dtype.element_ty
    # Neighbours read the same slots: first the tiles of a stream head, then the stream heads (of rope_keys).
    tiles = tl.cdiv(HEADS_PER_STREAM * NEW, BLOCK_M)
    group, split, splits = tl.program_id(0) // tiles, tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    index_M = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M = tl.minimum(
        index_M, HEADS_PER_STREAM * NEW - 1
    )  # those beyond repeat the last, and are not stored
    head_M, new_M = group * HEADS_PER_STREAM + row_M // NEW, row_M % NEW
    sequence_head_M = batch * (tl.num_programs(0) // tiles * HEADS_PER_STREAM) + head_M
    query_M = sequence_head_M * STEPS * NEW + new_M

    length = total if lengths is None else tl.minimum(tl.load(lengths + batch), total).to(tl.int32)
    own_M = length - NEW + new_M
    start_M = tl.zeros_like(own_M)
    if starts is not None:
        start_M = tl.maximum(tl.load(starts + batch * NEW + new_M), 0).to(tl.int32)
    first, end = tl.min(start_M), tl.max(own_M) + 1
    # Every split has whole blocks, so that only the last one, which `until_own_MN` bounds, can be cut short.
    share = tl.cdiv(tl.cdiv(end - first, splits), OWNED) * OWNED
    begin = first + split * share
    stop = tl.minimum(begin + share, end)

    q_MS = _rows(queries, query_M, KEY_WIDTH, BLOCK_S)
    if rope_keys is not None:
        q_rope_MR = _rows(rope_queries, sequence_head_M * NEW + new_M, ROPE_WIDTH, BLOCK_R).to(dtype)
    maximum_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(begin - HALO, stop - HALO, OWNED):
        slot_N = at + tl.arange(0, BLOCK_N)
        read_N = (slot_N >= first) & (slot_N < end)
        since_start_MN = slot_N[None, :] - start_M[:, None]
        until_own_MN = own_M[:, None] - slot_N[None, :]
        page_N, place_N = batch, slot_N
        if tables is not None:
            entries, stride_b, stride_p = tables
            at_N = batch * stride_b + (slot_N // PAGE).to(tl.int64) * stride_p
            page_N = tl.load(entries + at_N, read_N, other=0).to(tl.int64)[:, None]
            place_N = slot_N % PAGE

        k_NS = _block(
            keys, key_scales, page_N, group, place_N, read_N, dtype, KEY_WIDTH, KEYS_PER_SCALE, BLOCK_S
        )
        score_MN = tl.dot(q_MS, k_NS.T, input_precision="ieee")
        if key_weights is not None:
            score_MN = _keys_moved(score_MN, key_weights, head_M, since_start_MN, KEY_WINDOW)
        else:
            for back in tl.static_range(1, KEY_WINDOW):
                back_MS = _rows(queries, query_M + back * NEW, KEY_WIDTH, BLOCK_S)
                moved_MN = _moved(tl.dot(back_MS, k_NS.T, input_precision="ieee"), back)
                score_MN += tl.where(since_start_MN >= back, moved_MN, 0)
        if rope_keys is not None:
            k_rope_NR = _block(rope_keys, None, page_N, 0, place_N, read_N, dtype, ROPE_WIDTH, None, BLOCK_R)
            score_MN = tl.dot(q_rope_MR, k_rope_NR.T, score_MN, input_precision="ieee")
        score_MN *= scale * LOG2_E
        if slopes is not None:
            score_MN -= _weight(slopes, head_M, 0, 1) * LOG2_E * until_own_MN
        visible_MN = (since_start_MN >= 0) & (until_own_MN >= 0)
        score_MN = tl.where(visible_MN & (slot_N >= at + HALO)[None, :], score_MN, float("-inf"))

        before_M, maximum_M = maximum_M, tl.maximum(maximum_M, tl.max(score_MN, 1))
        kept_M = tl.exp2(before_M - _finite(maximum_M))
        p_MN = tl.exp2(score_MN - _finite(maximum_M)[:, None])
        sum_M = sum_M * kept_M + tl.sum(p_MN, 1)
        if value_weights is not None:
            p_MN = _values_moved(p_MN, value_weights, head_M, since_start_MN, VALUE_WINDOW)
        v_NV = k_NS
        if values is not None:
            v_NV = _block(
                values,
                value_scales,
                page_N,
                group,
                place_N,
                read_N,
                dtype,
                VALUE_WIDTH,
                VALUES_PER_SCALE,
                BLOCK_V,
            )
        out_MV = tl.dot(p_MN.to(dtype), v_NV, out_MV * kept_M[:, None], input_precision="ieee")

    part_M = (sequence_head_M * NEW + new_M) * splits + split
    stored_M = index_M == row_M
    channel_V = tl.arange(0, BLOCK_V)
    tl.store(maxima + part_M, maximum_M, stored_M)
    tl.store(sums + part_M, sum_M, stored_M)
    mask_MV = stored_M[:, None] & (channel_V < VALUE_WIDTH)[None, :]
    tl.store(parts + part_M[:, None] * VALUE_WIDTH + channel_V[None, :], out_MV, mask_MV)


@triton.jit
def combine(
    maxima, sums, parts, outputs, splits, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Some channels of one row's output, from its P parts."""
    row = tl.program_id(0).to(tl.int64)
    part_P, channel_V = tl.arange(0, BLOCK_P), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    at_P, exists_P = row * splits + part_P, part_P < splits
    maximum_P = tl.load(maxima + at_P, exists_P, other=float("-inf"))
    factor_P = tl.exp2(maximum_P - _finite(tl.max(maximum_P, 0)))
    sum_P = tl.load(sums + at_P, exists_P, other=0)
    mask_PV = exists_P[:, None] & (channel_V < WIDTH)[None, :]
    part_PV = tl.load(parts + at_P[:, None] * WIDTH + channel_V[None, :], mask_PV, other=0)
    out_V = tl.sum(factor_P[:, None] * part_PV, 0) / tl.sum(factor_P * sum_P, 0)
    tl.store(outputs + row * WIDTH + channel_V, out_V, channel_V < WIDTH)


@triton.jit
def _finite(maximum):
    """What scores are subtracted from: 0 where there is none yet, so that their weights are 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _keys_moved(u_MN, key_weights, head_M, since_start_MN, WINDOW: tl.constexpr):
    """Σ_m a_m u_{j-m}, without what lies before the start."""
    score_MN = u_MN * _weight(key_weights, head_M, 0, WINDOW)
    for back in tl.static_range(1, WINDOW):
        moved_MN = _moved(u_MN, back) * _weight(key_weights, head_M, back, WINDOW)
        score_MN += tl.where(since_start_MN >= back, moved_MN, 0)
    return score_MN


@triton.jit
def _values_moved(p_MN, value_weights, head_M, since_start_MN, WINDOW: tl.constexpr):
    """Σ_m b_m p_{j+m}: how much of every slot's value arrives, nothing from before the start."""
    flow_MN = p_MN * _weight(value_weights, head_M, 0, WINDOW)
    for ahead in tl.static_range(1, WINDOW):
        flow_MN += _moved(p_MN, -ahead) * _weight(value_weights, head_M, ahead, WINDOW)
    return tl.where(since_start_MN >= 0, flow_MN, 0)


@triton.jit
def _moved(x_MN, by: tl.constexpr):
    """The columns moved to the right (left if negative) and round the end, which only halos cross."""
    column_N = (tl.arange(0, x_MN.shape[1]) - by + x_MN.shape[1]) % x_MN.shape[1]
    return tl.gather(x_MN, tl.broadcast_to(column_N[None, :], x_MN.shape), 1)


@triton.jit
def _weight(weights, head_M, place: tl.constexpr, WINDOW: tl.constexpr):
    """[M, 1]: the weight of every row's head at one place of the window."""
    return tl.load(weights + head_M * WINDOW + place).to(tl.float32)[:, None]


@triton.jit
def _rows(data, row_M, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[M, BLOCK]: contiguous rows of WIDTH numbers."""
    channel = tl.arange(0, BLOCK)[None, :]
    return tl.load(data + row_M[:, None] * WIDTH + channel, channel < WIDTH, other=0)


@triton.jit
def _block(
    stream,
    scales,
    page,
    group,
    place_N,
    read_N,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[N, BLOCK]: the numbers of some slots, and 0 for those that are not to be read.

    They are the places ``place_N`` of one page, or each of a page of its own, [N, 1].
    """
    place, channel = place_N.to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = read_N[:, None] & (channel < WIDTH)
    data, stride_p, stride_g, stride_t, stride_s = stream
    data += page * stride_p + group * stride_g + place * stride_t
    if data.dtype.element_ty == tl.uint8:
        # Two numbers a byte: the first half of the channels in the low halves, the second in the high ones.
        byte_NS = tl.load(data + channel % (WIDTH // 2) * stride_s, mask, other=0)
        x_NS = ((byte_NS >> (channel // (WIDTH // 2) * 4).to(tl.uint8)) & 15).to(tl.float32) - 8
    else:
        x_NS = tl.load(data + channel * stride_s, mask, other=0)
    if scales is not None:
        factor, stride_p, stride_g, stride_t, stride_n = scales
        factor += page * stride_p + group * stride_g + place * stride_t
        if PER_SCALE < WIDTH:
            factor += tl.minimum(channel, WIDTH - 1) // PER_SCALE * stride_n
        factor_NS = tl.load(factor, read_N[:, None]).to(tl.float32)
        x_NS = tl.where(mask, (x_NS.to(tl.float32) * factor_NS).to(dtype), 0)
    return x_NS.to(dtype)
