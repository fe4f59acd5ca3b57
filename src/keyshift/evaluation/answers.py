"""What a model has answered so far, on disk: a stopped evaluation goes on where it was."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyshift.errors import RunError, UserError

COMMIT_SECONDS = 1.0
"""A kill loses the answers of so many seconds; a commit for each would take longer than the answer does."""


class Answers:
    """The answers of one checkpoint in ``FINGERPRINT.sqlite``: another checkpoint has another file.

    SQLite commits as a whole or not at all, so that a kill leaves nothing half-written.
    """

    def __init__(self, folder: Path, fingerprint: str):
        self.path = folder / f"{fingerprint}.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.base = sqlite3.connect(self.path, timeout=60)
            self.base.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) STRICT")
            self.base.commit()
        except OSError as error:
            raise UserError(f"--out: {folder} cannot be written ({error.strerror}); pass another") from error
        except sqlite3.OperationalError as error:
            raise UserError(f"--out: {self.path} cannot be written ({error}); pass another") from error
        except sqlite3.DatabaseError as error:
            raise UserError(f"{self.path} is damaged ({error}); delete it to ask again") from error
        self.committed = time.monotonic()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.base.commit()
        self.base.close()

    def get(self, key: bytes) -> Any:
        """The answer, or None."""
        row = self.base.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: bytes, answer: Any) -> None:
        """Keep an answer, which is not None and survives JSON."""
        try:
            self.base.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))
            if time.monotonic() - self.committed > COMMIT_SECONDS:
                self.base.commit()
                self.committed = time.monotonic()
        except sqlite3.OperationalError as error:
            raise RunError(
                f"cannot write {self.path} ({error}); free some space and run the same again"
            ) from error

    def once(self, key: bytes, compute: Callable[[], Any]) -> Any:
        """The answer to ``key``, computed if there is none."""
        known = self.get(key)
        if known is None:
            known = compute()
            self.put(key, known)
            self.base.commit()
        return known


def key_of(*parts: Any) -> bytes:
    """A request as the key of its answer; parts are plain JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()
