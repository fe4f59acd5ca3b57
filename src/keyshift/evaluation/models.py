"""Which checkpoints are meant: folders, hub names, named seeds, the folder of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keyshift.errors import UserError

WHAT = "pass a checkpoint folder, a hub name, NAME=CHECKPOINT,CHECKPOINT or the folder of a comparison"


@dataclass
class Models:
    """What is evaluated.

    Attributes:
        named: a model's name and its checkpoints, one per seed: folders or hub names.
        remarks: seeds without a checkpoint, seeds trained for different numbers of steps.
    """

    named: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def find_models(arguments: Sequence[str]) -> Models:
    """The models that the words of a command line mean, in order.

    A word is, whichever fits first: the folder of a checkpoint; a folder of ``checkpoint-N`` (one seed of a
    run: the newest is taken), of ``seed-N`` (a variant: all its seeds) or with ``runs/`` (a comparison: all
    its variants, each with its seeds); ``NAME=A,B``, where A and B are such folders, or hub names, of one
    model's seeds; a hub name.

    Raises:
        UserError: no such folder, a folder with no checkpoint, a name or checkpoint given twice.
    """
    models = Models()
    for word in arguments:
        name, assigned, rest = word.partition("=")
        if assigned and not Path(word).expanduser().exists():
            parts = [part for part in rest.split(",") if part]
            if not name or not parts:
                raise UserError(f"CHECKPOINT {word!r}: {WHAT}")
            found = {name: [path for part in parts for path in _flat(part, models)]}
        else:
            found = _expanded(word, models)
        for each, checkpoints in found.items():
            _add(models, each if each not in models.named else _longer(each, checkpoints), checkpoints)
    return models


def _add(models: Models, name: str, checkpoints: list[str]) -> None:
    known = {path for paths in models.named.values() for path in paths}
    twice = [path for index, path in enumerate(checkpoints) if path in known or path in checkpoints[:index]]
    if twice:
        raise UserError(f"CHECKPOINT {twice[0]!r} is given twice; a seed counts once")
    if name in models.named:
        raise UserError(f"CHECKPOINT: two models are called {name!r}; name them, NAME=CHECKPOINT")
    models.named[name] = checkpoints


def _longer(name: str, checkpoints: list[str]) -> str:
    """A name for a second model of the same: the path of its checkpoint."""
    return checkpoints[0] if len(checkpoints) == 1 else name


def _flat(part: str, models: Models) -> list[str]:
    """The checkpoints of one part of ``NAME=…``, which must be of one model."""
    found = _expanded(part, models)
    if len(found) > 1:
        raise UserError(f"CHECKPOINT {part!r} holds {len(found)} variants; pass it without a name before it")
    return next(iter(found.values()))


def _expanded(word: str, models: Models) -> dict[str, list[str]]:
    """The models behind one folder or hub name."""
    folder = Path(word).expanduser()
    if not word:
        raise UserError(f"CHECKPOINT {word!r}: {WHAT}")
    if not folder.is_dir():
        if folder.exists() or folder.is_absolute() or word.startswith((".", "~")):
            what = "not a folder" if folder.exists() else "no such folder"
            raise UserError(f"CHECKPOINT {word!r}: {what}; {WHAT}")
        if word.count("/") > 1:  # a hub name has one at most
            raise UserError(f"CHECKPOINT {word!r}: no such folder; {WHAT}")
        return {word: [word]}
    if (folder / "config.json").exists():
        return {folder.resolve().name: [str(folder)]}
    if newest := _newest(folder):
        return {folder.resolve().name: [newest]}
    if seeds := _seeds(folder, models):
        return {folder.resolve().name: seeds}
    variants = sorted(path for path in (folder / "runs").glob("*") if path.is_dir())
    found = {variant.name: seeds for variant in variants if (seeds := _seeds(variant, models))}
    if not found:
        raise UserError(f"CHECKPOINT {word!r}: neither config.json nor checkpoints in this folder; {WHAT}")
    return found


def _seeds(variant: Path, models: Models) -> list[str]:
    """The newest checkpoint of every ``seed-N``, in the order of seeds."""
    seeds = [path for path in variant.glob("seed-*") if path.name.removeprefix("seed-").isdigit()]
    seeds.sort(key=lambda path: int(path.name.removeprefix("seed-")))
    newest = {seed: _newest(seed) for seed in seeds}
    found = [path for path in newest.values() if path is not None]
    if found:
        models.remarks += [
            f"{seed}: no checkpoint, left out" for seed, path in newest.items() if path is None
        ]
    steps = {Path(path).name for path in found}
    if len(steps) > 1:
        models.remarks.append(f"{variant}: seeds differ in their steps ({', '.join(sorted(steps))})")
    return found


def _newest(folder: Path) -> str | None:
    from keyshift.training import newest_checkpoint

    found = newest_checkpoint(folder)
    return None if found is None else str(found)
