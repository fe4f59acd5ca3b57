"""The backend of `stream_attention` for GPUs: what it takes, and how its Triton kernels are launched."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyshift.ops.stream_attention.quantised import channels

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
NOT_INTERPRETED = (torch.bfloat16,)
"""Triton's interpreter multiplies the bits of these as integers."""
WAVES = 4
"""Programs per processor that are wanted: enough to fill it, and for the last ones to end together."""
LEAST_BLOCKS = 4
"""That a split has, so that its sums are small beside what it reads."""
MOST_SPLITS = 256
"""A row's splits are added up in one go."""
COMBINED = 32
"""Channels that one program of `combine` adds up."""


def missing() -> str | None:
    """Why there is no Triton, or nothing for it to run on."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install keyshift[triton]"
    if not (torch.cuda.is_available() or _interpreted()):
        return "there is no GPU"
    return None


def detail() -> str:
    """What it runs on."""
    gpu = "interpreted on the CPU" if _interpreted() else f"on {torch.cuda.get_device_name()}"
    return f"triton {importlib.metadata.version('triton')} {gpu}"


def refused(queries: Tensor) -> str | None:
    """It takes half and single precision, on a GPU; under TRITON_INTERPRET=1 on the CPU instead."""
    device, kinds = "cuda", DTYPES
    if _interpreted():
        device, kinds = "cpu", tuple(kind for kind in DTYPES if kind not in NOT_INTERPRETED)
    if queries.dtype in kinds and queries.device.type == device:
        return None
    wanted = ", ".join(str(kind) for kind in kinds)
    return f"takes {device} tensors of {wanted}, not {queries.dtype} on {queries.device}"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Machine:
    """What the sizes of tiles and splits depend on."""

    processors: int
    shared_bytes: int
    """At most, for one program."""
    hip: bool


@dataclass(frozen=True)
class Tile:
    """What one program of `attend` holds at a time."""

    rows: int
    slots: int
    warps: int
    stages: int


@functools.cache
def machine(device: int) -> Machine:
    """The GPU of this index; the interpreter's is so small that small tests cross the borders of blocks."""
    if _interpreted():
        return Machine(processors=16, shared_bytes=0, hip=False)
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device)
    hip = driver.active.get_current_target().backend == "hip"
    return Machine(properties["multiprocessor_count"], properties["max_shared_mem"], hip)


def tile_for(
    gpu: Machine,
    rows: int,
    widths: tuple[int, ...],
    window: int,
    dtype: torch.dtype,
    *,
    quantised: bool,
    paged: bool,
) -> Tile:
    """The largest tile that fits and, in half precision, spills no registers (tests/test_triton.py looks).

    Args:
        gpu: where it runs.
        rows: query heads per stream head times new tokens.
        widths: of what is read, S and R, and V where it is another stream than the keys'.
        window: the longer W; at most half of a block is halo.
        dtype: of the queries.
        quantised: dequantised blocks are another copy, and pass through registers.
        paged: so do the addresses of slots.
    """
    channel_bytes = sum(widths) * dtype.itemsize
    row_tile = 16 if rows <= 16 or quantised else 32
    wide = row_tile * max(widths) * dtype.itemsize > 4096
    if gpu.hip:  # operands of products pass through registers whole, and so does a block in flight
        most, stages, warps = 32, 2, 8 if wide else 4
    else:  # so do operands of float32, which are not for the tensor cores
        most, stages, warps = (
            32 if dtype == torch.float32 or (quantised and paged) else 64,
            3,
            8 if wide or quantised else 4,
        )
    for slots in (64, 32, 16):
        blocks = (stages - 1 + quantised) * slots
        needed = (blocks + row_tile) * channel_bytes + row_tile * slots * 8
        if slots <= most and needed <= gpu.shared_bytes:
            return Tile(row_tile, max(slots, _power(2 * window)), warps, stages)
    return Tile(16, max(16, _power(2 * window)), warps, stages=1)


