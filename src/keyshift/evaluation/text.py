"""Passages of held-out text: from files, or from the validation side of a prepared store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from keyshift.data import TextData, find_files, load_tokenizer, read_documents
from keyshift.errors import UserError
from keyshift.opened import Opened


def held_out(path: Path) -> Iterator[str]:
    """The documents of ``path``, streamed: of a store that ``keyshift.data.prepare`` wrote, those it holds
    out, as text again, so that a model with any tokenizer can read them; otherwise of text files.

    Raises:
        UserError: no such path, no text in it, or text that cannot be read.
    """
    if not (path / "meta.json").exists():
        yield from read_documents(find_files([path]))
        return
    store = TextData.open(path)
    tokenizer = load_tokenizer(store.tokenizer_path)
    for ids in store.validation.documents():
        yield tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)


def passages(opened: Opened, path: Path, length: int, limit: int) -> Tensor:
    """`pieces` of text that has some.

    Raises:
        UserError: no document is as long; what `held_out` refuses.
    """
    found = pieces(opened, path, length, limit)
    if not len(found):
        raise UserError(f"--text={path}: no document has {length} tokens; pass longer text")
    return found


def pieces(opened: Opened, path: Path, length: int, limit: int) -> Tensor:
    """Consecutive pieces of ``length`` tokens, the start token not counted: [S, length], S at most ``limit``.

    Every document is cut from its beginning; what remains at its end, and shorter documents, are left out.
    Raises `UserError`: what `held_out` refuses.
    """
    found: list[list[int]] = []
    for document in held_out(path):
        ids = opened.tokenizer.encode(document, add_special_tokens=False)
        found += [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)]
        if len(found) >= limit:
            break
    return torch.tensor(found[:limit], dtype=torch.long).reshape(-1, length)
