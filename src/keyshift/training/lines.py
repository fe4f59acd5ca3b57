"""Files of lines that grow while a run goes on, such as ``metrics.jsonl``: JSON, whatever else watches it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from keyshift.errors import RunError


class Lines:
    """One file of a run. Lines are whole, in order, and none is of a step that was taken again.

    Args:
        writing: False in all processes but the first: nothing is written then.
    """

    def __init__(self, path: Path, *, writing: bool):
        self.path, self.writing = path, writing

    def keep_until(self, step: int) -> None:
        """Drop lines after ``step``, from which training goes on, and what a kill left unfinished."""
        if not self.writing or not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if step and _step(line) <= step]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        os.replace(temporary, self.path)

    def write(self, entry: dict[str, Any]) -> None:
        """Append an entry; it has a ``step``.

        Raises:
            RunError: it cannot be written; half a line may stay, which `keep_until` drops.
        """
        if not self.writing:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({name: _finite(value) for name, value in entry.items()}) + "\n")
        except OSError as error:
            raise RunError(
                f"cannot write {self.path} at step {entry['step']} ({error.strerror}); "
                "checkpoints are intact: free some space and resume"
            ) from error


def _finite(value: Any) -> Any:
    """A number that JSON has, or null: it knows neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(line: str) -> float:
    """The step of a line; infinity for one that was not finished."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")
