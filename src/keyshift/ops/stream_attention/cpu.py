"""The fused kernel for CPUs: loading the compiled library, and a call of it.

The library is plain C++ behind a C interface (``cpu_kernel/``), built when the package is installed and a
compiler is there. It knows neither Python nor PyTorch, so it serves every version of both.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from keyshift.ops.stream_attention.pages import check_lengths, no_page
from keyshift.ops.stream_attention.quantised import channels

FOLDER = Path(__file__).with_name("cpu_kernel")
LIBRARY = FOLDER / "stream_attention.so"
AGAIN = "pip install --force-reinstall --no-cache-dir"
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
PADDING = 32
SPLIT_TOKENS = 256
"""A split of the sequence is no shorter than this."""
MOST_TASKS = 32
"""Enough to keep many cores busy to the end; each leaves an output per head, to be added up."""
QUERY_NUMBERS = 1 << 16
"""Numbers of the outputs that a task works on at a time, so that they stay in the second-level cache."""


class _Scales(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "blocks", "stride_p", "stride_g", "stride_t")),
    ]


class _Stream(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "width", "stride_p", "stride_g", "stride_t")),
        ("scales", _Scales),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "queries", "steps")),
        ("tables", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("wide", "table_stride", "pages", "page")),
        ("scale", ctypes.c_double),
        ("query", ctypes.c_void_p),
        ("rope_query", ctypes.c_void_p),
        ("query_kind", ctypes.c_int64),
        ("keys", _Stream),
        ("values", _Stream),
        ("rope_keys", _Stream),
        ("key_window", ctypes.c_int64),
        ("value_window", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("key_weights", "value_weights", "slopes", "starts", "lengths", "out")
        ),
        ("query_block", ctypes.c_int64),
        ("splits", ctypes.POINTER(ctypes.c_int64)),
        ("partials", ctypes.c_void_p),
    ]


@functools.cache
def missing() -> str | None:
    """Why the kernel is not there."""
    if not LIBRARY.exists():
        return f"not compiled; install g++ or clang++, then keyshift again ({AGAIN})"
    try:
        compiled_from = _library().keyshift_digest().decode()
    except (OSError, AttributeError) as error:
        return f"cannot be loaded, install keyshift again ({AGAIN}): {error}"
    sources = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]*")))
    if compiled_from != hashlib.sha256(sources).hexdigest():
        return f"compiled from other sources than those here; install keyshift again ({AGAIN})"
    return None


def detail() -> str:
    """What there is, for people."""
    first, *others = kernels()
    also = f" (also {', '.join(others)})" if others else ""
    threads = torch.get_num_threads()
    return f"{first}{also}, {threads} thread{'s' * (threads > 1)}"


def refused(queries: Tensor) -> str | None:
    """Why it does not take such tensors."""
    if queries.device.type != "cpu" or queries.dtype not in KINDS:
        return f"takes float32, bfloat16 or float16 on the CPU, not {queries.dtype} on {queries.device}"
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.keyshift_digest.restype = ctypes.c_char_p
    library.keyshift_kernel_name.restype = ctypes.c_char_p
    library.keyshift_kernel_supported.restype = ctypes.c_bool
    library.keyshift_stream_attention.restype = ctypes.c_int64
    library.keyshift_stream_attention.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


@functools.cache
def kernels() -> dict[str, int]:
    """The instruction sets that the library was compiled for and this machine has, the widest first."""
    library, found = _library(), {}
    index = 0
    while (name := library.keyshift_kernel_name(index)) is not None:
        if library.keyshift_kernel_supported(index):
            found[name.decode()] = index
        index += 1
    return found


@functools.cache
def _parallel() -> int | None:
    """The address of the ``GOMP_parallel`` that PyTorch's own operators use; None where it has none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except AttributeError:
        return None


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
    kernel: str | None = None,
) -> Tensor:
    """See `keyshift.ops.stream_attention.api.stream_attention`.

    Args:
        kernel: one of `kernels`; None takes the first.

    Raises:
        ValueError: a length that is not between Q and T, or a page that is wanted and does not exist.
    """
    batch, heads, new = queries.shape[0], queries.shape[1], queries.shape[-2]
    pages, groups, page = keys_BGTS.shape[:3]
    lengths = [page] * batch if lengths_B is None else lengths_B.tolist()
    check_lengths(lengths, new, page, block_tables_BP)
    rope_keys = None if rope_keys_BTR is None else _known(rope_keys_BTR[:, None])
    arguments = _Arguments()
    keys = arguments.stream(keys_BGTS, key_scales_BGTN)
    values = arguments.stream(values_BGTV, value_scales_BGTN)
    width = keys.width if values_BGTV is None else values.width
    padded = -(-width // PADDING) * PADDING
    query_block = max(1, min(new, QUERY_NUMBERS // (heads * padded)))
    blocks = -(-new // query_block)
    splits = splits_of(lengths, blocks)
    out = queries.new_empty(batch, heads, new, width)
    call = _Call(
        batch=batch,
        heads=heads,
        groups=groups,
        queries=new,
        steps=queries.shape[2] if queries.dim() == 5 else 1,
        **arguments.tables(block_tables_BP),
        pages=pages,
        page=page,
        scale=scale,
        query=arguments.whole(queries),
        rope_query=arguments.whole(rope_queries_BHQR),
        query_kind=KINDS[queries.dtype],
        keys=keys,
        values=values,
        rope_keys=arguments.stream(rope_keys, None),
        key_window=1 if key_weights_HW is None else key_weights_HW.shape[1],
        value_window=1 if value_weights_HW is None else value_weights_HW.shape[1],
        key_weights=arguments.whole(key_weights_HW, torch.float32),
        value_weights=arguments.whole(value_weights_HW, torch.float32),
        slopes=arguments.whole(slopes_H, torch.float32),
        starts=arguments.whole(starts_BQ, torch.int64),
        lengths=arguments.whole(lengths_B, torch.int64),
        out=arguments.whole(out),
        query_block=query_block,
        splits=(ctypes.c_int64 * (batch + 1))(*splits),
        partials=arguments.whole(
            torch.empty(splits[-1] * blocks * heads * query_block * (padded + 2), dtype=torch.float32)
        ),
    )
    index = next(iter(kernels().values())) if kernel is None else kernels()[kernel]
    lacking = _library().keyshift_stream_attention(
        ctypes.byref(call), index, torch.get_num_threads(), _parallel()
    )
    if lacking >= 0:
        raise no_page(lacking, pages)
    return out


def splits_of(lengths: list[int], blocks: int) -> list[int]:
    """Into how many parts the sequences are split, added up: 0, those of the first, of the first two, …

    Tasks are about as long as each other, however unequal the lengths are.

    Args:
        lengths: of the sequences.
        blocks: of queries, each of which takes all parts.
    """
    share = max(SPLIT_TOKENS, -(-sum(lengths) * blocks // MOST_TASKS))
    return [0, *accumulate(max(1, length // share) for length in lengths)]


def _known(tensor: Tensor) -> Tensor:
    """In a dtype that the kernel reads."""
    return tensor if tensor.dtype in KINDS else tensor.float()


class _Arguments:
    """Tensors as the kernel wants them, kept until it has run."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def whole(self, tensor: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
        """The address of a tensor made contiguous, in this dtype; None where there is none."""
        if tensor is None:
            return None
        self.kept.append(tensor.to(dtype or tensor.dtype).contiguous())
        return self.kept[-1].data_ptr()

    def tables(self, tables: Tensor | None) -> dict[str, int]:
        """The fields of a block table, of which rows are used in place."""
        if tables is None:
            return {}
        tables = self._side_by_side(tables)
        wide = int(tables.dtype == torch.int64)
        return {"tables": tables.data_ptr(), "wide": wide, "table_stride": tables.stride(0)}

    def stream(self, stream: Tensor | None, scales: Tensor | None) -> _Stream:
        """A stream in place, wherever its channels lie side by side."""
        if stream is None:
            return _Stream()
        stream = self._side_by_side(stream)
        described = _Scales()
        if scales is not None:
            scales = self._side_by_side(_known(scales))
            described = _Scales(scales.data_ptr(), KINDS[scales.dtype], scales.shape[3], *scales.stride()[:3])
        return _Stream(
            stream.data_ptr(), KINDS[stream.dtype], channels(stream), *stream.stride()[:3], described
        )

    def _side_by_side(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
        return self.kept[-1]
