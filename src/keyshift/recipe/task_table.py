"""What a ``[task]`` table says: which task, and its sizes."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from keyshift.errors import UserError, nearest
from keyshift.recipe.wording import key_path, shown
from keyshift.tasks import TASKS, Task


def build_task(table: dict[str, Any], **sizes: int) -> Task:
    """The task of a ``[task]`` table: ``name`` picks it, the rest are its fields.

    ``sizes`` are those of the text that it is mixed with: the table need not give them.

    Raises:
        UserError: an unknown task or field, a value of a wrong type, or one that contradicts ``sizes``.
    """
    kind, fields = task_of(table)
    for field, value in sizes.items():
        if field not in _sizes_of(kind):
            raise UserError(
                f"task.name={table['name']!r} has a {field} of its own and cannot be mixed with text"
            )
        if fields.setdefault(field, value) != value:
            raise UserError(
                f"task.{field}={fields[field]} contradicts the text's {field}={value}; leave it out"
            )
    return kind(**fields)


def task_of(table: dict[str, Any]) -> tuple[type[Task], dict[str, int]]:
    """The class of a ``[task]`` table, and its fields. Raises `UserError` as `build_task`."""
    fields = dict(table)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"task.name={shown(name)} is not known; {nearest(str(name), TASKS)}")
    for field, value in fields.items():
        if field not in _sizes_of(TASKS[name]):
            raise UserError(
                f"{key_path('task', field)} is not known; {nearest(field, _sizes_of(TASKS[name]))}"
            )
        if type(value) is not int:  # true is one by inheritance
            raise UserError(f"task.{field}={shown(value)} must be an integer")
    return TASKS[name], fields


def _sizes_of(task: type[Task]) -> list[str]:
    """The fields of a ``[task]`` table beside its name."""
    return [field.name for field in dataclasses.fields(cast(Any, task))]