def splits_for(gpu: Machine, programs: int, blocks: int) -> int:
    """Into how many parts a sequence is split, when one part makes this many programs."""
    return max(1, min(WAVES * gpu.processors // programs, blocks // LEAST_BLOCKS, MOST_SPLITS))


def run(
    queries: Tensor,
    keys_BGTS: Tensor,
    values_BGTV: Tensor | None,
    *,
    scale: float,
    starts_BQ: Tensor | None,
    lengths_B: Tensor | None,
    rope_queries_BHQR: Tensor | None,
    rope_keys_BTR: Tensor | None,
    key_weights_HW: Tensor | None,
    value_weights_HW: Tensor | None,
    slopes_H: Tensor | None,
    key_scales_BGTN: Tensor | None,
    value_scales_BGTN: Tensor | None,
    block_tables_BP: Tensor | None,
) -> Tensor:
    """See `keyshift.ops.stream_attention.api.stream_attention`."""
    from keyshift.ops.stream_attention.triton_kernels import attend, combine

    batch, heads, new, key_width = queries.shape[0], queries.shape[1], *queries.shape[-2:]
    groups, page = keys_BGTS.shape[1:3]
    total = page if block_tables_BP is None else page * block_tables_BP.shape[1]
    value_width = key_width if values_BGTV is None else channels(values_BGTV)
    rope_width = 0 if rope_keys_BTR is None else rope_keys_BTR.shape[-1]
    steps = queries.shape[2] if queries.dim() == 5 else 1
    key_window = steps if key_weights_HW is None else key_weights_HW.shape[-1]
    value_window = 1 if value_weights_HW is None else value_weights_HW.shape[-1]

    gpu = machine(queries.get_device())
    rows = heads // groups * new
    widths = (key_width, rope_width) if values_BGTV is None else (key_width, value_width, rope_width)
    quantised = key_scales_BGTN is not None or value_scales_BGTN is not None
    window, paged = max(key_window, value_window), block_tables_BP is not None
    tile = tile_for(gpu, rows, widths, window, queries.dtype, quantised=quantised, paged=paged)
    programs = -(-rows // tile.rows) * groups
    splits = splits_for(gpu, programs * batch, total // tile.slots)

    maxima = queries.new_empty(batch, heads, new, splits, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    parts = queries.new_empty(batch, heads, new, splits, value_width, dtype=torch.float32)
    out = queries.new_empty(batch, heads, new, value_width)
    with torch.cuda.device_of(queries):
        attend[programs, splits, batch](
            queries.contiguous(),
            _strided(keys_BGTS),
            _strided(key_scales_BGTN),
            _strided(values_BGTV),
            _strided(value_scales_BGTN),
            _contiguous(rope_queries_BHQR),
            _strided(None if rope_keys_BTR is None else rope_keys_BTR[:, None]),
            _contiguous(starts_BQ),
            _contiguous(lengths_B),
            _strided(block_tables_BP),
            _contiguous(key_weights_HW),
            _contiguous(value_weights_HW),
            _contiguous(slopes_H),
            maxima,
            sums,
            parts,
            scale,
            total,
            new,
            HEADS_PER_STREAM=heads // groups,
            KEY_WIDTH=key_width,
            VALUE_WIDTH=value_width,
            ROPE_WIDTH=rope_width,
            KEYS_PER_SCALE=None if key_scales_BGTN is None else key_width // key_scales_BGTN.shape[-1],
            VALUES_PER_SCALE=None
            if value_scales_BGTN is None
            else value_width // value_scales_BGTN.shape[-1],
            PAGE=None if block_tables_BP is None else page,
            KEY_WINDOW=key_window,
            VALUE_WINDOW=value_window,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.slots,
            BLOCK_S=_padded(key_width),
            BLOCK_V=_padded(value_width),
            BLOCK_R=_padded(rope_width),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        combine[batch * heads * new, -(-value_width // COMBINED)](
            maxima, sums, parts, out, splits, WIDTH=value_width, BLOCK_P=_power(splits), BLOCK_V=COMBINED
        )
    return out


def _strided(stream: Tensor | None) -> tuple[Any, ...] | None:
    return None if stream is None else (stream, *stream.stride())


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _power(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


def _padded(width: int) -> int:
    """The size of a matrix that holds so many channels: `tl.dot` takes powers of two, and none below 16."""
    return max(16, _power(width))
