"""Where documents come from: what a source has to answer, and files as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from keyshift.data.documents import find_files, no_text, read_file


class Reading(Protocol):
    """Documents on their way."""

    bytes_read: int
    """Of the source's ``size``, also those before the position that it began at."""

    @property
    def position(self) -> Any:
        """Where to go on after the last document that was given: JSON, for ``Source.read``."""
        ...

    def __iter__(self) -> Iterator[str]:
        """The documents that are not blank. To be called once."""
        ...


class Source(Protocol):
    """Documents in a fixed order."""

    @property
    def size(self) -> int:
        """Bytes to read; 0 if that is not known."""
        ...

    def facts(self) -> Any:
        """What tells this source from another, and from itself once its content changed: JSON."""
        ...

    def read(self, position: Any = None) -> Reading:
        """From a position on, by default from the beginning."""
        ...


@dataclass
class FileSource:
    """The documents of local files, see ``find_files`` and ``read_documents``.

    Raises ``UserError`` for what these reject: at once for paths, when it is read for what is in them.
    """

    paths: Sequence[str | Path]
    column: str = "text"
    files: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.files = find_files(self.paths)

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def facts(self) -> list[Any]:
        return [self.column, [file_facts(file) for file in self.files]]

    def read(self, position: Any = None) -> FileReading:
        return FileReading(self.files, self.column, *(position or (0, 0, 0)))


def file_facts(file: Path) -> tuple[str, int, int]:
    """Where a file is, its size and when it changed."""
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns


class FileReading:
    """A ``Reading`` of files. A position is a file's number, how many documents it gave, bytes read.

    A file that was begun is read again from its start, which costs a small part of tokenising it.
    """

    def __init__(self, files: list[Path], column: str, file: int, documents: int, bytes_read: int):
        self._files, self._column = files, column
        self.position = (file, documents, bytes_read)
        self.bytes_read = bytes_read

    def __iter__(self) -> Iterator[str]:
        first, given, _ = self.position
        earlier = sum(file.stat().st_size for file in self._files[:first])
        for number, file in enumerate(self._files[first:], start=first):
            for count, (document, position) in enumerate(read_file(file, self._column), start=1):
                if number == first and count <= given:
                    continue
                self.bytes_read = earlier + position
                self.position = (number, count, self.bytes_read)
                yield document
            earlier += file.stat().st_size
            self.bytes_read = earlier
        if self.position[:2] == (0, 0):
            raise no_text()
