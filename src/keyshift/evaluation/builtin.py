"""What the built-in tasks share: their settings, and what they measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keyshift.data import find_files
from keyshift.errors import UserError


class Measure(NamedTuple):
    """One number, and how many passages or keys it is over."""

    metric: str
    value: float
    questions: int


@dataclass(frozen=True)
class Settings:
    """How built-in tasks are run.

    Attributes:
        text: files, a folder, or a prepared store.
        limit: passages, or keys per length and depth; None is the task's own number.
        batch_size: sequences in one call of the model.
    """

    text: Path | None
    limit: int | None
    batch_size: int

    def text_for(self, task: str) -> Path:
        """The text, which ``task`` needs. Raises `UserError` if there is none."""
        if self.text is None:
            raise UserError(f"--tasks {task} reads held-out text; pass files or a prepared store with --text")
        return self.text

    def text_state(self) -> list[list[str | int]]:
        """The text's files, their sizes and when they changed: what has been read of others says nothing."""
        if self.text is None:
            return []
        store = self.text / "meta.json"
        files = [store] if store.exists() else find_files([self.text])
        return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
