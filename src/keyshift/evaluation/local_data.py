"""Benchmarks on local copies: folders that tasks read in place of the hub, looked for before all else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keyshift.errors import UserError, first_line

DOCS = "docs/evaluate.md"


def check_local(manager: Any, names: Sequence[str], root: Path) -> None:
    """Refuse a mirror folder that lacks a data set of one of the tasks.

    The data set of a task, such as ``allenai/ai2_arc``, is looked for in ``root/allenai/ai2_arc``.

    Args:
        manager: the harness's TaskManager.
        names: of tasks, groups and tags.

    Raises:
        UserError: no such folder, or one that is missing in it.
    """
    if not root.is_dir():
        raise UserError(f"--data-root={root}: no such folder; pass one with copies of the data sets ({DOCS})")
    for task, dataset in _datasets(manager, names):
        if "/" in dataset and not (root / dataset).is_dir():
            raise UserError(
                f"--data-root={root}: task {task} reads {root / dataset}, which is not there; put a copy of "
                f"the data set {dataset} there ({DOCS})"
            )


def _datasets(manager: Any, names: Sequence[str], above: str = "") -> Iterator[tuple[str, str]]:
    """Every task below ``names``, with the data set that it or a group above it names."""
    for name in names:
        entry = manager.task_index.get(name)
        if entry is None:
            continue
        content = entry.cfg or {}
        dataset = content.get("dataset_path", above)
        yield from _datasets(manager, sorted(entry.tags) if entry.cfg is None else [], dataset)
        yield from _members(manager, content, dataset)
        if isinstance(content.get("task"), str) and isinstance(dataset, str) and dataset:
            yield name, dataset


def _members(manager: Any, content: dict[str, Any], dataset: str) -> Iterator[tuple[str, str]]:
    """The same of a group's members, which may be names, groups of their own, or tasks with changes."""
    members = content.get("task")
    for member in members if isinstance(members, list) else []:
        if isinstance(member, str):
            yield from _datasets(manager, [member], dataset)
        elif isinstance(member.get("task"), list):
            yield from _members(manager, member, member.get("dataset_path", dataset))
        else:
            yield from _datasets(manager, [member.get("task") or member.get("group", "")], dataset)


def load_tasks(manager: Any, names: Sequence[str], root: Path | None) -> dict[str, Any]:
    """The harness's tasks with their data: what its ``TaskManager.load`` returns.

    With ``root`` as working directory, `datasets` takes a data set's name for the folder of that name.

    Raises:
        UserError: data that is not there, unreadable or of another form; a task twice; packages that a task
            needs and that are not installed.
    """
    place = contextlib.nullcontext() if root is None else contextlib.chdir(root)
    try:
        with place:
            loaded: dict[str, Any] = manager.load(list(names))
    except ImportError as error:
        raise UserError(f"--tasks {','.join(names)}: {first_line(error)}") from error
    except Exception as error:  # whatever datasets, the hub and the task's own code make of it
        raise UserError(f"--tasks {','.join(names)}: {_reason(manager, names, root, error)}") from error
    return loaded


def _reason(manager: Any, names: Sequence[str], root: Path | None, error: Exception) -> str:
    said = first_line(error)
    datasets = sorted({dataset for _, dataset in _datasets(manager, names)})
    if root is None:
        where = f", such as DIR/{datasets[0]}" if datasets else ""
        return (
            f"the data cannot be loaded ({said}); to work offline pass --data-root DIR with copies of the "
            f"data sets{where} ({DOCS})"
        )
    if "BuilderConfig" in said or "Config name" in said:
        return (
            f"{said} in {root / datasets[0]}; copy the data set's README.md too, whose first lines say which "
            f"files belong to which configuration ({DOCS})"
        )
    return f"the data in {root} cannot be loaded ({said}); it should be as on the hub ({DOCS})"
