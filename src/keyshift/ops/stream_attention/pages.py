"""Streams cut into pages: what lengths and block tables may say, and pages put together to sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def check_lengths(lengths: list[int], new: int, page: int, tables_BP: Tensor | None) -> None:
    """Every sequence holds its new tokens, and its slots exist.

    Args:
        lengths: slots of each sequence.
        new: Q.
        page: slots of a page, or of every sequence if there is no table.

    Raises:
        ValueError: one does not.
    """
    total = page if tables_BP is None else page * tables_BP.shape[1]
    if min(lengths) < new or max(lengths) > total:
        most = f"T={total}"
        if tables_BP is not None:
            most = f"{total}, the slots of block_tables_BP's P={tables_BP.shape[1]} pages"
        raise ValueError(f"lengths_B {lengths} must be from Q={new} to {most}")


def no_page(sequence: int, pages: int) -> ValueError:
    """The error where a sequence's entries name a page that does not exist."""
    return ValueError(f"block_tables_BP: sequence {sequence} has a page that is not from 0 to {pages - 1}")


def readable(
    tables_BP: Tensor, lengths_B: Tensor, starts_BQ: Tensor | None, *, pages: int, page: int, new: int
) -> tuple[Tensor, Tensor]:
    """The tables up to the longest sequence, page 0 where nothing is read; and which slots are read, [B, T].

    Args:
        tables_BP, lengths_B, starts_BQ: see `keyshift.ops.stream_attention.api.stream_attention`.
        pages: how many there are.
        page: slots of a page.
        new: Q.

    Raises:
        ValueError: a length that does not fit; a page that is read and does not exist.
    """
    eager = not torch.compiler.is_compiling()  # else nothing may depend on what tensors hold
    if eager:
        lengths = lengths_B.tolist()
        check_lengths(lengths, new, page, tables_BP)
        tables_BP = tables_BP[:, : -(-max(lengths) // page)]
    slots = torch.arange(tables_BP.shape[1] * page, device=tables_BP.device)
    read_BT = slots < lengths_B[:, None]
    if starts_BQ is not None:
        read_BT = read_BT & (slots >= starts_BQ.amin(1, keepdim=True))
    tables_BP = tables_BP.masked_fill(~read_BT.unflatten(1, (-1, page)).any(-1), 0)
    if eager and (lacking_B := ((tables_BP < 0) | (tables_BP >= pages)).any(1)).any():
        raise no_page(int(lacking_B.nonzero()[0]), pages)
    return tables_BP, read_BT


def whole(stream: Tensor, tables_BP: Tensor, read_BT: Tensor) -> Tensor:
    """A stream, or scales, sequence by sequence as without a table; 0 where nothing is read."""
    slots = stream.dim() - 2
    together = stream[tables_BP].movedim(1, slots).flatten(slots, slots + 1)
    read = read_BT[:, None, :, None] if stream.dim() == 4 else read_BT[..., None]
    return together.masked_fill(~read, 0)
