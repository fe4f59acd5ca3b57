"""Compressed files opened as what they hold."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from keyshift.errors import UserError, first_line


def _open_zstd(raw: BinaryIO) -> io.BufferedReader:
    import pyarrow

    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return io.BufferedReader(stream)


_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
}
COMPRESSIONS = tuple(_OPENERS)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The content of ``path``, decompressed if its suffix says so, and how much of the file was read so far.

    Raises ``UserError`` for a compressed file that is damaged or cut off.
    """
    suffix = path.suffix.lower()
    with path.open("rb") as raw:
        if suffix not in _OPENERS:
            yield raw, raw.tell
            return
        try:
            with _OPENERS[suffix](raw) as stream:
                yield stream, raw.tell
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = first_line(error)
            raise UserError(f"{path}: damaged or cut off ({reason}); compress or fetch it again") from error
