"""Small texts in the formats that are read, and how errors about them look."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from keyshift.errors import UserError


@contextmanager
def fails(*parts: object) -> Iterator[None]:
    """The block raises a UserError of one line with all ``parts`` in it."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def write(path: Path, content: str | bytes = "some text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_jsonl(path: Path, documents: list[str]) -> Path:
    return write(path, "".join(json.dumps({"text": document}) + "\n" for document in documents))


def write_parquet(path: Path, column: Any, **options: Any) -> Path:
    parquet.write_table(pa.table(column), path, **options)
    return path


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(50)]
    return [f"{number}: " + " ".join(rng.choices(words, k=rng.randint(3, 30))) for number in range(count)]
