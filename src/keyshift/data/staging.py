"""The folder in which a store is made: finished shards wait there for the others, and outlive a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from keyshift.data.shards import missing_files
from keyshift.errors import UserError


@dataclass
class Record:
    """A finished shard: what ``meta.json`` says of it, and where its source went on after it.

    bytes_read: of the source, up to its end.
    """

    sides: dict[str, Any]
    position: Any
    bytes_read: int


@dataclass
class Staging:
    """``.NAME.partial`` beside a store: the store so far, and a record of every finished shard."""

    folder: Path
    finished: dict[int, Record] = field(default_factory=dict)

    @classmethod
    def beside(cls, directory: Path) -> Staging:
        return cls(directory.with_name(f".{directory.name}.partial"))

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @contextmanager
    def claimed(self, fingerprint: str) -> Iterator[None]:
        """Holds the folder for this process; what another plan left there is removed, what this one left is
        taken up. If the block fails before any shard is finished, nothing is left.

        Raises ``UserError`` if another process holds it.
        """
        self.folder.mkdir(exist_ok=True)
        lock = filelock.FileLock(self.folder / "lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            name = str(self.folder.with_name(self.folder.name[1:].removesuffix(".partial")))
            raise UserError(
                f"directory {name!r}: another process is preparing it; wait for it or choose another"
            ) from error
        try:
            self._take_up(fingerprint)
            yield
        except BaseException:
            if not self.finished:
                shutil.rmtree(self.folder)
            raise
        finally:
            lock.release()

    def _take_up(self, fingerprint: str) -> None:
        plan = self.folder / "plan"
        if not plan.exists() or plan.read_text(encoding="utf-8") != fingerprint:
            for entry in self.folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
            plan.write_text(fingerprint, encoding="utf-8")
        self._records.mkdir(exist_ok=True)
        self.store.mkdir(exist_ok=True)
        for half in (*self.store.glob(".*.tmp"), *self._records.glob(".*.tmp")):
            half.unlink()
        for path in sorted(self._records.iterdir()):
            record = Record(**json.loads(path.read_text(encoding="utf-8")))
            if missing_files(self.store, int(path.stem), record.sides):
                path.unlink()
            else:
                self.finished[int(path.stem)] = record

    @property
    def _records(self) -> Path:
        return self.folder / "records"

    def record(self, number: int, record: Record) -> None:
        """Keeps that a shard, whose files are there, is finished."""
        path = self._records / f"{number}.json"
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(vars(record)), encoding="utf-8")
        temporary.replace(path)
        self.finished[number] = record

    def next(self) -> int:
        """The first shard that is not finished."""
        return next(number for number in range(len(self.finished) + 1) if number not in self.finished)
