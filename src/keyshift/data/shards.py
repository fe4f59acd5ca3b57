"""A shard: a block of documents as token ids, in memory or in files that are mapped on first use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keyshift.data.encoding import Encoder

SIDES = ("train", "validation")
PARTS = ("tokens", "documents")


class Shard(Protocol):
    """Documents end to end, each the separator token followed by its tokens and perhaps an end token."""

    @property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """[N] uint16 or uint32."""
        ...

    @property
    def document_starts(self) -> NDArray[np.int64]:
        """[D], ascending: where in ``tokens`` each document's separator is. The first is 0."""
        ...

    @property
    def token_count(self) -> int: ...

    @property
    def document_count(self) -> int: ...

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the documents."""
        ...


@dataclass(frozen=True, eq=False)
class MemoryShard:
    """A shard that is held as arrays; see ``Shard``."""

    tokens: NDArray[np.unsignedinteger]
    document_starts: NDArray[np.int64]
    text_bytes: int

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        return len(self.document_starts)


@dataclass(frozen=True, eq=False)
class FileShard:
    """A shard of a store, see ``Shard``. Its files are mapped when first used; pickled, it is their names."""

    tokens_file: Path
    documents_file: Path
    dtype: str
    token_count: int
    document_count: int
    text_bytes: int

    @classmethod
    def of(cls, folder: Path, number: int, side: str, counts: dict[str, Any], dtype: str) -> FileShard:
        """Side ``side`` of shard ``number`` in ``folder``, described by ``counts`` as ``meta.json`` does."""
        tokens, documents = (shard_file(folder, number, side, part) for part in PARTS)
        return cls(tokens, documents, dtype, counts["tokens"], counts["documents"], counts["bytes"])

    @cached_property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        return _mapped(self.tokens_file, self.dtype, self.token_count)

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        return _mapped(self.documents_file, "int64", self.document_count)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _mapped(path: Path, dtype: str, count: int) -> NDArray[Any]:
    # Of all ways to map a file only torch's lets go of the file itself: stores have thousands of files, and
    # processes often no more than 1,024 to open.
    import torch

    if count == 0:
        return np.empty(0, dtype)
    array = torch.from_file(str(path), shared=False, size=count, dtype=getattr(torch, dtype)).numpy()
    array.flags.writeable = False
    return array


def shard_file(folder: Path, number: int, side: str, part: str) -> Path:
    return folder / f"{number:05}.{side}.{part}"


def missing_files(folder: Path, number: int, sides: dict[str, Any]) -> list[Path]:
    """The files of a shard that are not there, or not as long as its description ``sides`` says."""
    wanted = {
        shard_file(folder, number, side, part): sides[side]["files"][part]["size"]
        for side in SIDES
        for part in PARTS
    }
    return [path for path, size in wanted.items() if not path.is_file() or path.stat().st_size != size]


def write_shard(folder: Path, number: int, documents: Iterable[str], encoder: Encoder) -> dict[str, Any]:
    """Tokenises ``documents`` into the files of shard ``number``; returns what ``meta.json`` says of them.

    The files appear whole, when all is done.
    """
    with ExitStack() as stack:
        writers = {
            side: _Writer(
                {part: stack.enter_context(_Part(shard_file(folder, number, side, part))) for part in PARTS},
                encoder.dtype,
            )
            for side in SIDES
        }
        for document, tokens in encoder.encoded(documents):
            side = "validation" if encoder.held_out(document) else "train"
            writers[side].append(tokens, len(document.encode()))
        return {side: writer.finish() for side, writer in writers.items()}


class _Writer:
    """The two files of one side while they are written."""

    def __init__(self, parts: dict[str, _Part], dtype: np.dtype[Any]):
        self._counts = {"tokens": 0, "documents": 0, "bytes": 0}
        self._parts, self._dtype = parts, dtype

    def append(self, tokens: list[int], text_bytes: int) -> None:
        self._parts["documents"].write(np.int64(self._counts["tokens"]).tobytes())
        self._parts["tokens"].write(np.array(tokens, self._dtype).tobytes())
        self._counts["tokens"] += len(tokens)
        self._counts["documents"] += 1
        self._counts["bytes"] += text_bytes

    def finish(self) -> dict[str, Any]:
        return {**self._counts, "files": {name: part.finish() for name, part in self._parts.items()}}


class _Part:
    """One file, hashed while it is written; under another name until it is finished."""

    def __init__(self, path: Path):
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._handle = self._temporary.open("wb")
        self._hash = hashlib.sha256()

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, content: bytes) -> None:
        self._handle.write(content)
        self._hash.update(content)

    def finish(self) -> dict[str, Any]:
        self._handle.flush()
        os.fsync(self._handle.fileno())  # what is recorded as finished survives a crash of the machine
        size = self._handle.tell()
        self._handle.close()
        self._temporary.replace(self._path)
        return {"size": size, "sha256": self._hash.hexdigest()}
