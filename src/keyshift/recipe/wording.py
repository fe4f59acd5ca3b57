"""Keys, values and mistakes of a recipe in words, as its errors quote them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from keyshift.errors import UserError, nearest

WANTED = {"dict_type": "must be a table", "model_type": "must be a table", "list_type": "must be a list"}
"""pydantic's kinds of errors whose own messages speak of Python's types, not of TOML's."""


def keys_of(dotted: str) -> tuple[str, ...]:
    """The keys of ``variants."GVA 0.5".shift``: dots in quotes do not separate."""
    return tuple(key.strip('"') for key in re.split(r'\.(?=(?:[^"]*"[^"]*")*[^"]*$)', dotted))


def key_path(*keys: str) -> str:
    """Keys as TOML writes them, and as `keys_of` reads them."""
    bare = re.compile(r"[A-Za-z0-9_-]+")
    return ".".join(key if bare.fullmatch(key) else json.dumps(key, ensure_ascii=False) for key in keys)


def as_table(value: Any, where: str) -> dict[str, Any]:
    """``value``, which is a table. Raises `UserError`, naming ``where``, if it is none."""
    if not isinstance(value, dict):
        raise UserError(f"{where}={shown(value)} must be a table")
    return value


def shown(value: Any) -> str:
    """A value of the file as errors quote it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_problem(
    error: ValidationError, owner: type[BaseModel], tables: Mapping[str, type[BaseModel]] | None = None
) -> str:
    """The first problem in one line, with the nearest valid key where the key is the problem.

    ``owner`` is what was validated, and ``tables`` are those of its keys that have keys of their own.
    """
    problem = error.errors()[0]
    where = key_path(*(str(part) for part in problem["loc"]))
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] in WANTED:
        return f"{where}={shown(problem['input'])} {WANTED[problem['type']]}"
    if problem["type"] != "extra_forbidden":
        return f"{where}={shown(problem['input'])}: {problem['msg'].lower()}"
    table, key = str(problem["loc"][0]), str(problem["loc"][-1])
    return f"{where} is not known; {nearest(key, (tables or {}).get(table, owner).model_fields)}"
