"""Data sets of Hugging Face as sources of documents: on the hub or in a folder, streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyshift.data.sources import file_facts
from keyshift.errors import RunError, UserError, first_line

if TYPE_CHECKING:
    from datasets import IterableDataset

_SAVED = ("dataset_dict.json", "state.json")  # of a folder that `save_to_disk` wrote


@dataclass
class DatasetSource:
    """A column of a data set: of one on the hub, a local folder of data files, or one of ``save_to_disk``.

    Nothing is loaded until it is needed. Raises ``UserError`` then, if the library ``datasets`` is missing,
    the hub cannot be reached, or there is no such configuration, split or column.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"

    @property
    def size(self) -> int:
        """Bytes of all columns, where the data set says so; else 0."""
        splits = self.stream().info.splits or {}
        return (splits[self.split].num_bytes or 0) if self.split in splits else 0

    def facts(self) -> list[Any]:
        return [self.name, self.config, self.split, self.column, self._opened[1]]

    def read(self, position: Any = None) -> DatasetReading:
        return DatasetReading(self, position or {"examples": 0, "bytes": 0, "state": None})

    def stream(self) -> IterableDataset:
        """The column as a data set of its own, not begun."""
        return self._opened[0]().select_columns([self.column])

    @cached_property
    def _opened(self) -> tuple[Callable[[], IterableDataset], Any]:
        """What makes a stream, and what tells this state of the data from others."""
        try:
            import datasets
        except ImportError as error:
            raise UserError(
                f"dataset {self.name!r} needs the library datasets; pip install 'keyshift[data]'"
            ) from error
        try:
            make, facts = self._open(datasets)
            columns = make().column_names or list(next(iter(make()), {}))
        except UserError:
            raise
        except Exception as error:  # whatever the hub, the network or a file system have to say
            raise self._failed(error) from error
        if self.column not in columns:
            raise UserError(
                f"column {self.column!r} is not in dataset {self.name!r}; its columns: {', '.join(columns)}"
            )
        return make, facts

    def _open(self, datasets: Any) -> tuple[Callable[[], IterableDataset], Any]:
        folder = Path(self.name)
        if any((folder / file).exists() for file in _SAVED):
            saved = datasets.load_from_disk(self.name)
            if isinstance(saved, dict):
                if self.split not in saved:
                    splits = ", ".join(saved)
                    raise UserError(f"split {self.split!r} is not in dataset {self.name!r}; it has {splits}")
                saved = saved[self.split]
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            return saved.to_iterable_dataset, [file_facts(path) for path in paths]
        builder = datasets.load_dataset_builder(self.name, self.config)
        files = builder.config.data_files or {}
        facts = [[list(files[split]), files[split].origin_metadata] for split in sorted(files)]
        return partial(builder.as_streaming_dataset, split=self.split), [str(builder.hash), facts]

    def _failed(self, error: Exception) -> UserError:
        reason = first_line(error)
        if isinstance(error, ConnectionError):
            return UserError(
                f"dataset {self.name!r}: the hub cannot be reached ({reason}); to work offline pass a local "
                "folder of its files, or set HF_HUB_OFFLINE=1 if load_dataset has it in its cache"
            )
        return UserError(
            f"dataset {self.name!r} (config {self.config}, split {self.split}) cannot be opened ({reason}); "
            "pass a name on the hub or a folder with data files, with a config and a split that it has"
        )


class DatasetReading:
    """A ``Reading`` of a data set. A position is the state of its stream, and what was counted until then.

    A data set that cannot tell its state is read again from the start, without tokenising anything.
    """

    def __init__(self, source: DatasetSource, begin: dict[str, Any]):
        self._source, self._begin = source, begin
        self._stream = source.stream()
        self._examples: int = begin["examples"]
        self.bytes_read: int = begin["bytes"]

    @property
    def position(self) -> dict[str, Any]:
        if self._examples == self._begin["examples"]:
            return self._begin
        try:
            state = self._stream.state_dict()
        except NotImplementedError:
            state = None
        return {"examples": self._examples, "bytes": self.bytes_read, "state": state}

    def __iter__(self) -> Iterator[str]:
        skip = self._begin["examples"]
        if self._begin["state"] is not None:
            self._stream.load_state_dict(self._begin["state"])
            skip = 0
        examples = iter(self._stream)
        while True:
            try:
                example = next(examples)
            except StopIteration:
                break
            except Exception as error:  # whatever the network or a file has to say
                raise RunError(
                    f"dataset {self._source.name!r} stopped after {self._examples} examples "
                    f"({first_line(error)}); the same command goes on from there"
                ) from error
            if skip:
                skip -= 1
                continue
            self._examples += 1
            if document := self._document(example):
                yield document
        if self._examples == 0:
            raise UserError(f"dataset {self._source.name!r} is empty; pass another split or data set")

    def _document(self, example: dict[str, Any]) -> str | None:
        """The text of an example; None if it is blank."""
        document = example[self._source.column]
        if document is None:
            return None
        if not isinstance(document, str):
            raise UserError(
                f"column {self._source.column!r} of dataset {self._source.name!r} holds "
                f"{type(document).__name__} values; it should hold strings"
            )
        self.bytes_read += len(document.encode())
        return None if document.isspace() else document
