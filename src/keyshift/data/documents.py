"""Files to documents: which text files are meant, and what documents they hold, streamed."""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keyshift.data.compression import COMPRESSIONS, opened
from keyshift.errors import UserError, first_line

_DOCUMENT_BYTES = 16 * 1024  # plain text longer than this is cut into several documents
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_PARQUET_ROWS = 256  # read at a time


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The text files that ``paths`` name: absolute, sorted, each file once (whatever links lead to it).

    Each path is a file, a folder (searched recursively, links to folders not followed) or a glob (``**``
    included; a folder it matches is searched). Folders and globs yield the supported suffixes, in either
    case, and skip hidden files and folders; what is named outright is taken even if hidden. Text and JSON
    lines may be compressed: ``.jsonl.gz``, ``.txt.zst``.

    Raises ``UserError`` for a missing path, a path without any supported file, a file named outright with
    another suffix, and a file or folder that may not be read.
    """
    if not paths:
        raise UserError(f"PATH: none given; pass files ({_suffixes()}), folders or globs")
    found = sorted({Path(os.path.abspath(file)) for path in paths for file in _expand(os.fspath(path))})
    unique: dict[Path, Path] = {}
    for file in found:
        _check_readable(file)
        unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _expand(path: str) -> list[str]:
    """The supported files that one argument names."""
    if os.path.isfile(path):
        if not _supported(path):
            raise UserError(f"PATH {path!r}: unsupported suffix; text is read from {_suffixes()}")
        return [path]
    if os.path.isdir(path):
        files = list(_walk(path))
    elif any(character in path for character in "*?["):
        files = []
        for match in glob.glob(path, recursive=True):
            if os.path.isdir(match):
                files += _walk(match)
            elif _supported(match):
                files.append(match)
    else:
        raise UserError(
            f"PATH {path!r}: no such file or folder; pass a file ({_suffixes()}), a folder or a glob"
        )
    if not files:
        raise UserError(
            f"PATH {path!r}: no text files there; {_suffixes()} are read, hidden files are skipped"
        )
    return files


def _walk(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise UserError(
            f"PATH {error.filename!r}: cannot be searched ({error.strerror}); change its permissions"
        )

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = os.path.join(parent, name)
            if not name.startswith(".") and _supported(file):
                yield file


def _supported(path: str | Path) -> bool:
    return _kind(Path(path)) in _READERS and os.path.isfile(path)


def _kind(path: Path) -> str:
    """The suffix that says how a file is read, without that of a compression (parquet compresses inside)."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return before if last in COMPRESSIONS and before != ".parquet" else last


def _suffixes() -> str:
    return f"{', '.join(_READERS)}; all but parquet also compressed: {', '.join(COMPRESSIONS)}"


def _check_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        reason = error.strerror
        raise UserError(f"PATH {str(file)!r}: cannot be read ({reason}); change its permissions") from error


def read_documents(files: Iterable[Path], column: str = "text") -> Iterator[str]:
    """The documents of ``files`` (as ``find_files`` returns them), streamed in order; blank ones skipped.

    - ``.txt``, ``.md``: UTF-8, byte order mark accepted. A file of up to 16 KiB is one document. A longer
      one is cut after the first blank line past each 16 KiB; where the 16 KiB after that hold none, after
      their first newline; where they hold no newline, at 32 KiB. Nothing is dropped and line ends are left
      as they are.
    - ``.jsonl``: one JSON object per line, the document is its string ``column``; blank lines are skipped.
    - ``.parquet``: the column ``column``, nulls skipped.

    Raises ``UserError`` for a binary or wrongly encoded text file (with the byte offset), a malformed line
    (with its number), a corrupt parquet or compressed file, a missing column (with those that are there), a
    file that cannot be read, and when there is no document at all.
    """
    empty = True
    for file in files:
        for document, _ in read_file(file, column):
            empty = False
            yield document
    if empty:
        raise no_text()


def no_text() -> UserError:
    """What to say of files without a single document."""
    return UserError("PATH: the files hold no text, every document is empty; pass files with text")


def read_file(file: Path, column: str) -> Iterator[tuple[str, int]]:
    """The documents of one file, each with the bytes of the file read by then. See ``read_documents``.

    A file without documents is no error here.
    """
    try:
        for document, position in _READERS[_kind(file)](file, column):
            if document and not document.isspace():
                yield document, position
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error


def _read_text(path: Path, column: str) -> Iterator[tuple[str, int]]:
    # Cutting bytes and decoding each piece keeps the offsets in error messages exact. Newlines never fall
    # inside a UTF-8 sequence; after a hard cut the decoder leaves a split character to the next piece.
    with opened(path) as (handle, position):
        offset = 0
        buffer = b""
        while True:
            buffer += handle.read(2 * _DOCUMENT_BYTES - len(buffer))
            if not buffer:
                return
            at_end = len(buffer) < 2 * _DOCUMENT_BYTES
            piece = buffer[: _cut(buffer)]
            if (nul := piece.find(0)) >= 0:
                raise UserError(f"{path}: binary file, NUL at byte {offset + nul}; pass UTF-8 text")
            try:
                document, used = codecs.utf_8_decode(piece, "strict", at_end)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: not UTF-8 at byte {offset + error.start} ({error.reason}); pass UTF-8 text"
                ) from error
            yield document.removeprefix("\ufeff") if offset == 0 else document, position()
            offset += used
            buffer = buffer[used:]


def _cut(buffer: bytes) -> int:
    """Where the document at the start of ``buffer`` (up to 32 KiB) ends; see ``read_documents``."""
    if blank := _BLANK_LINE.search(buffer, _DOCUMENT_BYTES):
        return blank.end()
    return buffer.find(b"\n", _DOCUMENT_BYTES) + 1 or len(buffer)


def _read_jsonl(path: Path, column: str) -> Iterator[tuple[str, int]]:
    with opened(path) as (handle, position):
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            row: Any = None
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                document = row[column]
                document.encode()  # a string, and one without the lone surrogates that JSON can spell
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                fields = f", its fields: {', '.join(row)}" if isinstance(row, dict) else ""
                raise UserError(
                    f'{path}:{number}: not a JSON object with a string "{column}" '
                    f"({type(error).__name__}: {first_line(error)}{fields}); "
                    f'each line should be like {{"{column}": "..."}}, or pass another column'
                ) from error
            yield document, position()


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, int]]:
    import pyarrow
    from pyarrow import parquet

    size = path.stat().st_size
    rows = 0
    try:
        # With a buffer pyarrow streams the pages of a row group; without, it reads the column chunk at once.
        with parquet.ParquetFile(path, buffer_size=1024 * 1024) as file:
            columns = file.schema_arrow.names
            if column not in columns:
                raise UserError(f'{path}: no column "{column}"; its columns: {", ".join(columns)}')
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[column]):
                for document in batch.column(0).to_pylist():
                    rows += 1
                    if document is None:
                        continue
                    if not isinstance(document, str):
                        kind = type(document).__name__
                        raise UserError(
                            f'{path}: column "{column}" holds {kind} values; it should hold strings'
                        )
                    yield document, size * rows // file.metadata.num_rows
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path}: corrupt parquet file after row {rows} ({first_line(error)}); write it again"
        ) from error


_READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, int]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
