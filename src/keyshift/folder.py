"""A folder of results: one recipe's, one user's at a time, with nothing else in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
from pydantic import ValidationError

from keyshift.errors import UserError, first_line
from keyshift.recipe import Recipe, key_path, shown
from keyshift.runs import write_json, written

RECIPE_FILE = "recipe.json"
WORDS = {"title", "paper", "verdict", "comparisons", "engine", "seeds"}
"""What may change in a recipe without changing a run."""
OWN_FILES = {
    *(RECIPE_FILE, ".lock", "data", ".data.partial", ".data.lock", "jobs", "runs", "figures"),
    *("report.json", "report.html", "report.md"),
}
SHOWN = 3
"""How many differences between two recipes an error quotes."""


@contextmanager
def claimed(out: Path, *, patience: float = 0) -> Iterator[None]:
    """Hold ``out`` for this process, and clear away what a killed one left half-written.

    Raises:
        UserError: another process holds it for longer than ``patience`` seconds, or it cannot be a folder.
    """
    lock = filelock.FileLock(out / ".lock", timeout=patience)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise UserError(f"out={out} is in use by another run; wait for it or pass another --out") from error
    except OSError as error:
        raise UserError(
            f"out={out} cannot be used as a folder ({error.strerror}); pass another --out"
        ) from error
    try:
        for leftover in (*out.glob(".data-*"), *out.glob(".*.tmp")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield
    finally:
        lock.release()


def check_folder(recipe: Recipe, out: Path, *, resume: bool) -> None:
    """Refuse a folder with other things in it, and to overwrite results or mix those of two recipes.

    Raises:
        UserError: as said; of two recipes the first differences are named.
    """
    foreign = sorted(path.name for path in out.iterdir() if path.name not in OWN_FILES)
    if foreign:
        raise UserError(f"out={out} holds other files ({foreign[0]}); pass an empty or new --out")
    kept = out / RECIPE_FILE
    if not kept.exists():
        return
    if not resume:
        raise UserError(f"out={out} holds results already; pass --resume to go on, or another --out")
    try:
        before = Recipe.model_validate_json(kept.read_text()).model_dump(mode="json")
    except ValidationError as error:
        raise UserError(f"{kept} is damaged ({first_line(error)}); pass another --out") from error
    changed = list(_differences(before, recipe.model_dump(mode="json")))
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise UserError(
            f"out={out} was made with a different recipe ({'; '.join(changed[:SHOWN])}{more}); "
            "pass another --out"
        )


def keep_recipe(recipe: Recipe, out: Path) -> None:
    """Write the resolved recipe into ``out``."""
    with written(out):
        write_json(out / RECIPE_FILE, recipe.model_dump(mode="json"))


def _differences(before: Any, now: Any, *keys: str) -> Iterator[str]:
    """What changed, key by key: "training.steps was 10, is 20"."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            if keys or key not in WORDS:
                yield from _differences(before.get(key), now.get(key), *keys, key)
    elif before != now:
        was, is_now = ("unset" if value is None else shown(value) for value in (before, now))
        yield f"{key_path(*keys)} was {was}, is {is_now}"
